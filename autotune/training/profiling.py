"""Profiles a configuration's training: runs its own steps, first timed, then under torch's
profiler.

Nothing is evaluated, and the trained weights are not saved. torch's ``key_averages`` gives the
times of the labels that ``step.py`` sets and of the operators. Backward kernels are started by a
thread of autograd's, outside the label of the training's thread, so on a GPU the backward pass (or
the CUDA graph) has what no other part has started.
"""

import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

# missing in torch's stubs
from torch.autograd.profiler import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from autotune.config.build import build_partial
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError, ExecutionError
from autotune.files import make_folder
from autotune.measurement import PhaseClock
from autotune.training.capabilities import cpu_name
from autotune.training.data import fits_on, load_data
from autotune.training.device import gpu_kind, peak_memory_bytes, pick_device, synchronizer
from autotune.training.set_up import num_steps, set_up
from autotune.training.step import labelled

PARTS = ("data", "augmentation", "forward", "backward", "graph", "optimizer")
"""Parts of a training step, in their order; ``graph`` is forward and backward in one CUDA graph."""
BETWEEN, WAITING, IDLE = "between", "waiting", "idle"
"""The host outside all parts, the host waiting for the GPU after the last step, and the GPU
without work."""
_NUM_WARM_UPS, _NUM_WATCHED = 3, 2
"""Steps before the timed ones, and steps in which waits for the GPU are looked for."""


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """Mean time of an operator in a step: on the CPU its own, on a GPU that of the kernels it
    starts.
    """

    name: str
    calls: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Means over the profiled steps of one configuration, in seconds per step."""

    num_steps: int
    batch_size: int
    plain_step_seconds: float
    """Seconds of a step without the profiler, which makes every operator take longer."""
    step_seconds: float
    host_seconds: Mapping[str, float]
    """Host time by part; the times sum to ``step_seconds``."""
    device_seconds: Mapping[str, float]
    """GPU time by the part that started the kernels, and of IDLE; empty on the CPU."""
    operators: tuple[OperatorTime, ...]
    """Operators of the step, longest first."""
    num_kernels: float
    """Number of GPU kernels in a step."""
    waits: tuple[str, ...]
    """Lines of code (``file:line``) at which the host waits for the GPU within a step."""
    device_name: str
    compute_capability: tuple[int, int] | None
    """CUDA compute capability; None without a GPU of NVIDIA's."""
    num_threads: int
    peak_memory_bytes: int
    memory_limit_bytes: int | None
    """The GPU's memory; None on the CPU."""
    is_resident: bool
    """Whether the training split is kept on the device."""
    is_small: bool
    """Whether the training split would fit on the device."""
    optimizer_kernels: tuple[str, ...]
    """Those of ``fused`` and ``foreach`` that the optimizer accepts."""
    settings: Mapping[str, Any]
    """Values of the groups ``runtime``, ``data_path`` and ``precision``, by dotted key."""

    def share(self, seconds: float) -> float:
        """A time as a fraction of the step."""
        return seconds / self.step_seconds


def profile_training(
    config: TrialConfig, trace: Path, *, num_profiled: int, progress: float, num_threads: int
) -> StepProfile:
    """Profile steps of one configuration's training.

    Args:
        config: configuration to profile; its schedule is lengthened if it has fewer steps than the
            profile needs.
        trace: file that the Chrome trace is written to; missing folders are created.
        num_profiled: number of steps to time, and number of further steps to profile.
        progress: fraction of the schedule, 0 to 1, at which the steps begin; earlier steps are not
            run.
        num_threads: number of CPU threads, unless the configuration sets one.

    Raises:
        ConfigError: the training is a function or takes several workers, or a component cannot be
            made.
        ExecutionError: the profiler does not see the GPU.
        Exception: the trained code raised it; memory errors are not caught here.
    """
    device = _device_of(config)
    on_gpu = device.type == "cuda"
    num_needed = 2 * _NUM_WARM_UPS + 2 * num_profiled + _NUM_WATCHED
    data = load_data(config)
    if num_steps(config, data) < num_needed:
        config = replace(
            config, epochs=num_needed / (len(data.train) // min(config.batch_size, len(data.train)))
        )
    run, step = set_up(config, device, PhaseClock(), num_threads)
    first = round(progress * (run.total_steps - num_needed))
    steps, wait = iter(range(first, run.total_steps)), synchronizer(device)
    with closing(run.batches(first)) as batches:

        def take(number: int) -> float:
            """Run the next steps, wait for the device, and return the seconds that this took."""
            began = time.perf_counter()
            for _ in range(number):
                step.on_next(batches, next(steps))
            with labelled(WAITING):
                wait()
            return time.perf_counter() - began

        take(_NUM_WARM_UPS)
        plain_seconds = take(num_profiled)
        peak = peak_memory_bytes(device)
        waits = _waits(lambda: step.on_next(batches, next(steps))) if on_gpu else ()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities):  # the first one is set up
            take(_NUM_WARM_UPS)
        # without it torch 2.11 warns
        with profile(activities=activities, acc_events=True) as profiler:
            seconds = take(num_profiled)
    make_folder(trace.parent)
    profiler.export_chrome_trace(str(trace))
    optimizer = build_partial(config.optimizer, config.allowed_targets, "optimizer").func
    taken, settings = inspect.signature(optimizer).parameters, asdict(config)
    name, capability = gpu_kind(device) if on_gpu else (cpu_name(), None)
    return StepProfile(
        **_times(profiler.key_averages(), seconds, num_profiled, on_gpu=on_gpu),
        num_steps=num_profiled,
        batch_size=run.batch_size,
        plain_step_seconds=plain_seconds / num_profiled,
        waits=waits,
        device_name=name,
        compute_capability=capability,
        num_threads=torch.get_num_threads(),
        peak_memory_bytes=peak,
        memory_limit_bytes=torch.cuda.mem_get_info(device)[1] if on_gpu else None,
        is_resident=run.is_resident,
        is_small=fits_on(device, run.data),
        optimizer_kernels=tuple(name for name in ("fused", "foreach") if name in taken),
        settings={
            f"{group}.{key}": value
            for group in ("runtime", "data_path", "precision")
            for key, value in settings[group].items()
        },
    )


def _device_of(config: TrialConfig) -> torch.device:
    """The device of a training that can be profiled."""
    if config.training is not None:
        raise ConfigError(
            "training: a function has no steps to tell apart; profile an experiment without"
            " `training`"
        )
    if config.num_workers > 1:
        raise ConfigError(f"parallelism.num_workers: found {config.num_workers}; a profile needs 1")
    return pick_device(config.device)


def _waits(take_step: Callable[[], None]) -> tuple[str, ...]:
    """Lines of Python (``file:line``) that make the host wait for the GPU within two steps, by
    torch's own check.
    """
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(_NUM_WATCHED):
                take_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return tuple(
        dict.fromkeys(
            f"{warning.filename}:{warning.lineno}"
            for warning in told
            if "called a synchronizing CUDA operation" in str(warning.message)
        )
    )


def _times(
    averages: Iterable[Any], seconds: float, num_profiled: int, *, on_gpu: bool
) -> Mapping[str, Any]:
    """Seconds per step by part and by operator."""
    per_step = 1e-6 / num_profiled  # averages are sums in microseconds
    step_seconds = seconds / num_profiled
    on_host = [event for event in averages if event.device_type == DeviceType.CPU]
    kernels = [
        event
        for event in averages
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    names = (*PARTS, WAITING) if on_gpu else PARTS
    parts = {
        event.key: event for event in on_host if event.is_user_annotation and event.key in names
    }
    host = {part: event.cpu_time_total * per_step for part, event in parts.items()}
    host[BETWEEN] = max(0.0, step_seconds - sum(host.values()))
    device = {}
    if on_gpu:
        busy = sum(event.self_device_time_total for event in kernels) * per_step
        if not busy:
            raise ExecutionError(
                "device: torch's profiler sees nothing that runs on this GPU; it needs CUPTI, which"
                " CUDA brings"
            )
        rest = "graph" if "graph" in parts else "backward"
        device = {
            part: event.device_time_total * per_step
            for part, event in parts.items()
            if part not in (rest, WAITING)
        }
        device[rest] = max(0.0, busy - sum(device.values()))
        device[IDLE] = max(0.0, step_seconds - busy)
    own_time = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    operators = [
        OperatorTime(
            name=event.key,
            calls=event.count / num_profiled,
            seconds=getattr(event, own_time) * per_step,
        )
        for event in on_host
        if not event.is_user_annotation and getattr(event, own_time)
    ]
    return {
        "step_seconds": step_seconds,
        "host_seconds": host,
        "device_seconds": device,
        "operators": tuple(sorted(operators, key=lambda operator: operator.seconds, reverse=True)),
        "num_kernels": sum(event.count for event in kernels) / num_profiled,
    }
