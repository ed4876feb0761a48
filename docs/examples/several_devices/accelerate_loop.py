"""A loop with Accelerate on two devices: no ``accelerate launch``, no ``notebook_launcher``."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autotune


def fit(lr=1e-3, batch_size=32):
    accelerator = Accelerator()
    set_seed(0)
    inputs, targets = (torch.tensor(array) for array in load_digits(return_X_y=True))
    data = TensorDataset(inputs.float() / 16, targets)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer, train, validation = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=lr),
        DataLoader(torch.utils.data.Subset(data, range(1500)), batch_size, shuffle=True),
        DataLoader(torch.utils.data.Subset(data, range(1500, 1797)), 64),
    )
    parts = {"model": model, "optimizer": optimizer}
    start = autotune.checkpoint().load(parts).get("epoch", 0)
    for epoch in range(start, 30):
        for batch, labels in train:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(batch), labels))
            optimizer.step()
        right = []
        with torch.no_grad():
            for batch, labels in validation:
                right += accelerator.gather_for_metrics(model(batch).argmax(1) == labels).tolist()
        autotune.checkpoint().save({**parts, "epoch": epoch + 1})
        autotune.report(sum(right) / len(right), epoch=epoch + 1)


if __name__ == "__main__":
    result = autotune.tune(
        fit,
        space={"lr": autotune.log(1e-4, 1e-1), "batch_size": autotune.power_of_two(16, 128)},
        target=autotune.target("accuracy", at_least=0.9, max_seconds=60),
        devices=2,
        trials=20,
    )
    print(result.best, result.speed_up)
