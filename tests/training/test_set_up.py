"""Setting a training up: no shape of its batches is met for the first time while its clock runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.measurement import PhaseClock
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
    return dict.fromkeys(("train", "validation"), (torch.zeros(400, 1, 8, 8), torch.zeros(400, dtype=torch.int64)))


@pytest.mark.parametrize("resolutions", [[[0.0, 4], [0.41, 6], [0.43, None]], [[0.37, 5], [0.37, 6], [0.371, 7], [0.999, None]], []])
def test_every_resolution_is_warmed_up_however_short_its_stretch(trial_config: MakeTrialConfig, resolutions: list[Any]) -> None:
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


def test_an_evaluation_that_fails_leaves_model_and_optimizer_in_training(trial_config: MakeTrialConfig) -> None:
    def failing(*_: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    run, step = set_up(trial_config("optimizer=schedule_free_sgd"), torch.device("cpu"), PhaseClock(), 1)
    step.parts = replace(step.parts, metric=failing)
    with pytest.raises(ZeroDivisionError):
        run.evaluate(step.parts, run.validation)
    assert all(module.training for module in step.parts.model.modules())
    assert all(group["train_mode"] for group in step.parts.optimizer.param_groups)
