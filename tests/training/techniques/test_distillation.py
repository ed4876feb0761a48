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
from autotune.training.techniques.distillation import Distillation, distillation_loss
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


def test_the_divergence_is_the_formulas() -> None:
    student, taught, temperature = (
        [[1.0, 2.0, -1.0], [0.5, 0.0, 0.0]],
        [[3.0, 0.0, 0.0], [0.0, 1.0, 2.0]],
        2.0,
    )

    def soft(logits: list[float]) -> list[float]:
        powers = [math.exp(each / temperature) for each in logits]
        return [each / sum(powers) for each in powers]

    wanted = 0.0
    for logits, given in zip(student, taught, strict=True):
        wanted += sum(
            p * math.log(p / q) for p, q in zip(soft(given), soft(logits), strict=True)
        ) / len(student)
    found = distillation_loss(torch.tensor(student), torch.tensor(taught), temperature)
    assert found.item() == pytest.approx(temperature**2 * wanted)


def test_the_loss_is_the_mix(make: MakeDistillation, teacher: tuple[Path, Wide]) -> None:
    inputs, targets, outputs = torch.randn(6, *INPUT_SHAPE), torch.arange(6) % 3, torch.randn(6, 3)
    taught = teacher[1](inputs)
    plain, distance = (
        functional.cross_entropy(outputs, targets),
        distillation_loss(outputs, taught, 2.0),
    )
    for mix in (0.0, 0.25, 1.0):
        found = make(mix=mix).loss(functional.cross_entropy, outputs, targets, inputs)
        assert found.item() == pytest.approx(((1 - mix) * plain + mix * distance).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": 0.0}, r"technique\.temperature: found 0\.0, must be above 0"),
        ({"mix": 1.5}, r"technique\.mix: found 1\.5, must be 0 to 1"),
        ({"checkpoint": None}, r"technique\.checkpoint: found null"),
        (
            {"num_classes": 4},
            (
                r"is for inputs of \[1, 8, 8\] and 3 classes, and the data has inputs of \[1, 8,"
                r" 8\] and 4 classes"
            ),
        ),
        ({"num_classes": None}, "and the data has inputs of .* and no classes"),
        ({"input_shape": (3, 8, 8)}, r"and the data has inputs of \[3, 8, 8\] and 3 classes"),
    ],
)
def test_what_cannot_be_is_one_line(
    make: MakeDistillation, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make(**values)
