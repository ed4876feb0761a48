"""Say where the time of a training step goes: ``autotune profile experiment=NAME``.

Writes a Chrome trace into a new folder. Exit code 0; 2: bad input.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from autotune.config.command_keys import own_key, own_keys_help, read_own_keys
from autotune.config.command_line import composer_of, parse_command_line, print_config
from autotune.config.experiments import dated_name, names_experiment, require_experiment
from autotune.errors import ExecutionError
from autotune.remote import user_path
from autotune.training.capabilities import cpus_per_worker
from autotune.training.sources import train_missing_sources

_PURPOSE = "Say where the time of a training step goes."
_OTHER_KEYS = "and any key of the configuration, as for autotune train. Files go to study.folder."


@dataclass(kw_only=True)
class ProfileKeys:
    """Keys that ``autotune profile`` takes beside those of the configuration."""

    num_steps: int = own_key(20, "steps to time, and again to profile", least=1, most=10_000)
    progress: float = own_key(
        0.0, "how far into the schedule they begin: 0 at its start, 1 at its end", least=0, most=1
    )


def profile_command(arguments: Sequence[str]) -> int:
    """Run ``autotune profile`` with command-line arguments and return its exit code."""
    line = parse_command_line(
        "autotune profile", _PURPOSE, f"{own_keys_help(ProfileKeys)}\n\n{_OTHER_KEYS}", arguments
    )
    own, overrides = read_own_keys(ProfileKeys, line.overrides)
    require_experiment(names_experiment(overrides), line.config_dirs)
    composer = composer_of(line, overrides)
    composer.refuse_sweeps()
    if print_config(line, composer):
        return 0
    composed = composer.compose()
    config, experiment = composed.trial, composed.choices["experiment"]
    train_missing_sources(composer, lambda line: print(line, flush=True))
    study_folder = user_path(composed.config.study.folder)
    trace = study_folder / dated_name(f"profile-{experiment}") / "trace.json"
    # set before torch is imported, whose profiler otherwise logs each start and stop
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from autotune.training import device, profiling  # noqa: PLC0415  # import torch

    num_threads = cpus_per_worker(config, composed.config.cluster, device.local_capabilities())
    try:
        profile = profiling.profile_training(
            config,
            trace,
            num_profiled=own.num_steps,
            progress=own.progress,
            num_threads=num_threads,
        )
    except Exception as error:
        if not device.is_out_of_memory(error):
            raise
        raise ExecutionError(
            "out of memory; runtime.activation_checkpointing=true, a runtime.micro_batch_size= or a"
            " smaller batch_size= need less"
        ) from error
    Console(highlight=False).out(
        f"{experiment} · {own.num_steps} steps of {profile.batch_size} samples\n"
        f"  step    {1e3 * profile.step_seconds:.4g} ms,"
        f" {profile.batch_size / profile.step_seconds:,.0f} samples/s\n"
        f"  memory  {profile.peak_memory_bytes / 2**20:,.0f} MiB at its peak\n"
        f"{profile.table}"
        f"trace {trace} (open it at https://ui.perfetto.dev or chrome://tracing)"
    )
    return 0
