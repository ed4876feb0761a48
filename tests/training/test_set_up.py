"""Setting a training up: no shape of its batches is met for the first time while its clock runs."""

import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Phase, PhaseClock
from autotune.training import data
from autotune.training.components import make_components
from autotune.training.device import peak_memory_bytes
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
    del parts, step
    _, step = set_up(replace(config, seed=1), torch.device("cpu"), PhaseClock(), 1)
    assert step.parts.model is model(), "the compiled code's model trains again"
    assert _held == [None], "its gradients were gone when the next state was made"
    assert [reference() for reference in references] == [None] * len(references)


def test_a_state_for_compiled_code_is_made_in_host_memory(remembered: MakeTrialConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = remembered()
    loaded = data.load_data(config)
    bound = make_components(config, loaded, torch.device("cpu"), 10)
    fresh: list[nn.Module] = []
    monkeypatch.setattr("autotune.training.components.reset_model", lambda _, model: fresh.append(model))
    make_components(config, loaded, torch.device("meta"), 10, reuse=bound)
    assert {parameter.device.type for model in fresh for parameter in model.parameters()} == {"cpu"}


def test_peak_memory_is_that_of_the_training_not_of_building(trial_config: MakeTrialConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, phases = PhaseClock(), []
    monkeypatch.setattr("autotune.training.set_up.reset_peak_memory", lambda _: phases.append(clock.phase))
    set_up(trial_config(), torch.device("cpu"), clock, 1)
    assert phases == [Phase.PREPARE]


_scored: list[int] = []
"""Sizes of the batches that a model of the class ``Bounded`` has scored."""
_outputs: list[weakref.ref[torch.Tensor]] = []
"""What such a model gave last when it scored."""


class Bounded(Noting):
    """A model whose evaluations run out of memory if a batch is larger than ``limit``, or the outputs before are still there."""

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
    split = torch.arange(200.0).reshape(200, 1, 1, 1).expand(200, 1, 8, 8) / 200, torch.arange(200) % 2
    return dict.fromkeys(("train", "validation"), split)


@pytest.fixture
def bounded(trial_config: MakeTrialConfig) -> MakeTrialConfig:
    """Makes configurations of a model whose evaluations take up to ``limit`` samples at once."""
    _scored.clear()
    _outputs.clear()

    def make(limit: int, **fields: Any) -> TrialConfig:
        parts = {"data": {"_target_": f"{__name__}.numbered"}, "model": {"_target_": f"{__name__}.Bounded", "limit": limit}}
        return trial_config("target.value=2", **parts, allowed_targets=(__name__,), batch_size=100, epochs=2, **fields)

    return make


@pytest.mark.parametrize(("limit", "size"), [(1000, 200), (199, 100), (60, 50), (1, 1)])
def test_evaluations_take_the_largest_half_or_quarter_of_the_usual_batch_that_memory_holds(
    bounded: MakeTrialConfig, limit: int, size: int
) -> None:
    run, step = set_up(bounded(limit), torch.device("cpu"), PhaseClock(), 1)
    assert run.evaluation_batch_size == size
    _scored.clear()
    in_parts = run.evaluate(step.parts, run.validation)
    assert _scored == [size] * (200 // size)
    step.parts.model.limit = 200
    assert in_parts == pytest.approx(replace(run, evaluation_batch_size=200).evaluate(step.parts, run.validation), rel=1e-6)
    assert all(module.training for module in step.parts.model.modules())
    assert [evaluation.step for evaluation in train(bounded(limit))] == [2, 4]


class Vast(Bounded):
    """A model that takes half a gigabyte for each sample that it scores."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not self.training:
            torch.empty(len(images), 1 << 29, dtype=torch.uint8, device=images.device)
        return super().forward(images)


@pytest.mark.gpu
def test_a_gpus_memory_decides_how_many_samples_are_scored_at_once(bounded: MakeTrialConfig) -> None:
    config = bounded(1000, device="cuda")
    config = replace(config, model={**config.model, "_target_": f"{__name__}.Vast"})
    run, step = set_up(config, device := torch.device("cuda"), PhaseClock(), 1)
    total = torch.cuda.mem_get_info()[1]
    assert run.evaluation_batch_size << 29 <= total
    assert total < run.evaluation_batch_size << 30 or run.evaluation_batch_size == 200, "twice as many do not fit"
    assert run.validation.inputs.device.type == "cuda"
    assert peak_memory_bytes(device) < 1 << 29, "the peak of building is not the training's"
    assert run.evaluate(step.parts, run.validation)[0] == 0.5


def test_an_evaluation_of_one_sample_that_memory_does_not_hold_is_out_of_memory(bounded: MakeTrialConfig) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 400\.00 GiB"):
        set_up(bounded(0), torch.device("cpu"), PhaseClock(), 1)


def test_an_evaluation_batch_size_that_is_set_is_taken_as_it_is(bounded: MakeTrialConfig) -> None:
    run, step = set_up(bounded(1000, evaluation_batch_size=70), torch.device("cpu"), PhaseClock(), 1)
    _scored.clear()
    assert run.evaluate(step.parts, run.validation)[0] == 0.5
    assert _scored == [70, 70, 60]
    with pytest.raises(torch.OutOfMemoryError):
        set_up(bounded(60, evaluation_batch_size=70), torch.device("cpu"), PhaseClock(), 1)
    with pytest.raises(ConfigError, match="evaluation_batch_size: found 0, accepted is a whole number from 1"):
        bounded(1000, evaluation_batch_size=0)


@pytest.mark.parametrize("fits", [True, False])
def test_the_validation_split_is_moved_where_it_fits_beside_the_training(
    bounded: MakeTrialConfig, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    asked_of: list[Any] = []

    def fits_on(device: torch.device, data: Any) -> bool:
        asked_of.append((data, bool(_scored)))
        return fits

    monkeypatch.setattr("autotune.training.set_up.fits_on", fits_on)
    run, step = set_up(bounded(1000), torch.device("cpu"), PhaseClock(), 1)
    assert asked_of == [(run.data, False), (run.data.validation, True)], "the second is asked when the memory of a training is known"
    assert (run.validation is not run.data.validation) is fits
    assert run.evaluate(step.parts, run.validation)[0] == 0.5


@pytest.mark.parametrize(("on_device", "by", "said"), [(True, "resident_batches", {}), (False, "host_batches", {"num_workers": 1})])
def test_the_warm_up_takes_its_batch_as_the_training_does(
    bounded: MakeTrialConfig, monkeypatch: pytest.MonkeyPatch, on_device: bool, by: str, said: dict[str, int]
) -> None:
    config = bounded(1000)
    config = replace(config, data_path=replace(config.data_path, on_device=on_device, num_workers=3))
    calls: list[dict[str, Any]] = []
    gather = getattr(data, by)

    def noted(split: data.Split, order: Iterator[torch.Tensor], **settings: Any) -> Iterator[data.Batch]:
        calls.append(settings)
        return gather(split, order, **{**settings, **({"num_workers": 0} if settings else {})})

    monkeypatch.setattr(f"autotune.training.set_up.{by}", noted)
    run, _ = set_up(config, torch.device("cpu"), PhaseClock(), 1)
    assert [{name: call[name] for name in said} for call in calls] == [said], "one process shows what is set up, and ends"
    with closing(run.batches(0)) as batches:
        samples = next(batches).samples
    assert samples.tolist() == torch.randperm(200, generator=torch.Generator().manual_seed(config.seed))[:100].tolist()


def test_an_evaluation_that_fails_leaves_model_and_optimizer_in_training(trial_config: MakeTrialConfig) -> None:
    def failing(*_: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    run, step = set_up(trial_config("optimizer=schedule_free_sgd"), torch.device("cpu"), PhaseClock(), 1)
    step.parts = replace(step.parts, metric=failing)
    with pytest.raises(ZeroDivisionError):
        run.evaluate(step.parts, run.validation)
    assert all(module.training for module in step.parts.model.modules())
    assert all(group["train_mode"] for group in step.parts.optimizer.param_groups)
