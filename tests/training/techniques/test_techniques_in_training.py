"""Techniques in whole trainings: on toy images whose brightness tells their class."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.config.schema import TrialConfig
from autotune.measurement import Evaluation, Target
from autotune.training.checkpoint import read_weights
from autotune.training.loop import train
from tests.conftest import MakeTrialConfig

pytestmark = pytest.mark.slow

TECHNIQUES = "autotune.training.techniques"
PRUNING = {
    "_target_": f"{TECHNIQUES}.pruning.Pruning",
    "structured": False,
    "sparsity": 0.75,
    "start_fraction": 0.2,
    "end_fraction": 0.6,
    "num_prunings": 3,
}


def bright_images(num_classes: int = 2) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Splits whose class is the images' brightness plus noise."""
    random_numbers = torch.Generator().manual_seed(1)
    splits = {}
    for name, size in (("train", 128), ("validation", 64)):
        targets = torch.arange(size) % num_classes
        inputs = (
            torch.randn(size, 1, 8, 8, generator=random_numbers)
            + targets.float().view(-1, 1, 1, 1)
            - 0.5
        )
        splits[name] = (inputs, targets)
    return splits


def transfer(checkpoint: Path, unfreeze_at: float) -> dict[str, Any]:
    values = {
        "source": None,
        "checkpoint": str(checkpoint),
        "fresh_head": True,
        "unfreeze_at": unfreeze_at,
    }
    return {"_target_": f"{TECHNIQUES}.transfer.Transfer", **values}


class Toy:
    """Makes configurations of 16 steps that no target ends, and runs them."""

    def __init__(self, make: MakeTrialConfig, folder: Path) -> None:
        self._make = make
        self.weights = folder / "weights.safetensors"

    def config(self, *overrides: str, **fields: Any) -> TrialConfig:
        values: dict[str, Any] = {
            "data": {"_target_": f"{__name__}.bright_images"},
            "model": {
                "_target_": "autotune.workloads.cnn.SimpleCNN",
                "widths": [4, 8],
                "norm": "batch",
            },
            "target": Target(metric="accuracy", value=2.0, mode="max", max_train_seconds=1000),
            "allowed_targets": (__name__,),
            "batch_size": 32,
            "epochs": 4.0,
            "evaluate_every_samples": 64,
        }
        return self._make("optimizer.lr=0.1", *overrides, **{**values, **fields})

    def train(self, config: TrialConfig, **settings: Any) -> list[Evaluation]:
        return list(train(config, weights_path=self.weights, **settings))

    def trained(self) -> Mapping[str, torch.Tensor]:
        """The weights that the last training kept."""
        return read_weights(self.weights)[0]


@pytest.fixture
def toy(trial_config: MakeTrialConfig, tmp_path: Path) -> Toy:
    return Toy(trial_config, tmp_path)


@pytest.fixture
def source(toy: Toy, tmp_path: Path) -> Path:
    """The weights of a plain training."""
    toy.train(toy.config())
    return toy.weights.rename(tmp_path / "source.safetensors")


def share_of_zeros(weights: Mapping[str, torch.Tensor]) -> float:
    matrices = [each for name, each in weights.items() if each.ndim > 1]
    return sum(int((each == 0).sum()) for each in matrices) / sum(each.numel() for each in matrices)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("averaging=ema",),
        ("runtime.channels_last=true",),
    ],
)
def test_a_pruned_training_keeps_plain_weights_of_the_wanted_sparsity(
    toy: Toy, overrides: tuple[str, ...]
) -> None:
    toy.train(toy.config())
    names = set(toy.trained())
    toy.train(toy.config(*overrides, technique=PRUNING))
    assert set(toy.trained()) == names
    assert share_of_zeros(toy.trained()) == pytest.approx(0.75, abs=0.005)


@pytest.mark.parametrize(("unfreeze_at", "moves"), [(1.0, False), (0.5, True)])
def test_a_transferred_training_starts_from_the_source(
    toy: Toy, source: Path, unfreeze_at: float, moves: bool
) -> None:
    toy.train(toy.config(technique=transfer(source, unfreeze_at)))
    taken, _ = read_weights(source)
    changed = {name for name, found in toy.trained().items() if not torch.equal(found, taken[name])}
    assert changed == (set(taken) if moves else {"classifier.weight", "classifier.bias"})
