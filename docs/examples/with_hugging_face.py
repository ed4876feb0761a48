"""A Hugging Face ``Trainer`` with LoRA adapters whose rank is searched, tuned with one more
callback.
"""

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import autotune


class Words(torch.utils.data.Dataset):
    """Sequences of eight tokens, labelled by which half of the vocabulary has more of them."""

    def __init__(self, num, seed):
        self.tokens = torch.randint(0, 20, (num, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": int((self.tokens[index] < 10).sum() > 4)}


def accuracy(prediction):
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def fit(lr=1e-3, rank=2, batch_size=16):
    config = BertConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=2,
    )
    adapters = LoraConfig(task_type="SEQ_CLS", r=rank, target_modules=["query", "value", "dense"])
    model = get_peft_model(BertForSequenceClassification(config), adapters)
    arguments = TrainingArguments(
        "output",
        learning_rate=lr,
        per_device_train_batch_size=batch_size,
        num_train_epochs=20,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Words(512, seed=0),
        eval_dataset=Words(256, seed=1),
        compute_metrics=accuracy,
        callbacks=[autotune.transformers.ReportCallback(monitor="eval_accuracy")],
    )
    trainer.train()


if __name__ == "__main__":
    result = autotune.tune(
        fit,
        space={
            "lr": autotune.log(1e-4, 1e-1),
            "rank": [1, 2, 4, 8],
            "batch_size": autotune.power_of_two(8, 64),
        },
        target=autotune.target("eval_accuracy", at_least=0.8, max_seconds=30),
        trials=20,
    )
    print(result.best, result.speed_up)
