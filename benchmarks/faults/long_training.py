"""What the killing bench trains: a small net with dropout on shuffled data, in autotune's own loop,
in a function, by Lightning and by Hugging Face, with as many ranks as there are.

Each is deterministic, lasts as long as is asked for, and writes a line into the diary for each
step. The metric is the part that is done, so that all reach the target with their last evaluation.
"""

import os
import random
from typing import Any

import optuna
import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import autotune
from benchmarks.faults.long_command import EPOCHS, STEPS, Steps

_BATCH = 8
_NUM_SCORED = 2 * EPOCHS


class NumberedSampler(optuna.samplers.BaseSampler):
    """Random search whose points follow from a trial's number alone, so that a study that is
    resumed has those of one that is not.
    """

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        """No parameters are drawn together."""
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        """No parameters are drawn together."""
        return {}

    def sample_independent(
        self, study: Any, trial: Any, param_name: str, param_distribution: Any
    ) -> Any:
        """Draw a value by the trial's number."""
        chance = random.Random(f"{trial.number} {param_name}")
        if isinstance(param_distribution, optuna.distributions.CategoricalDistribution):
            return chance.choice(param_distribution.choices)
        low, high = param_distribution.low, param_distribution.high
        return type(low)(chance.uniform(low, high))


def data() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The splits: a class that a training can learn, and one that scores how far it is."""
    inputs = torch.randn(_BATCH * STEPS, 8, generator=torch.Generator().manual_seed(0))
    scored = torch.zeros(_NUM_SCORED, 8), torch.zeros(_NUM_SCORED, dtype=torch.int64)
    return {"train": (inputs, (inputs.sum(1) > 0).long()), "validation": scored}


def _net(rate: float, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(rate / 2), nn.Linear(width, 2))


def _bytes(model: nn.Module) -> bytes:
    parameters = (parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return b"".join(parameters)


class OwnModel(nn.Module):
    """The net for autotune's own loop, which counts its steps.

    A step is done where the next one, or an evaluation, begins. The first is not told unless a
    second one follows, as the warm-up makes one step with a model that is thrown away.
    """

    steps: torch.Tensor

    def __init__(self, rate: float, width: int, diary: str, seconds: float) -> None:
        super().__init__()
        self.layers = _net(rate, width)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._last = 0
        self._diary = Steps(diary, seconds, torch.initial_seed(), rate, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits; in an evaluation those of class 0 for the part that is done."""
        done = 0 if torch.compiler.is_compiling() else int(self.steps)  # it is exported, too
        is_new, self._last = done == self._last + 1, done  # else it is of a state
        if done > 1 and is_new:
            rank = distributed.get_rank() if distributed.is_initialized() else 0
            if done == 2:
                self._diary.done(1, b"", rank)
            self._diary.done(done, _bytes(self.layers), rank)
        if self.training:
            self._diary.sleep()
            self.steps += 1
            logits: torch.Tensor = self.layers(inputs)
            return logits
        is_done = torch.arange(len(inputs)) < len(inputs) * self.steps / (EPOCHS * STEPS)
        return torch.stack([is_done, ~is_done], dim=1).float()


def function(rate: float, width: int, diary: str, seconds: float, seed: int) -> None:
    """A loop that reports; its gradients are averaged over the ranks."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        distributed.init_process_group("gloo")
    torch.manual_seed(seed)
    model, steps = _net(rate, width), Steps(diary, seconds, seed, rate, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts, checkpoint = {"model": model, "optimizer": optimizer}, autotune.checkpoint()
    begin = checkpoint.load(parts).get("epoch", 0)
    inputs, targets = data()["train"]
    for epoch in range(begin, EPOCHS):
        for index, rows in enumerate(torch.randperm(len(inputs)).split(_BATCH)):
            steps.sleep()
            optimizer.zero_grad()
            cross_entropy(model(inputs[rows]), targets[rows]).backward()
            for parameter in model.parameters() if size > 1 else ():
                distributed.all_reduce(parameter.grad)
            optimizer.step()
            steps.done(epoch * STEPS + index + 1, _bytes(model))
        checkpoint.save({**parts, "epoch": epoch + 1})
        autotune.report((epoch + 1) / EPOCHS, epoch=epoch + 1)


def lightning(rate: float, width: int, diary: str, seconds: float, seed: int) -> None:
    """A Trainer of Lightning."""
    from lightning.pytorch import LightningModule, Trainer, seed_everything

    steps = Steps(diary, seconds, seed, rate, width)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _net(rate, width)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            steps.sleep()
            return cross_entropy(self.layers(batch[0]), batch[1])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            steps.done(self.trainer.global_step, _bytes(self.layers))

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("accuracy", self.trainer.global_step / (EPOCHS * STEPS), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    seed_everything(seed, verbose=False)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    splits = {name: TensorDataset(*split) for name, split in data().items()}
    Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=size,
        strategy="ddp" if size > 1 else "auto",
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[autotune.lightning.ReportCallback("accuracy")],
    ).fit(
        Module(),
        DataLoader(splits["train"], _BATCH // size, shuffle=True),
        DataLoader(splits["validation"], _NUM_SCORED),
    )


def hugging_face(rate: float, width: int, diary: str, seconds: float, seed: int) -> None:
    """A Trainer of Hugging Face."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    steps = Steps(diary, seconds, seed, rate, width)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _net(rate, width)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if self.training:
                steps.sleep()
            logits = self.layers(inputs)
            return {"loss": cross_entropy(logits, labels), "logits": logits}

    class Noting(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.done(state.global_step, _bytes(model))

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        inputs, labels = zip(*rows, strict=True)
        return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}

    torch.manual_seed(seed)
    model, size = Model(), int(os.environ.get("WORLD_SIZE", "1"))
    splits = {name: TensorDataset(*split) for name, split in data().items()}
    trainer = Trainer(
        model,
        TrainingArguments(
            str(autotune.trial().folder / "trainer"),
            use_cpu=True,
            seed=seed,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=_BATCH // size,
            per_device_eval_batch_size=_NUM_SCORED,
            learning_rate=0.01,
            eval_strategy="epoch",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=splits["train"],
        eval_dataset=splits["validation"],
        data_collator=collate,
        compute_metrics=lambda _: {"accuracy": trainer.state.global_step / (EPOCHS * STEPS)},
        callbacks=[Noting(), autotune.transformers.ReportCallback("eval_accuracy")],
    )
    trainer.train()
