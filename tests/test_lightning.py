"""Lightning trainings with the callback: reported, capped, paused and resumed through Lightning's own checkpoint."""

import logging
import warnings
from collections.abc import Callable, Iterator
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
from autotune.session import is_pausable
from autotune.training.checkpoint import read_weights
from autotune.training.run import start_training

lightning = pytest.importorskip("lightning.pytorch")

MakeConfig = Callable[..., TrialConfig]


def blobs(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(num) % 3
    return TensorDataset(torch.randn(num, 8, generator=generator) + 1.5 * nn.functional.one_hot(targets, 8), targets)


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


def fit(lr: float, epochs: int = 6, folder: str = ".", monitor: str = "val_loss", val_check_interval: float = 1.0) -> None:
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
    )
    trainer.fit(Classifier(lr), DataLoader(blobs(192), batch_size=32, shuffle=True), DataLoader(blobs(90), batch_size=90))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("autotune.training.first_call._paid", {})
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


@pytest.mark.parametrize("num_before", [1, 4])
def test_a_paused_training_has_the_same_curve(own: MakeConfig, tmp_path: Path, num_before: int) -> None:
    config = own(lr=0.01)
    whole = [evaluation.metric for evaluation in start_training(config)]
    training = start_training(config)
    before: list[Evaluation] = [next(training) for _ in range(num_before)]
    assert is_pausable()
    training.send(tmp_path / "paused")
    training.close()
    after = list(start_training(config, paused_folder=tmp_path / "paused"))
    assert [evaluation.metric for evaluation in [*before, *after]] == whole
    seconds = [evaluation.train_seconds for evaluation in [*before, *after]]
    assert seconds == sorted(seconds)


def test_within_an_epoch_it_is_not_paused(own: MakeConfig) -> None:
    training = start_training(own(lr=0.01, val_check_interval=0.5))
    assert [(next(training).step, is_pausable()) for _ in range(3)] == [(3, False), (6, True), (9, False)]
    training.close()


@pytest.mark.parametrize("val_check_interval", [1.0, 0.5])
def test_it_ends_at_the_target_and_its_weights_score_the_same(own: MakeConfig, tmp_path: Path, val_check_interval: float) -> None:
    config = own(lr=0.05, value=0.4 if val_check_interval == 1 else 1.2, epochs=50, val_check_interval=val_check_interval)
    evaluations = list(start_training(config, weights_path=tmp_path / "weights.safetensors"))
    assert evaluations[-1].outcome is Outcome.REACHED
    assert evaluations[-1].step % 6 == (0 if val_check_interval == 1 else 3), "the latter within an epoch"
    model = Classifier(lr=0.05)
    model.load_state_dict(read_weights(tmp_path / "weights.safetensors")[0])
    inputs, targets = blobs(90).tensors
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.eval().layers(inputs), targets).item()
    assert loss == pytest.approx(evaluations[-1].metric, rel=1e-5)


def test_a_metric_that_is_not_logged_is_one_line(own: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="monitor='val_f1' was not logged, accepted are val_loss"):
        list(start_training(own(lr=0.01, monitor="val_f1")))


def test_by_hand_it_does_nothing(tmp_path: Path) -> None:
    fit(lr=0.01, epochs=1, folder=str(tmp_path))
