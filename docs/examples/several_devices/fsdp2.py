"""A model of your own that ``fully_shard`` divides among two devices, with its optimizer."""

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import autotune


def fit(device, devices, lr=1e-3, width=64):
    distributed.init_process_group()
    rank = distributed.get_rank()
    torch.manual_seed(0)
    inputs, targets = (torch.tensor(array).to(device) for array in load_digits(return_X_y=True))
    inputs = inputs.float() / 16
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)).to(device)
    mesh = distributed.init_device_mesh(device.type, (devices,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    parts = {"model": model, "optimizer": optimizer}
    start = autotune.checkpoint().load(parts).get("epoch", 0)
    for epoch in range(start, 30):
        for rows in torch.randperm(1500).split(64):
            mine = rows[rank::devices]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[mine]), targets[mine]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(inputs[1500:]).argmax(1) == targets[1500:]).float().mean().item()
        autotune.checkpoint().save({**parts, "epoch": epoch + 1})  # each process writes its part
        autotune.report(accuracy, epoch=epoch + 1)


if __name__ == "__main__":
    result = autotune.tune(
        fit,
        space={"lr": autotune.log(1e-4, 1e-1), "width": autotune.power_of_two(16, 256)},
        target=autotune.target("accuracy", at_least=0.9, max_seconds=30),
        devices=2,
        trials=20,
    )
    print(result.best, result.speed_up)
