"""A Lightning module on scikit-learn's digits, tuned with one more callback."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import autotune


class Net(lightning.LightningModule):
    """A module as it was before: nothing in it knows of autotune."""

    def __init__(self, lr, width):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, index):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def validation_step(self, batch, index):
        inputs, targets = batch
        self.log("val_accuracy", (self.layers(inputs).argmax(1) == targets).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def fit(lr=1e-3, width=32, batch_size=32):
    digits = load_digits()
    dataset = TensorDataset(
        torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    )
    train, validation = random_split(dataset, [1400, 397], torch.Generator().manual_seed(0))
    trainer = lightning.Trainer(
        max_epochs=30,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[autotune.lightning.ReportCallback(monitor="val_accuracy")],
    )
    trainer.fit(
        Net(lr, width), DataLoader(train, batch_size, shuffle=True), DataLoader(validation, 397)
    )


if __name__ == "__main__":
    result = autotune.tune(
        fit,
        space={
            "lr": autotune.log(1e-4, 1e-1),
            "width": [16, 32, 64, 128],
            "batch_size": autotune.power_of_two(16, 256),
        },
        target=autotune.target("val_accuracy", at_least=0.95, max_seconds=30),
        trials=20,
    )
    print(result.best, result.speed_up)
