"""A loop with Accelerate on scikit-learn's digits, tuned with five lines."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autotune


def fit(lr=1e-3, width=32, batch_size=32):
    accelerator = Accelerator()
    digits = load_digits()
    dataset = TensorDataset(
        torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    )
    train, validation = torch.utils.data.random_split(
        dataset, [1400, 397], torch.Generator().manual_seed(0)
    )
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, DataLoader(train, batch_size, shuffle=True), DataLoader(validation, 397)
    )
    start = autotune.checkpoint().load({"model": model, "optimizer": optimizer}).get("epoch", 0)
    for epoch in range(start, 30):
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
        with torch.no_grad():
            accuracy = (
                sum(
                    (model(inputs).argmax(1) == targets).sum().item()
                    for inputs, targets in val_loader
                )
                / 397
            )
        autotune.checkpoint().save({"model": model, "optimizer": optimizer, "epoch": epoch + 1})
        autotune.report(accuracy, epoch=epoch + 1)


if __name__ == "__main__":
    result = autotune.tune(
        fit,
        space={
            "lr": autotune.log(1e-4, 1e-1),
            "width": [16, 32, 64, 128],
            "batch_size": autotune.power_of_two(16, 256),
        },
        target=autotune.target("accuracy", at_least=0.95, max_seconds=30),
        trials=20,
    )
    print(result.best, result.speed_up)
