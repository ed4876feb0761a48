"""A textbook script, a small convolutional network on Fashion-MNIST, and what tunes it: python
fashion_mnist.py FOLDER_OF_THE_FILES.
"""

import gzip
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autotune


def read(path, header):
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)


def load(folder):
    images = read(Path(folder) / "train-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)
    targets = read(Path(folder) / "train-labels-idx1-ubyte.gz", 8)
    dataset = TensorDataset(
        torch.tensor(images / 255, dtype=torch.float32), torch.tensor(targets, dtype=torch.int64)
    )
    num_validation = len(dataset) // 12
    return TensorDataset(*dataset[:-num_validation]), TensorDataset(*dataset[-num_validation:])


def train(folder, lr=1e-3, batch_size=64, width=32, schedule="constant", num_epochs=5):
    with autotune.building():
        training, validation = load(folder)
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(49 * width, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    loader = DataLoader(training, batch_size, shuffle=True)
    num_steps = num_epochs * len(loader)
    factor = {"constant": lambda step: 1.0, "linear": lambda step: 1 - step / num_steps}[schedule]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    num_parts = 4 * num_epochs  # the accuracy is looked at four times an epoch
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    start = autotune.checkpoint().load(parts).get("part", 0)
    for part in range(start, num_parts):
        for _, (images, targets) in zip(range(num_steps // num_parts), loader, strict=False):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), targets).backward()
            optimizer.step()
            scheduler.step()
        with autotune.evaluating(), torch.no_grad():
            right = [
                (model(images).argmax(1) == targets).float()
                for images, targets in DataLoader(validation, 1000)
            ]
        accuracy = torch.cat(right).mean()
        print(f"epoch {(part + 1) / 4:.2f}: {accuracy:.4f}")
        autotune.checkpoint().save({**parts, "part": part + 1})
        autotune.report(accuracy, epoch=(part + 1) / 4)


if __name__ == "__main__":
    result = autotune.tune(
        train,
        space={
            "lr": autotune.log(1e-4, 3e-2),
            "batch_size": autotune.power_of_two(16, 512),
            "width": [8, 16, 32],
            "schedule": ["constant", "linear"],
            "num_epochs": autotune.integer(1, 5),
        },
        baseline={
            "folder": sys.argv[1],
            "lr": 1e-3,
            "batch_size": 64,
            "width": 32,
            "schedule": "constant",
            "num_epochs": 5,
        },
        target=autotune.target("accuracy", at_least=0.88, max_seconds=120),
        time_budget_seconds=300,
        confirm={"budget_fraction": 1.0},
        name="fashion_mnist",
    )
    print(result.best, result.speed_up, result.speed_up_interval)
