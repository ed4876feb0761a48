"""Profiles a configuration's training: runs steps exactly as the training does, first timed, then under torch's profiler.

The profiler makes every operator slower, so steps are timed without it first. Nothing is evaluated, and the trained weights are
not saved.
"""

import inspect
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from autotune.collector import collect_as_usual
from autotune.config.build import build_partial
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError, ExecutionError
from autotune.files import make_folder, replacing
from autotune.measurement import PhaseClock
from autotune.step_profile import StepProfile, StepTimes
from autotune.training.capabilities import OTHER_DEVICES, cpu_name
from autotune.training.data import Batch, fits_on, load_data
from autotune.training.device import gpu_formats, peak_memory_bytes, pick_device, synchronizer
from autotune.training.set_up import Run, num_steps, set_up
from autotune.training.step import TrainingStep, labelled
from autotune.training.trace import STEP, WAIT, read_events, step_times

_NUM_WARM_UPS = 3
"""Steps before the timed ones, which finish lazy set-up and the first prefetched batches."""
_NUM_PROFILER_WARM_UPS = 1
"""Steps under a first profiler whose result is discarded, which finish the profiler's own set-up."""
_NUM_STACK_STEPS = 2
"""Steps whose call stacks are recorded, if the profile shows that the host waits for the device."""


def profile_training(config: TrialConfig, trace: Path, *, num_profiled: int, progress: float, num_threads: int) -> StepProfile:
    """Profile steps of one configuration's training.

    Args:
        config: configuration to profile; its schedule is lengthened if it has fewer steps than the profile needs.
        trace: file that the Chrome trace is written to; missing folders are created.
        num_profiled: number of steps to time, and number of further steps to profile.
        progress: fraction of the schedule, 0 to 1, at which the steps begin; earlier steps are not run.
        num_threads: number of CPU threads, unless the configuration sets one.

    Raises:
        ConfigError: the configuration names a training function of the user's own or several workers, or a component cannot be made.
        DataError: the data set cannot be made.
        ExecutionError: the profiler does not see the GPU.
        Exception: the trained code raised it; memory errors are not caught here.
    """
    if config.training is not None:
        raise ConfigError("training: a function of one's own has no steps that autotune could tell apart; accepted is null")
    collect_as_usual()
    device = pick_device(config.device)
    if device.type in OTHER_DEVICES:
        raise ConfigError(
            f"device: found {device.type}, whose work torch's profiler does not tell apart here; accepted are auto, cpu, cuda"
        )
    wait = synchronizer(device)
    config = _lengthened(config, num_needed := _NUM_WARM_UPS + _NUM_PROFILER_WARM_UPS + 2 * num_profiled + _NUM_STACK_STEPS)
    if config.num_workers > 1:
        raise ConfigError(f"parallelism.num_workers: found {config.num_workers}, accepted by a profile is 1")
    run, step = set_up(config, device, PhaseClock(), num_threads)
    first = round(progress * (run.total_steps - num_needed))
    with closing(run.batches(first)) as batches:
        steps = _Steps(step, batches, first, wait)
        steps.take(_NUM_WARM_UPS)
        plain_step_seconds = _seconds(lambda: steps.take(num_profiled)) / num_profiled
        peak = peak_memory_bytes(device)
        _profiled(lambda: steps.take(_NUM_PROFILER_WARM_UPS), device)
        _profiled(lambda: steps.take(num_profiled), device, trace)
        times = step_times(read_events(trace), on_gpu=device.type == "cuda")
        if device.type == "cuda" and not times.num_kernels:
            raise ExecutionError("device: torch's profiler sees nothing that runs on this GPU; it needs CUPTI, which CUDA brings")
        if times.synchronisations:
            times = replace(times, synchronisations=_times_with_stacks(steps, device).synchronisations)
    return StepProfile(
        times=times,
        num_steps=num_profiled,
        batch_size=run.batch_size,
        plain_step_seconds=plain_step_seconds,
        num_threads=torch.get_num_threads(),
        peak_memory_bytes=peak,
        is_resident=run.is_resident,
        is_small=fits_on(device, run.data),
        optimizer_kernels=_optimizer_kernels(config),
        settings=_settings(config),
        **_device_facts(run),
    )


@dataclass(eq=False)
class _Steps:
    """The consecutive steps of one training."""

    step: TrainingStep
    batches: Iterator[Batch]
    next: int
    wait: Callable[[], None]

    def take(self, number: int) -> None:
        """Run the next ``number`` steps and wait until the device has finished them."""
        for _ in range(number):
            with labelled(STEP):
                self.step.on_next(self.batches, self.next)
            self.next += 1
        with labelled(WAIT):
            self.wait()


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _profiled(work: Callable[[], None], device: torch.device, trace: Path | None = None, *, with_stack: bool = False) -> None:
    """Call ``work`` under torch's profiler, and write the Chrome trace to a file if one is given."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, record_shapes=True, with_stack=with_stack, acc_events=True) as profiler:  # else torch 2.11 warns
        work()
    if trace is not None:
        make_folder(trace.parent)
        with tempfile.TemporaryDirectory() as folder, replacing(trace) as part:
            profiler.export_chrome_trace(str(made := Path(folder) / trace.name))  # which replaces the file
            shutil.copyfile(made, part)


def _times_with_stacks(steps: _Steps, device: torch.device) -> StepTimes:
    """Step times with call stacks: recording stacks makes the times unusable, but names the code that waits for the device."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "stacks.json"
        _profiled(lambda: steps.take(_NUM_STACK_STEPS), device, trace, with_stack=True)
        return step_times(read_events(trace), on_gpu=device.type == "cuda")


def _lengthened(config: TrialConfig, num_needed: int) -> TrialConfig:
    """The configuration with a schedule of at least ``num_needed`` steps."""
    data = load_data(config)
    if num_steps(config, data) >= num_needed:
        return config
    return replace(config, epochs=num_needed / (len(data.train) // min(config.batch_size, len(data.train))))


def _optimizer_kernels(config: TrialConfig) -> tuple[str, ...]:
    """The kernel implementations (``fused``, ``foreach``) that the optimizer's signature offers."""
    parameters = inspect.signature(build_partial(config.optimizer, config.allowed_targets, "optimizer").func).parameters
    return tuple(kernels for kernels in ("fused", "foreach") if kernels in parameters)


def _settings(config: TrialConfig) -> dict[str, Any]:
    groups = {"runtime": asdict(config.runtime), "data_path": asdict(config.data_path), "precision": asdict(config.precision)}
    return {f"{group}.{key}": value for group, values in groups.items() for key, value in values.items()}


def _device_facts(run: Run) -> dict[str, Any]:
    if run.device.type != "cuda":
        return {"device": "cpu", "device_name": cpu_name(), "compute_capability": None, "memory_limit_bytes": None}
    name, capability, _ = gpu_formats(run.device)
    return {
        "device": "cuda",
        "device_name": name,
        "compute_capability": capability,
        "memory_limit_bytes": torch.cuda.get_device_properties(run.device).total_memory,
    }
