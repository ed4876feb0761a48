"""A script that knows nothing of autotune but prints its accuracy as JSON.

``tune_a_script.py`` tunes it.
"""

import argparse
import json

import torch
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--batch-size", type=int, default=32)
arguments = parser.parse_args()

digits = load_digits()
inputs, targets = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
for epoch in range(1, 61):
    for chosen in torch.randperm(1400).split(arguments.batch_size):
        loss = nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (model(inputs[1400:]).argmax(1) == targets[1400:]).float().mean().item()
    print(json.dumps({"accuracy": accuracy, "epoch": epoch}))
