"""Profiling real steps on toy data: the parts are all there, and what waits for the device is
found.
"""

import contextlib
import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.config.schema import TrialConfig
from autotune.measurement import PhaseClock
from autotune.training.device import pick_device
from autotune.training.profiling import StepProfile, profile_training
from autotune.training.set_up import set_up

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


class AnySize(torch.nn.Sequential):
    """A net for images of any size."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        convolution = torch.nn.Conv2d(input_shape[0], 8, 3, padding=1)
        pool = torch.nn.AdaptiveAvgPool2d(1)
        super().__init__(
            convolution,
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            pool,
            torch.nn.Flatten(),
            torch.nn.Linear(8, num_classes),
        )


seen: list[float] = []


def watch_progress(
    inputs: torch.Tensor, *, samples: torch.Tensor, epoch: int, progress: float
) -> torch.Tensor:
    """An augmentation that notes how far the training is."""
    seen.append(progress)
    return inputs


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


def profiled(
    config: TrialConfig, folder: Path, *, num_profiled: int = 1, progress: float = 0.0
) -> StepProfile:
    return profile_training(
        config, folder / "trace.json", num_profiled=num_profiled, progress=progress, num_threads=1
    )


def test_the_parts_of_real_steps_are_there(toy: MakeConfig, tmp_path: Path) -> None:
    profile = profiled(toy("runtime.micro_batch_size=8"), tmp_path / "new", num_profiled=3)
    assert profile.batch_size == 16
    assert profile.step_seconds > 0
    assert profile.peak_memory_bytes > 0
    for part in ("data", "augmentation", "forward", "backward", "optimizer"):
        assert f" {part} " in profile.table
    events = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events].count("optimizer") == 3


@pytest.mark.parametrize(("progress", "expected"), [(0.5, 296), (1.0, 592)])
def test_profiling_begins_where_it_is_asked_to(
    toy: MakeConfig, tmp_path: Path, progress: float, expected: int
) -> None:
    seen.clear()
    profiled(
        toy(augmentation={"_target_": f"{__name__}.watch_progress"}, epochs=100),
        tmp_path,
        progress=progress,
    )
    assert min(filter(None, seen)) == expected / 600  # the warm-up is at the schedule's start


def options(group: str) -> list[str]:
    return [f"{group}={path.stem}" for path in sorted((CONF / group).glob("*.yaml"))]


IMAGES_OF_8 = "augmentation.resolutions=[[0,6],[0.5,null]]"
HOST_DATA = ("data_path.on_device=false", "data_path.on_device=true")
MEMORY = (
    "runtime.micro_batch_size=8",
    "runtime.activation_checkpointing=true",
    "runtime.channels_last=true",
)
GROUPS = (
    options("augmentation"),
    options("lr_schedule"),
    options("averaging"),
    options("optimizer"),
    HOST_DATA,
    MEMORY,
)
TOGETHER = [
    tuple(group[turn % len(group)] for group in GROUPS) for turn in range(max(map(len, GROUPS)))
]
"""Every option of these groups at least once, in as few trainings as that takes."""


class NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # missing in torch's stubs
    """Refuses operators for which the host would wait for a GPU.

    Torch's optimizers keep their step counts in host memory.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if function.overloadpacket in (
            aten._local_scalar_dense,
            aten.nonzero,
            aten.masked_select,
            aten.equal,
        ):
            frames = traceback.extract_stack()
            assert any("torch/optim/" in frame.filename for frame in frames), (
                f"{function} waits for the device"
            )
        return function(*args, **(kwargs or {}))


def take_steps(
    config: TrialConfig, number: int, no_waits: contextlib.AbstractContextManager[Any]
) -> None:
    run, step = set_up(config, pick_device(config.device), PhaseClock(), num_threads=1)
    with closing(run.batches(0)) as batches:
        step.on_next(batches, 0)
        with no_waits:
            for index in range(1, number):
                step.on_next(batches, index)


@pytest.mark.parametrize("overrides", TOGETHER, ids=" ".join)
def test_nothing_in_a_step_waits_for_the_device(
    toy: MakeConfig, overrides: tuple[str, ...]
) -> None:
    shrunk = (IMAGES_OF_8,) if "augmentation=speed" in overrides else ()
    take_steps(toy(*overrides, *shrunk), 4, NoReads())  # type: ignore[no-untyped-call]


def test_a_loss_that_waits_for_the_device_is_found(toy: MakeConfig) -> None:
    with pytest.raises(AssertionError, match="waits for the device"):
        take_steps(toy(loss={"_target_": f"{__name__}.loss_that_reads"}), 2, NoReads())  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def no_waits_on_a_gpu() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


PROTOTYPE = "ignore:Synchronization debug mode is a prototype"


@pytest.mark.gpu
@pytest.mark.filterwarnings(PROTOTYPE)
@pytest.mark.parametrize("overrides", [*TOGETHER, ("runtime.cuda_graph=true",)], ids=" ".join)
def test_on_a_gpu_no_step_waits(toy: MakeConfig, overrides: tuple[str, ...]) -> None:
    shrunk = (IMAGES_OF_8,) if "augmentation=speed" in overrides else ()
    # over two ends of an epoch
    take_steps(toy(*overrides, *shrunk, device="cuda"), 16, no_waits_on_a_gpu())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "overrides", [(), ("runtime.cuda_graph=true",), ("data_path.on_device=false",)], ids=" ".join
)
def test_kernels_of_a_gpu_are_told(
    toy: MakeConfig, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    profile = profiled(toy(*overrides, device="cuda"), tmp_path, num_profiled=3)
    assert "Self CUDA time total" in profile.table
