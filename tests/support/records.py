"""Records of trials of which a test gives only what it is about."""

import math
from pathlib import Path
from typing import Any

from autotune.config.schema import TrialConfig
from autotune.execution.task import TrialTask
from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome


def make_evaluation(train_seconds: float = 1.0, **values: Any) -> Evaluation:
    """The first evaluation of a trial that took so many seconds to train and nothing else."""
    given = {
        "step": 1,
        "epoch": 1.0,
        "samples": 1,
        "build_seconds": 0.0,
        "prepare_seconds": 0.0,
        "evaluate_seconds": 0.0,
        "metric": 0.5,
        "loss": 0.1,
        "samples_per_second": 1.0,
        "peak_memory_bytes": None,
        "energy_joules": None,
    }
    return Evaluation(train_seconds=train_seconds, **{**given, **values})


def make_result(
    trial: int = 0, outcome: Outcome = Outcome.REACHED, *evaluations: Evaluation, **values: Any
) -> TrialResult:
    """The result of a trial that took a second from start to stop."""
    given = {
        "values": {},
        "overrides": (),
        "seed": 0,
        "started_at": 0.0,
        "stopped_at": 1.0,
        "fingerprint": {},
    }
    return TrialResult(trial=trial, outcome=outcome, evaluations=evaluations, **{**given, **values})


def make_trial_task(config: TrialConfig, folder: Path | str = "/", **values: Any) -> TrialTask:
    """A task on one CPU without a cap, which finds and leaves all its files in ``folder``."""
    given = {
        "name": "trial-0",
        "cap_seconds": math.inf,
        "num_threads": 1,
        "deadline_seconds": 60.0,
        "code_folders": (str(folder),),
        "working_folder": str(folder),
        "hang_folder": str(folder),
        "num_cpus": 1,
        "num_gpus": 0,
    }
    return TrialTask(config=config, **{**given, **values})
