"""A Trainer of Lightning with ``strategy="ddp"`` on two devices, tuned with one callback."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autotune


class Digits(LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch, index):
        accuracy = (self.model(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("val_accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def fit(devices, lr=1e-3, batch_size=32):
    seed_everything(0)
    inputs, targets = (torch.tensor(array) for array in load_digits(return_X_y=True))
    inputs = inputs.float() / 16
    trainer = Trainer(
        max_epochs=30,
        devices=devices,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[autotune.lightning.ReportCallback(monitor="val_accuracy")],
    )
    trainer.fit(
        Digits(lr),
        DataLoader(TensorDataset(inputs[:1500], targets[:1500]), batch_size, shuffle=True),
        DataLoader(TensorDataset(inputs[1500:], targets[1500:]), 297),
    )


if __name__ == "__main__":
    result = autotune.tune(
        fit,
        space={"lr": autotune.log(1e-4, 1e-1), "batch_size": autotune.power_of_two(16, 128)},
        target=autotune.target("val_accuracy", at_least=0.9, max_seconds=60),
        devices=2,
        trials=20,
    )
    print(result.best, result.speed_up)
