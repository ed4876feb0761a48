"""Profiling real steps on toy data: the parts are all there and add up, and what waits for the device is found."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import PhaseClock
from autotune.step_profile import BETWEEN, StepProfile
from autotune.training.profiling import profile_training
from autotune.training.set_up import set_up
from autotune.training.trace import STEP

pytestmark = pytest.mark.slow

MakeConfig = Callable[..., TrialConfig]
CONF = Path(__file__).resolve().parents[2] / "conf"


def bright_images() -> dict[str, Any]:
    targets = torch.arange(96) % 2
    pair = (targets.float().view(-1, 1, 1, 1) + torch.randn(96, 3, 8, 8), targets)
    return {"train": pair, "validation": pair}


def loss_that_reads(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that looks at its own value."""
    loss = torch.nn.functional.cross_entropy(outputs, targets)
    return loss if loss.item() < 1e9 else loss * 0


def loss_that_selects(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss over as many samples as a mask chooses."""
    return torch.nn.functional.cross_entropy(outputs[targets >= 0], targets)


class AnySize(torch.nn.Sequential):
    """A net for images of any size."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        convolution = torch.nn.Conv2d(input_shape[0], 8, 3, padding=1)
        pool = torch.nn.AdaptiveAvgPool2d(1)
        super().__init__(convolution, torch.nn.BatchNorm2d(8), torch.nn.ReLU(), pool, torch.nn.Flatten(), torch.nn.Linear(8, num_classes))


seen: list[float] = []


def watch_progress(inputs: torch.Tensor, *, samples: torch.Tensor, epoch: int, progress: float) -> torch.Tensor:
    """An augmentation that notes how far the training is."""
    seen.append(progress)
    return inputs


def own_training() -> Iterator[Mapping[str, Any]]:
    yield {"metric": 0.25}


@pytest.fixture
def toy(trial_config: MakeConfig) -> MakeConfig:
    """Makes configurations of a net with one convolution, and batches of 16 of 96 images."""

    def make(*overrides: str, **fields: Any) -> TrialConfig:
        values: dict[str, Any] = {
            "data": {"_target_": f"{__name__}.bright_images"},
            "model": {"_target_": f"{__name__}.AnySize"},
            "allowed_targets": (__name__,),
            "batch_size": 16,
        }
        return trial_config(*overrides, **{**values, **fields})

    return make


def profiled(config: TrialConfig, folder: Path, *, num_profiled: int = 1, progress: float = 0.0) -> StepProfile:
    return profile_training(config, folder / "trace.json", num_profiled=num_profiled, progress=progress, num_threads=1)


def test_the_parts_of_real_steps_add_up(toy: MakeConfig, tmp_path: Path) -> None:
    profile = profiled(toy("runtime.micro_batch_size=8"), tmp_path / "new", num_profiled=3)
    times = profile.times
    assert set(times.host_seconds) == {"data", "augmentation", "forward", "backward", "optimizer", BETWEEN}
    assert all(seconds > 0 for seconds in times.host_seconds.values())
    assert sum(times.host_seconds.values()) == pytest.approx(times.step_seconds)
    assert 0 < times.python_seconds < times.step_seconds
    in_operators = sum(each.self_seconds for each in times.operators)
    assert 0 < in_operators < times.step_seconds - times.python_seconds + times.host_seconds["data"]
    assert {each.calls for each in times.operators if each.name == "aten::convolution_backward"} == {2}  # micro-batches
    assert times.device_seconds == {}
    assert times.synchronisations == times.kernels == ()
    assert (profile.num_steps, profile.batch_size, profile.device, profile.is_resident) == (3, 16, "cpu", True)
    assert profile.plain_step_seconds > 0
    assert profile.optimizer_kernels == ("fused", "foreach")
    assert profile.settings["runtime.micro_batch_size"] == 8
    labels = [each["name"] for each in json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]]
    assert labels.count(STEP) == 3
    json.dumps(profile.as_dict())


@pytest.mark.parametrize(("progress", "expected"), [(0.5, 296), (1.0, 592)])
def test_profiling_begins_where_it_is_asked_to(toy: MakeConfig, tmp_path: Path, progress: float, expected: int) -> None:
    config = toy(augmentation={"_target_": f"{__name__}.watch_progress"}, epochs=100)
    profiled(config, tmp_path, progress=progress)
    first_of_training = 16 + 1  # the warm-up looks at sixteen places and trains at one
    assert seen[first_of_training] == expected / 600
    seen.clear()


def test_a_short_schedule_is_lengthened(toy: MakeConfig, tmp_path: Path) -> None:
    config = toy("lr_schedule=one_cycle", epochs=0.1)
    assert profiled(config, tmp_path, num_profiled=4).num_steps == 4


def test_a_training_function_of_ones_own_is_refused(toy: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="training: a function of one's own has no steps"):
        profiled(toy(training={"_target_": f"{__name__}.own_training"}), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("loss_that_reads", {("aten::item", "forward")}),
        ("loss_that_selects", {("aten::index", "forward"), ("aten::_index_put_impl_", "backward")}),
    ],
)
def test_a_loss_that_waits_for_the_device_is_found(toy: MakeConfig, tmp_path: Path, loss: str, expected: set[tuple[str, str]]) -> None:
    profile = profiled(toy(loss={"_target_": f"{__name__}.{loss}"}), tmp_path, num_profiled=2)
    found = profile.times.synchronisations
    assert {(each.operator, each.part) for each in found} == expected
    assert {each.calls for each in found} == {1.0}
    assert [each.source.rpartition(": ")[2] for each in found if each.part == "forward" and each.source] == [loss]


def options(group: str) -> list[str]:
    return [f"{group}={path.stem}" for path in sorted((CONF / group).glob("*.yaml"))]


IMAGES_OF_8 = "augmentation.resolutions=[[0,6],[0.5,null]]"
HOST_DATA = ("data_path.on_device=false", "data_path.on_device=true")
MEMORY = ("runtime.micro_batch_size=8", "runtime.activation_checkpointing=true", "runtime.channels_last=true")
GROUPS = (options("augmentation"), options("lr_schedule"), options("averaging"), options("optimizer"), HOST_DATA, MEMORY)
TOGETHER = [tuple(group[turn % len(group)] for group in GROUPS) for turn in range(max(map(len, GROUPS)))]
"""Every option of these groups at least once, in as few trainings as that takes."""


@pytest.mark.parametrize("overrides", [*TOGETHER[:5], *(pytest.param(each, marks=pytest.mark.slow) for each in TOGETHER[5:])], ids=" ".join)
def test_nothing_in_a_step_waits_for_the_device(toy: MakeConfig, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    shrunk = (IMAGES_OF_8,) if "augmentation=speed" in overrides else ()
    assert profiled(toy(*overrides, *shrunk), tmp_path).times.synchronisations == ()


def test_every_option_is_looked_at() -> None:
    assert set(itertools.chain(*TOGETHER)) == set(itertools.chain(*GROUPS))


@pytest.mark.slow
def test_scaled_gradients_wait_unless_the_optimizer_is_fused(toy: MakeConfig, tmp_path: Path) -> None:
    (found,) = profiled(toy("precision=fp16"), tmp_path).times.synchronisations
    assert (found.operator, found.part) == ("aten::item", "optimizer")
    assert profiled(toy("precision=fp16", "runtime.optimizer_kernels=fused"), tmp_path).times.synchronisations == ()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where it imports its compiler
def test_compiled_steps_are_profiled(toy: MakeConfig, tmp_path: Path) -> None:
    times = profiled(toy("runtime.compile=default"), tmp_path, num_profiled=2).times
    assert sum(times.host_seconds.values()) == pytest.approx(times.step_seconds)
    assert times.host_seconds["forward"] > 0
    assert times.synchronisations == ()


def take_steps(config: TrialConfig, number: int) -> None:
    """Steps in which torch refuses to make the host wait for the GPU."""
    device = torch.device("cuda")
    run, step = set_up(config, device, PhaseClock(), num_threads=1)
    with closing(run.batches(0)) as batches:
        step.on_next(batches, 0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for index in range(1, number):
                step.on_next(batches, index)
        finally:
            torch.cuda.set_sync_debug_mode("default")


PROTOTYPE = "ignore:Synchronization debug mode is a prototype"


@pytest.mark.gpu
@pytest.mark.filterwarnings(PROTOTYPE)
@pytest.mark.parametrize("overrides", [*TOGETHER, ("runtime.cuda_graph=true",)], ids=" ".join)
def test_on_a_gpu_no_step_waits(toy: MakeConfig, overrides: tuple[str, ...]) -> None:
    shrunk = (IMAGES_OF_8,) if "augmentation=speed" in overrides else ()
    take_steps(toy(*overrides, *shrunk, device="cuda"), 16)  # over two ends of an epoch


@pytest.mark.gpu
@pytest.mark.filterwarnings(PROTOTYPE)
def test_on_a_gpu_a_loss_that_waits_is_refused(toy: MakeConfig) -> None:
    with pytest.raises(RuntimeError, match="synchronizing"):
        take_steps(toy(loss={"_target_": f"{__name__}.loss_that_reads"}, device="cuda"), 3)


@pytest.mark.gpu
@pytest.mark.parametrize("overrides", [(), ("runtime.cuda_graph=true",), ("data_path.on_device=false",)], ids=" ".join)
def test_the_parts_of_steps_on_a_gpu_add_up(toy: MakeConfig, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    times = profiled(toy(*overrides, device="cuda"), tmp_path, num_profiled=3).times
    assert sum(times.host_seconds.values()) == pytest.approx(times.step_seconds)
    assert sum(times.device_seconds.values()) == pytest.approx(times.step_seconds)
    assert {"optimizer", "graph" if "runtime.cuda_graph=true" in overrides else "backward"} <= set(times.device_seconds)
    assert times.num_kernels > 10
    assert times.synchronisations == ()


@pytest.mark.gpu
def test_on_a_gpu_a_loss_that_waits_is_found(toy: MakeConfig, tmp_path: Path) -> None:
    profile = profiled(toy(loss={"_target_": f"{__name__}.loss_that_reads"}, device="cuda"), tmp_path, num_profiled=2)
    (found,) = profile.times.synchronisations
    assert (found.operator, found.part, found.calls) == ("aten::item", "forward", 1.0)
    assert found.source is not None
