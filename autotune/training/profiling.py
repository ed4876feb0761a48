"""Profiles a configuration's training: runs its own steps, first timed, then under torch's
profiler.

Nothing is evaluated, and the trained weights are not saved. The labels that ``step.py`` sets are
rows of torch's table. Backward kernels are started by a thread of autograd's, outside the label of
the training's thread, so on a GPU ``backward`` has none of their time.
"""

import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from torch.profiler import profile

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.files import make_folder
from autotune.measurement import PhaseClock
from autotune.training.data import load_data
from autotune.training.device import peak_memory_bytes, pick_device, synchronizer
from autotune.training.set_up import num_steps, set_up

_NUM_WARM_UPS = 3
"""Steps before the timed ones, and before the profiled ones."""


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """What the steps of one configuration take."""

    batch_size: int
    step_seconds: float
    """Mean seconds of a step without the profiler, which makes every operator take longer."""
    peak_memory_bytes: int
    table: str
    """torch's table of the profiled steps, by operator and part of a step."""


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
        Exception: the trained code raised it; memory errors are not caught here.
    """
    if config.training is not None:
        raise ConfigError(
            "training: a function has no steps to tell apart; profile an experiment without"
            " `training`"
        )
    if config.num_workers > 1:
        raise ConfigError(f"parallelism.num_workers: found {config.num_workers}; a profile needs 1")
    device = pick_device(config.device)
    num_needed = 2 * (_NUM_WARM_UPS + num_profiled)
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
            wait()
            return time.perf_counter() - began

        take(_NUM_WARM_UPS)
        seconds = take(num_profiled)
        peak = peak_memory_bytes(device)
        with profile():  # the first one is set up
            take(_NUM_WARM_UPS)
        with profile(acc_events=True) as profiler:  # without it torch 2.11 warns
            take(num_profiled)
    make_folder(trace.parent)
    profiler.export_chrome_trace(str(trace))
    order = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    return StepProfile(
        batch_size=run.batch_size,
        step_seconds=seconds / num_profiled,
        peak_memory_bytes=peak,
        table=profiler.key_averages().table(sort_by=order),
    )
