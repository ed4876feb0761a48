"""A loop with DistributedDataParallel, called once on each of two devices."""

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn

import autotune


def fit(lr=1e-3, batch_size=64):
    distributed.init_process_group()  # RANK, WORLD_SIZE, MASTER_ADDR, ... are set, as by torchrun
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    inputs, targets = (torch.tensor(array) for array in load_digits(return_X_y=True))
    inputs = inputs.float() / 16
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    parts = {"model": model, "optimizer": optimizer}
    start = autotune.checkpoint().load(parts).get("epoch", 0)
    for epoch in range(start, 30):
        for rows in torch.randperm(1500).split(batch_size):
            mine = rows[rank::size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[mine]), targets[mine]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(inputs[1500:]).argmax(1) == targets[1500:]).float().mean().item()
        autotune.checkpoint().save({**parts, "epoch": epoch + 1})
        autotune.report(accuracy, epoch=epoch + 1)


if __name__ == "__main__":
    result = autotune.tune(
        fit,
        space={"lr": autotune.log(1e-4, 1e-1), "batch_size": autotune.power_of_two(32, 256)},
        target=autotune.target("accuracy", at_least=0.9, max_seconds=30),
        devices=2,
        trials=20,
    )
    print(result.best, result.speed_up)
