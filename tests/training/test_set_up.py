"""Setting a training up: no shape of its batches is met for the first time while its clock runs."""

import weakref
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.config.schema import TrialConfig
from autotune.measurement import Phase, PhaseClock
from autotune.training.components import make_components
from autotune.training.data import load_data
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


_made: list[weakref.ref[nn.Module]] = []
"""All models of the class ``Remembered``."""
_held: list[torch.Tensor | None] = []
"""What the newest of them held in gradients and optimizer state when the next one was made."""


class Remembered(Noting):
    """A model that notes, as it is made, what of earlier trainings is still alive."""

    def __init__(self) -> None:
        super().__init__()
        _held[:] = [model.linear.weight.grad for reference in _made if isinstance(model := reference(), Remembered)]
        _made.append(weakref.ref(self))


@pytest.fixture
def remembered(trial_config: MakeTrialConfig) -> MakeTrialConfig:
    """Makes configurations of a model that notes what is alive, with all that may keep it alive."""
    _made.clear()
    parts = {"data": {"_target_": f"{__name__}.images"}, "model": {"_target_": f"{__name__}.Remembered"}}

    def make(*overrides: str, **fields: Any) -> TrialConfig:
        return trial_config("lr_schedule=one_cycle", "averaging=ema", *overrides, **parts, allowed_targets=(__name__,), **fields)

    return make


def test_the_model_of_the_warm_up_is_freed_before_the_trainings_own_is_made(remembered: MakeTrialConfig) -> None:
    _, step = set_up(remembered("runtime.activation_checkpointing=true"), torch.device("cpu"), PhaseClock(), 1)
    assert [reference() for reference in _made] == [None, step.parts.model]
    assert _held == []


def test_what_an_ended_training_of_compiled_code_held_is_freed_before_the_next_begins(
    remembered: MakeTrialConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda compute, **_: compute)  # is bound to its model all the same, at once
    config = remembered("runtime.compile=default", batch_size=50)
    run, step = set_up(config, torch.device("cpu"), PhaseClock(), 1)
    with closing(run.batches(0)) as batches:
        step(next(batches), 0)
    parts, model = step.parts, weakref.ref(step.parts.model)
    assert parts.average is not None
    momentum = [weakref.ref(buffer) for state in parts.optimizer.state.values() for buffer in state.values()]
    references = [weakref.ref(parts.average), *momentum]
    assert momentum
    del parts
    _, step = set_up(replace(config, seed=1), torch.device("cpu"), PhaseClock(), 1)
    assert step.parts.model is model(), "the compiled code's model trains again"
    assert _held == [None], "its gradients were gone when the next state was made"
    assert [reference() for reference in references] == [None] * len(references)


def test_a_state_for_compiled_code_is_made_in_host_memory(remembered: MakeTrialConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = remembered()
    data = load_data(config)
    bound = make_components(config, data, torch.device("cpu"), 10)
    fresh: list[nn.Module] = []
    monkeypatch.setattr("autotune.training.components.reset_model", lambda _, model: fresh.append(model))
    make_components(config, data, torch.device("meta"), 10, reuse=bound)
    assert {parameter.device.type for model in fresh for parameter in model.parameters()} == {"cpu"}


def test_peak_memory_is_that_of_the_training_not_of_building(trial_config: MakeTrialConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, phases = PhaseClock(), []
    monkeypatch.setattr("autotune.training.set_up.reset_peak_memory", lambda _: phases.append(clock.phase))
    set_up(trial_config(), torch.device("cpu"), clock, 1)
    assert phases == [Phase.PREPARE]


def test_an_evaluation_that_fails_leaves_model_and_optimizer_in_training(trial_config: MakeTrialConfig) -> None:
    def failing(*_: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    run, step = set_up(trial_config("optimizer=schedule_free_sgd"), torch.device("cpu"), PhaseClock(), 1)
    step.parts = replace(step.parts, metric=failing)
    with pytest.raises(ZeroDivisionError):
        run.evaluate(step.parts, run.validation)
    assert all(module.training for module in step.parts.model.modules())
    assert all(group["train_mode"] for group in step.parts.optimizer.param_groups)
