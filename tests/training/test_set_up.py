"""Setting a training up: no shape of its batches is met for the first time while its clock runs."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.config.schema import TrialConfig
from autotune.measurement import PhaseClock
from autotune.training.loop import train
from autotune.training.set_up import set_up
from tests.conftest import MakeTrialConfig

_heights: list[int] = []
"""Of the images that a model in training was given, in turn."""


class Noting(nn.Module):
    """A model that notes the heights it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            _heights.append(images.shape[2])
        outputs: torch.Tensor = self.linear(images.mean((1, 2, 3))[:, None])
        return outputs


def images() -> dict[str, Any]:
    """A hundred steps of four images."""
    return dict.fromkeys(
        ("train", "validation"), (torch.zeros(400, 1, 8, 8), torch.zeros(400, dtype=torch.int64))
    )


@pytest.mark.parametrize(
    "resolutions",
    [[[0.0, 4], [0.41, 6], [0.43, None]], [[0.37, 5], [0.37, 6], [0.371, 7], [0.999, None]], []],
)
def test_every_resolution_is_warmed_up_however_short_its_stretch(
    trial_config: MakeTrialConfig, resolutions: list[Any]
) -> None:
    config = trial_config(
        "augmentation=flip_shift",
        data={"_target_": f"{__name__}.images"},
        model={"_target_": f"{__name__}.Noting"},
        allowed_targets=(__name__,),
        batch_size=4,
        epochs=1,
    )
    config = replace(config, augmentation={**config.augmentation, "resolutions": resolutions})
    _heights.clear()
    run, step = set_up(config, torch.device("cpu"), PhaseClock(), 1)
    warm = set(_heights)
    _heights.clear()
    for place, batch in enumerate(run.batches(0)):
        step(batch, place)
    assert len(_heights) == 100
    assert warm == set(_heights)


_scored: list[int] = []
"""Sizes of the batches that a model of the class ``Bounded`` has scored."""
_outputs: list[weakref.ref[torch.Tensor]] = []
"""What such a model gave last when it scored."""


class Bounded(Noting):
    """A model whose evaluations run out of memory if a batch is larger than ``limit``, or the
    outputs before are still there.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(images)
        if not self.training:
            if len(images) > self.limit or any(earlier() is not None for earlier in _outputs):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 400.00 GiB")
            _scored.append(len(images))
            _outputs[:] = [weakref.ref(outputs)]
        return outputs


def numbered() -> dict[str, Any]:
    """Two hundred images of different brightness and class."""
    split = (
        torch.arange(200.0).reshape(200, 1, 1, 1).expand(200, 1, 8, 8) / 200,
        torch.arange(200) % 2,
    )
    return dict.fromkeys(("train", "validation"), split)


@pytest.fixture
def bounded(trial_config: MakeTrialConfig) -> MakeTrialConfig:
    """Makes configurations of a model whose evaluations take up to ``limit`` samples at once."""
    _scored.clear()
    _outputs.clear()

    def make(limit: int, **fields: Any) -> TrialConfig:
        parts = {
            "data": {"_target_": f"{__name__}.numbered"},
            "model": {"_target_": f"{__name__}.Bounded", "limit": limit},
        }
        return trial_config(
            "target.value=2",
            **parts,
            allowed_targets=(__name__,),
            batch_size=100,
            epochs=2,
            **fields,
        )

    return make


@pytest.mark.parametrize(
    ("limit", "size"), [(1000, 200), (60, 50), pytest.param(1, 1, marks=pytest.mark.slow)]
)
def test_evaluations_take_the_largest_half_or_quarter_of_the_usual_batch_that_memory_holds(
    bounded: MakeTrialConfig, limit: int, size: int
) -> None:
    run, step = set_up(bounded(limit), torch.device("cpu"), PhaseClock(), 1)
    assert run.evaluation_batch_size == size
    _scored.clear()
    in_parts = run.evaluate(step.parts, run.validation)
    assert _scored == [size] * (200 // size)
    step.parts.model.limit = 200
    assert in_parts == pytest.approx(
        replace(run, evaluation_batch_size=200).evaluate(step.parts, run.validation), rel=1e-6
    )
    assert all(module.training for module in step.parts.model.modules())
    assert [evaluation.step for evaluation in train(bounded(limit))] == [2, 4]
