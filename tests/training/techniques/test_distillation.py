"""Distillation: the loss by hand, its limits, and the teacher that a checkpoint says."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from autotune.errors import ConfigError
from autotune.training.checkpoint import save_weights, weights_metadata
from autotune.training.techniques.distillation import Distillation
from tests.conftest import MakeTrialConfig

INPUT_SHAPE, NUM_CLASSES = (1, 8, 8), 3
MakeDistillation = Callable[..., Distillation]


class Wide(torch.nn.Linear):
    """A teacher with a dropout that must not be at work."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(math.prod(input_shape), num_classes)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.dropout(super().forward(inputs.flatten(1)))


@pytest.fixture
def teacher(tmp_path: Path, trial_config: MakeTrialConfig) -> tuple[Path, Wide]:
    """A model and the file of its weights."""
    model = Wide(input_shape=INPUT_SHAPE, num_classes=NUM_CLASSES).eval()
    config = replace(trial_config(), model={"_target_": f"{__name__}.Wide"})
    metadata = weights_metadata(
        config, input_shape=INPUT_SHAPE, num_classes=NUM_CLASSES, evaluation=None, origin={}
    )
    save_weights(tmp_path / "teacher.safetensors", model.state_dict(), metadata)
    return tmp_path / "teacher.safetensors", model


@pytest.fixture
def make(teacher: tuple[Path, Wide]) -> MakeDistillation:
    def make(**values: Any) -> Distillation:
        settings: dict[str, Any] = {
            "source": None,
            "checkpoint": str(teacher[0]),
            "temperature": 2.0,
            "mix": 0.25,
        }
        offered = {
            "device": torch.device("cpu"),
            "input_shape": INPUT_SHAPE,
            "num_classes": NUM_CLASSES,
            "allowed_targets": [__name__],
        }
        return Distillation(**{**settings, **offered, **values})

    return make


def test_the_loss_is_the_mix(make: MakeDistillation, teacher: tuple[Path, Wide]) -> None:
    inputs, targets, outputs = torch.randn(6, *INPUT_SHAPE), torch.arange(6) % 3, torch.randn(6, 3)
    soft_targets = (teacher[1](inputs) / 2.0).softmax(dim=1)
    differences = soft_targets.log() - (outputs / 2.0).log_softmax(dim=1)
    distance = 2.0**2 * (soft_targets * differences).sum(dim=1).mean()
    plain = functional.cross_entropy(outputs, targets)
    for mix in (0.0, 0.25, 1.0):
        found = make(mix=mix).loss(functional.cross_entropy, outputs, targets, inputs)
        assert found.item() == pytest.approx(((1 - mix) * plain + mix * distance).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": 0.0}, r"technique\.temperature: found 0\.0, must be above 0"),
        ({"mix": 1.5}, r"technique\.mix: found 1\.5, must be 0 to 1"),
        ({"checkpoint": None}, r"technique\.checkpoint: found null"),
        ({"num_classes": 4}, r"is for inputs of \[1, 8, 8\] and 3 classes, and the data has .* 4"),
        ({"num_classes": None}, "and the data has inputs of .* and no classes"),
        ({"input_shape": (3, 8, 8)}, r"and the data has inputs of \[3, 8, 8\] and 3 classes"),
    ],
)
def test_what_cannot_be_is_one_line(
    make: MakeDistillation, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make(**values)
