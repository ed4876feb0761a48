"""A Hydra app that prints a line of JSON after each epoch. ``tune_a_hydra_app.py`` tunes it."""

import json
from dataclasses import dataclass, field

import hydra
import torch
from hydra.core.config_store import ConfigStore
from sklearn.datasets import load_digits
from torch import distributed, nn


@dataclass
class Model:
    width: int = 64


@dataclass
class Config:
    model: Model = field(default_factory=Model)
    lr: float = 1e-3


ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(config):
    distributed.init_process_group()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    inputs, targets = (torch.tensor(array) for array in load_digits(return_X_y=True))
    inputs = inputs.float() / 16
    width = config.model.width
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    for epoch in range(1, 31):
        for rows in torch.randperm(1500).split(64):
            mine = rows[rank::size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[mine]), targets[mine]).backward()
            optimizer.step()
        if rank == 0:  # one process tells
            right = (model.module(inputs[1500:]).argmax(1) == targets[1500:]).float().mean().item()
            print(json.dumps({"accuracy": right, "epoch": epoch}))


if __name__ == "__main__":
    main()
