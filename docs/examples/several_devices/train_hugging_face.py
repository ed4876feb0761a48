"""A Trainer of Hugging Face, as a script for torchrun. ``tune_torchrun.py`` tunes it."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments

import autotune


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, inputs, labels):
        outputs = self.model(inputs)
        return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}


def collate(rows):
    inputs, labels = zip(*rows, strict=True)
    return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}


def accuracy(predicted):
    return {"accuracy": (predicted.predictions.argmax(1) == predicted.label_ids).mean()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=32)
    given = parser.parse_args()
    inputs, targets = (torch.tensor(array) for array in load_digits(return_X_y=True))
    inputs = inputs.float() / 16
    arguments = TrainingArguments(
        output_dir=autotune.trial().folder / "checkpoints",
        use_cpu=not torch.cuda.is_available(),  # else the Trainer takes no notice of torchrun
        seed=autotune.trial().seed,
        num_train_epochs=30,
        per_device_train_batch_size=given.batch_size,
        learning_rate=given.lr,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(
        Model(),
        arguments,
        train_dataset=TensorDataset(inputs[:1500], targets[:1500]),
        eval_dataset=TensorDataset(inputs[1500:], targets[1500:]),
        data_collator=collate,
        compute_metrics=accuracy,
        callbacks=[autotune.transformers.ReportCallback(monitor="eval_accuracy")],
    ).train()
