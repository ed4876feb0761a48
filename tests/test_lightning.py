"""Lightning trainings with the callback: reported, capped, paused and resumed through
Lightning's own checkpoint.
"""

import csv
import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autotune
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Target
from autotune.outcome import Outcome
from autotune.training.checkpoint import read_weights
from autotune.training.run import start_training

lightning = pytest.importorskip("lightning.pytorch")

MakeConfig = Callable[..., TrialConfig]


def blobs(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(num) % 3
    return TensorDataset(
        torch.randn(num, 8, generator=generator) + 1.5 * nn.functional.one_hot(targets, 8), targets
    )


class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A module as a user writes it, with dropout, so that random numbers matter, and a schedule."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, targets = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(inputs), targets))
        self.log("val_accuracy", (self.layers(inputs).argmax(1) == targets).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


def fit(
    lr: float,
    epochs: int = 6,
    folder: str = ".",
    monitor: str = "val_loss",
    val_check_interval: float = 1.0,
    **settings: Any,
) -> None:
    trainer = lightning.Trainer(
        max_epochs=epochs,
        val_check_interval=val_check_interval,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[autotune.lightning.ReportCallback(monitor=monitor)],
        **settings,
    )
    trainer.fit(
        Classifier(lr),
        DataLoader(blobs(192), batch_size=32, shuffle=True),
        DataLoader(blobs(90), batch_size=90),
    )


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def own(trial_config: MakeConfig, tmp_path: Path) -> MakeConfig:
    def make(*, value: float = 0.0, **arguments: Any) -> TrialConfig:
        return trial_config(
            training={"_target_": f"{__name__}.fit", "folder": str(tmp_path), **arguments},
            target=Target(metric="val_loss", value=value, mode="min", max_train_seconds=1e9),
            allowed_targets=(__name__,),
        )

    return make


def test_each_validation_is_an_evaluation(own: MakeConfig) -> None:
    evaluations = list(start_training(own(lr=0.01)))
    assert [evaluation.epoch for evaluation in evaluations] == [1, 2, 3, 4, 5, 6]
    assert [evaluation.step for evaluation in evaluations] == [6, 12, 18, 24, 30, 36]
    assert evaluations[-1].metric < evaluations[0].metric
    assert all(evaluation.evaluate_seconds > 0 for evaluation in evaluations)
    assert all(set(evaluation.metrics) == {"val_accuracy"} for evaluation in evaluations)


@pytest.mark.parametrize("val_check_interval", [1.0, 0.5])
def test_it_ends_at_the_target_and_its_weights_score_the_same(
    own: MakeConfig, tmp_path: Path, val_check_interval: float
) -> None:
    config = own(
        lr=0.05,
        value=0.4 if val_check_interval == 1 else 1.2,
        epochs=50,
        val_check_interval=val_check_interval,
    )
    evaluations = list(start_training(config, weights_path=tmp_path / "weights.safetensors"))
    assert evaluations[-1].outcome is Outcome.REACHED
    assert evaluations[-1].step % 6 == (0 if val_check_interval == 1 else 3), (
        "the latter within an epoch"
    )
    model = Classifier(lr=0.05)
    model.load_state_dict(read_weights(tmp_path / "weights.safetensors")[0])
    inputs, targets = blobs(90).tensors
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.eval().layers(inputs), targets).item()
    assert loss == pytest.approx(evaluations[-1].metric, rel=1e-5)


def test_a_metric_that_is_not_logged_is_one_line(own: MakeConfig) -> None:
    with pytest.raises(
        ConfigError, match="monitor='val_f1' was not measured; measured were val_loss"
    ):
        list(start_training(own(lr=0.01, monitor="val_f1")))


class Noisy(Classifier):
    """A module whose validation loss is best after a few epochs, with metrics of every kind that
    a callback or schedule may watch.
    """

    def __init__(self, lr: float, schedule: str | None) -> None:
        super().__init__(lr)
        self.schedule = schedule

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.schedule == "plateau":
            schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
            }
        if self.schedule == "each epoch":
            return super().configure_optimizers()
        if self.schedule == "one_cycle":
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, self.lr, total_steps=EPOCHS * 6
            )
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        return optimizer


class Blobs(lightning.LightningDataModule):  # type: ignore[misc, name-defined]
    def train_dataloader(self) -> Any:
        return DataLoader(blobs(192), batch_size=32, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(blobs(90), batch_size=90)


EPOCHS = 7
ENDS: list[dict[str, Any]] = []
"""How the trainings of ``fit_row`` ended that came to their end."""


def early_stopping(folder: Path, patience: int = 2, **settings: Any) -> list[Any]:
    return [lightning.callbacks.EarlyStopping("val_loss", patience=patience, **settings)]


def saving(folder: Path, **settings: Any) -> list[Any]:
    return [
        lightning.callbacks.ModelCheckpoint(
            folder / "best", monitor="val_loss", save_last=True, **settings
        )
    ]


def each_callback(folder: Path) -> list[Any]:
    return [*early_stopping(folder, check_on_train_epoch_end=False), *saving(folder, save_top_k=2)]


ROWS: dict[str, dict[str, Any]] = {
    "early stopping at the epoch's end": {"callbacks": early_stopping},
    "early stopping at the validation's end": {
        "callbacks": partial(early_stopping, check_on_train_epoch_end=False)
    },
    "model checkpoint": {"callbacks": saving},
    "model checkpoint at the validation's end": {
        "callbacks": partial(saving, save_on_train_epoch_end=False, save_top_k=2)
    },
    "learning rate reduced on a plateau": {"schedule": "plateau"},
    "learning rate reduced each few epochs": {"schedule": "each epoch"},
    "one cycle by step": {"schedule": "one_cycle"},
    "stochastic weight averaging": {
        "callbacks": lambda _: [
            lightning.callbacks.StochasticWeightAveraging(
                swa_lrs=0.05, swa_epoch_start=3, annealing_epochs=2
            )
        ]
    },
    "weight averaging by step": {"callbacks": lambda _: [lightning.callbacks.WeightAveraging()]},
    "a change of accumulation": {
        "callbacks": lambda _: [lightning.callbacks.GradientAccumulationScheduler({0: 1, 2: 3})]
    },
    "two validations an epoch": {"val_check_interval": 0.5, "callbacks": each_callback},
    "a number of steps": {"max_epochs": -1, "max_steps": 28, "callbacks": each_callback},
    "all at once": {
        "schedule": "plateau",
        "callbacks": each_callback,
        "accumulate_grad_batches": 2,
        "logger": True,
    },
}


def fit_row(row: str, is_first: bool, folder: str) -> None:
    settings = {"max_epochs": EPOCHS, "logger": False, **ROWS[row]}
    callbacks = settings.pop("callbacks", lambda _: [])(Path(folder))
    ours = autotune.lightning.ReportCallback(monitor="val_loss")
    if settings["logger"]:
        settings["logger"] = lightning.loggers.CSVLogger(folder)
    model = Noisy(0.3, settings.pop("schedule", None))
    trainer = lightning.Trainer(
        **settings,
        accelerator="cpu",
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(
            isinstance(callback, lightning.callbacks.ModelCheckpoint) for callback in callbacks
        ),
        callbacks=[ours, *callbacks] if is_first else [*callbacks, ours],
    )
    trainer.fit(model, datamodule=Blobs())
    end: dict[str, Any] = {
        "epochs": trainer.current_epoch,
        "step": trainer.global_step,
        "should_stop": trainer.should_stop,
    }
    end["rates"] = [group["lr"] for group in trainer.optimizers[0].param_groups]
    end["weights"] = [parameter.tolist() for parameter in model.parameters()]
    for callback in trainer.early_stopping_callbacks:
        end["stopping"] = (
            callback.wait_count,
            callback.stopped_epoch,
            callback.best_score.item(),
            callback.stopping_reason_message,
        )
    if trainer.checkpoint_callback is not None:
        best = trainer.checkpoint_callback
        end["best"] = (
            Path(best.best_model_path).name,
            best.best_model_score.item(),
            Path(best.last_model_path).name,
        )
        end["files"] = sorted(path.name for path in Path(folder, "best").iterdir())
    end["logged"] = [
        {key: value for key, value in line.items() if value}
        for path in sorted(
            Path(folder).rglob("metrics.csv"),
            key=lambda path: int(path.parent.name.removeprefix("version_")),
        )
        for line in csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    ]
    ENDS.append(end)


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row == "all at once" else pytest.mark.slow) for row in ROWS],
)
def test_a_training_that_is_paused_at_every_epoch_is_as_if_it_were_not(
    own: MakeConfig,
    tmp_path: Path,
    check_pauses: Callable[[Callable[[str], TrialConfig]], list[Evaluation]],
    row: str,
    is_first: bool,
) -> None:
    ENDS.clear()

    def config(folder: str) -> TrialConfig:
        arguments = {"row": row, "is_first": is_first, "folder": str(tmp_path / folder)}
        return own(**arguments, _target_=f"{__name__}.fit_row")

    check_pauses(config)
    assert len(ENDS) == 2
    assert ENDS[1] == ENDS[0]
    if "stopping" in ENDS[0]:
        assert ENDS[0]["stopping"][0] >= 2, "else early stopping did nothing"


@pytest.mark.parametrize(
    "settings",
    [{"devices": 2}, {"devices": 2, "strategy": "ddp_spawn"}, {"devices": 1, "num_nodes": 2}],
)
@pytest.mark.parametrize("is_launched", [False, True])
def test_a_trainer_of_several_processes_is_refused_before_they_are_started(
    own: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    is_launched: bool,
) -> None:
    environment = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in environment.items() if is_launched else ():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError,
        match=r"found a Trainer with devices=.*, for 2 devices, .* tune it with devices=2, or",
    ):
        list(start_training(own(lr=0.01, **settings)))
