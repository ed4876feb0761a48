"""Programs as users write them, each trained by two processes, in one of which something may go
wrong at its third epoch.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import autotune

FAULTS = ("nan", "memory", "kill", "hang")


def fault_at(epoch: int, fault: str | None) -> float:
    """Go wrong on the second rank in the third epoch; a number to add to what it reports."""
    if epoch != 3 or os.environ.get("RANK", os.environ.get("LOCAL_RANK")) != "1":
        return 0.0
    match fault:
        case "nan":
            return float("nan")
        case "memory":
            torch.empty(2**60)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(600)
    return 0.0


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = load_digits(return_X_y=True)
    return torch.tensor(inputs).float() / 16, torch.tensor(targets)


def accuracy(model: torch.nn.Module) -> float:
    inputs, targets = digits()
    with torch.no_grad():
        return float((model(inputs[1500:]).argmax(1) == targets[1500:]).float().mean())


def train_epoch(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> None:
    inputs, targets = digits()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    for rows in torch.randperm(1500, generator=generator).split(64):
        mine = rows[rank::size]
        optimizer.zero_grad()
        cross_entropy(model(inputs[mine]), targets[mine]).backward()
        optimizer.step()


def new_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 10)
    )


def _loop(model: Any, seed: int, epochs: int, fault: str | None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed + distributed.get_rank())
    objects = {"model": model, "optimizer": optimizer}
    checkpoint = autotune.checkpoint()
    state = checkpoint.load(objects)
    if state:
        generator.set_state(state["generator"])
    for epoch in range(state.get("epoch", 0) + 1, epochs + 1):
        model.train()
        train_epoch(model, optimizer, generator)
        added = fault_at(epoch, fault)
        model.eval()
        metric = accuracy(model) + added
        checkpoint.save({**objects, "epoch": epoch, "generator": generator.get_state()})
        autotune.report(metric, epoch=epoch)


def ddp(seed: int, epochs: int = 6, fault: str | None = None) -> None:
    """A loop with DistributedDataParallel, at a port of its own as in many a tutorial."""
    if "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:  # torchrun's own ranks meet at its store
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) // 2)
    distributed.init_process_group("gloo")
    _loop(torch.nn.parallel.DistributedDataParallel(new_model()), seed, epochs, fault)


def alike_but(seed: int, epochs: int = 4, fault: str | None = None) -> None:
    """Each rank reports a mean, except where the second one makes a mistake."""
    for epoch in range(1, epochs + 1):
        reduce: str | None = "mean"
        if epoch == 3 and os.environ["RANK"] == "1":
            match fault:
                case "exit":
                    sys.exit(0)
                case "abort":
                    os.abort()
                case "raise":
                    print("it was about to fail")
                    raise ValueError("a shard is broken")
                case "leave":
                    return
                case "return":
                    return
                case "no mean":
                    reduce = None
                case "worker":
                    next(iter(DataLoader(Reporting(), num_workers=1)))
        if epoch == 3 and fault == "leave":
            time.sleep(600)  # as in a collective that the second rank does not call
        autotune.report(epoch / 10, epoch=epoch, reduce=reduce)


def killed_while_saving(seed: int, epochs: int = 4, fault: str | None = None) -> None:
    """The second rank is killed as soon as it is to write its part of the state."""

    def write(folder: Path) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    for epoch in range(1, epochs + 1):
        autotune.checkpoint().save({"epoch": epoch}, write_files=write)
        autotune.report(epoch / 10, epoch=epoch)


def writing(seed: int, epochs: int = 1, fault: str | None = None) -> None:
    """Each rank prints, and writes into the trial's folder."""
    trial, rank = autotune.trial(), os.environ["RANK"]
    print("rank", rank, "prints", epochs, fault)
    logs = os.environ["MLFLOW_TRACKING_URI"]
    (trial.folder / f"rank-{rank}.txt").write_text(f"{trial}\n{seed} logs {logs}")
    autotune.report(0.5)


class Reporting(Dataset[float]):
    """Data that reports as it is read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> float:
        autotune.report(0.5)
        return 0.5


def fsdp2(seed: int, process_group: Any, epochs: int = 6, fault: str | None = None) -> None:
    """A loop with fully_shard, whose state is divided among the ranks."""
    mesh = distributed.device_mesh.DeviceMesh.from_group(process_group, "cpu")
    model = new_model()
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    _loop(model, seed, epochs, fault)


def lightning(
    seed: int, epochs: int = 6, fault: str | None = None, strategy: str = "ddp", devices: int = 2
) -> None:
    """A Trainer of Lightning with a strategy of several devices."""
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from torch.utils.data import TensorDataset

    from autotune.lightning import ReportCallback

    class Digits(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return cross_entropy(self.model(batch[0]), batch[1])

        def on_train_epoch_start(self) -> None:
            self.added = fault_at(self.current_epoch + 1, fault)

        def validation_step(self, batch: Any, index: int) -> None:
            right = (self.model(batch[0]).argmax(1) == batch[1]).float().mean()
            self.log("accuracy", right + self.added, sync_dist=fault != "nan")

        def on_validation_start(self) -> None:
            self.added = getattr(self, "added", 0.0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.003)

    seed_everything(seed)
    inputs, targets = digits()
    Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ReportCallback("accuracy")],
    ).fit(
        Digits(),
        DataLoader(TensorDataset(inputs[:1500], targets[:1500]), 32, shuffle=True),
        DataLoader(TensorDataset(inputs[1500:], targets[1500:]), 297),
    )


def lightning_spawn(seed: int, epochs: int = 6, fault: str | None = None) -> None:
    """The same with a strategy that would start its processes itself."""
    lightning(seed, epochs, fault, strategy="ddp_spawn")


def hugging_face(seed: int, epochs: int = 6, fault: str | None = None) -> None:
    """A Trainer of Hugging Face."""
    import tempfile

    from torch.utils.data import TensorDataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from autotune.transformers import ReportCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model()

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = self.model(inputs)
            return {"loss": cross_entropy(outputs, labels), "logits": outputs}

    added = [0.0]

    class Fault(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            added[0] = fault_at(round(state.epoch or 0) + 1, fault)

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {
            "inputs": torch.stack([row[0] for row in rows]),
            "labels": torch.stack([row[1] for row in rows]),
        }

    def metrics(predictions: Any) -> dict[str, float]:
        right = (predictions.predictions.argmax(1) == predictions.label_ids).mean()
        return {"accuracy": float(right) + added[0]}

    inputs, targets = digits()
    Trainer(
        Model(),
        TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            num_train_epochs=epochs,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=297,
            learning_rate=0.003,
            lr_scheduler_type="constant",
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=seed,
        ),
        train_dataset=TensorDataset(inputs[:1500], targets[:1500]),
        eval_dataset=TensorDataset(inputs[1500:], targets[1500:]),
        data_collator=collate,
        compute_metrics=metrics,
        callbacks=[Fault(), ReportCallback("eval_accuracy")],
    ).train()


def accelerate(seed: int, epochs: int = 6, fault: str | None = None) -> None:
    """A loop with Accelerate, which keeps its own files."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from torch.utils.data import TensorDataset

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(seed)
    inputs, targets = digits()
    model = new_model()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.003),
        DataLoader(TensorDataset(inputs[:1500], targets[:1500]), 32, shuffle=True),
    )
    checkpoint = autotune.checkpoint()
    if checkpoint.files is not None:
        accelerator.load_state(str(checkpoint.files))
    state = checkpoint.load()
    for epoch in range(state.get("epoch", 0) + 1, epochs + 1):
        model.train()
        loader.set_epoch(epoch)
        for batch, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(batch), labels))
            optimizer.step()
        added = fault_at(epoch, fault)
        model.eval()
        metric = accuracy(model) + added
        checkpoint.save(
            {"epoch": epoch}, write_files=lambda path: accelerator.save_state(str(path))
        )
        autotune.report(metric, epoch=epoch)


if __name__ == "__main__":  # a command: torchrun, or Python itself, runs this
    import sys

    torch.manual_seed(autotune.trial().seed)
    globals()[sys.argv[1]](
        seed=autotune.trial().seed, epochs=int(sys.argv[2]), fault=sys.argv[3].strip("-") or None
    )
