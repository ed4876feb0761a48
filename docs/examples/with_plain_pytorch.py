"""A GRU that remembers a token, in a loop with its own schedule and clipping, tuned with five
lines.
"""

import torch
from torch import nn

import autotune


def sequences(num, length=12):
    """Tokens 1 to 4 and a target each: the token that stands after the 0."""
    tokens = torch.randint(1, 5, (num, length))
    places = torch.randint(0, length - 1, (num,))
    tokens[torch.arange(num), places] = 0
    return tokens, tokens[torch.arange(num), places + 1]


class Memory(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 5)

    def forward(self, tokens):
        return self.head(self.gru(self.embedding(tokens))[0][:, -1])


def fit(lr=3e-3, width=32, batch_size=32, max_norm=1.0):
    torch.manual_seed(0)
    (tokens, targets), (val_tokens, val_targets) = sequences(2048), sequences(512)
    model = Memory(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    start = autotune.checkpoint().load(parts).get("epoch", 0)
    for epoch in range(start, 30):
        for chosen in torch.randperm(2048).split(batch_size):
            loss = nn.functional.cross_entropy(model(tokens[chosen]), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        schedule.step()
        with torch.no_grad():
            accuracy = (model(val_tokens).argmax(1) == val_targets).float().mean().item()
        autotune.checkpoint().save({**parts, "epoch": epoch + 1})
        autotune.report(accuracy, epoch=epoch + 1)


if __name__ == "__main__":
    result = autotune.tune(
        fit,
        space={
            "lr": autotune.log(1e-4, 1e-1),
            "width": [16, 32, 64],
            "batch_size": autotune.power_of_two(16, 256),
            "max_norm": autotune.log(0.1, 10),
        },
        target=autotune.target("accuracy", at_least=0.95, max_seconds=30),
        trials=20,
    )
    print(result.best, result.speed_up)
