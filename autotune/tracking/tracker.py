"""The interface of an experiment tracker: a protocol of four methods, and the records that they take.

A tracker only receives data: nothing in a study depends on what it keeps, so the search is the same if it is slow or absent. A
tracker is made by ``tracker_class(info, finished=...)``, where ``finished`` holds the runs that ended before the study was resumed,
so that it can fill in what it missed. Two more functions are called where there are any: ``preload`` of the tracker's module, before all
else, and the tracker's ``write_due``, about once a second while there is nothing to tell it.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from autotune.measurement import Evaluation, TrialResult
from autotune.remote.url import without_password


@dataclass(frozen=True, kw_only=True)
class StudyInfo:
    """Facts on a study, a comparison or a scaling measurement that a tracker receives when it is made."""

    name: str
    kind: str
    """What is tracked: ``study``, ``comparison`` or ``scaling``."""
    workload: str
    """Model and data set, such as ``simple_cnn-digits``; studies of the same workload can be compared."""
    experiment: str
    folder: str
    """Folder of the study's files; folder and ``name`` together identify a study."""
    settings: Mapping[str, Any]
    """The study's settings as a flat mapping: target, sampler, number of trials, ..."""
    tags: Mapping[str, str]
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Plain data to keep as YAML files, by file name: the content of a study's recording besides its trials."""


@dataclass(frozen=True, kw_only=True)
class TrackedTrial:
    """One run of a study: a search trial, one confirmation run of a trial's configuration, or one run of a comparison."""

    name: str
    """Name of the run, unique within the study, such as ``trial-7``, ``confirm-7-1`` or ``a-1``."""
    phase: str
    """What the run is part of: ``search``, ``confirm``, ``compare`` or ``scale``."""
    trial: int
    """Number of the trial; in a comparison, number of the pair."""
    values: Mapping[str, Any]
    """Value of each varied parameter, by config key."""
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    """The resolved configuration."""
    seed: int
    started_at: float
    """Unix time at which the run started."""
    retry_of: int | None = None
    """Number of an earlier, lost or interrupted trial of the same configuration that this one repeats; else None."""


FinishedRun = tuple[TrackedTrial, TrialResult, float | None]
"""A run that has ended, its result, and its score; the score is None if the objective gives none."""


class Tracker(Protocol):
    """Contract of ``tracking:`` in the configuration. They are called in the tracker's own process: no training waits."""

    def start(self, trial: TrackedTrial) -> None:
        """Called when a run is handed to a worker."""
        ...

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Called after each evaluation of the started run ``name``."""
        ...

    def finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        """Called when a run has ended, even one for which ``start`` was not called in this process."""
        ...

    def close(self, *, status: str, metrics: Mapping[str, float], tags: Mapping[str, str], artifacts: Sequence[Path]) -> None:
        """Called when the study has ended; returns when everything received is stored.

        ``status`` is FINISHED, KILLED or FAILED; ``artifacts`` are files and folders of the study as a whole.
        """
        ...


class NoTracker:
    """Tracker that keeps nothing."""

    def __init__(self, info: StudyInfo, *, finished: Sequence[FinishedRun] = ()) -> None:
        pass

    def start(self, trial: TrackedTrial) -> None:
        """Do nothing."""

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Do nothing."""

    def finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        """Do nothing."""

    def close(self, *, status: str, metrics: Mapping[str, float], tags: Mapping[str, str], artifacts: Sequence[Path]) -> None:
        """Do nothing."""


def browse_command(tracking: Mapping[str, Any], studies: str) -> str | None:
    """The command or the server address that shows the tracked runs; None for a tracker that is not part of autotune.

    Args:
        tracking: the ``tracking`` node of the configuration.
        studies: folder that contains the studies' folders.
    """
    if tracking["_target_"].endswith(".TensorBoardTracker"):
        return f"tensorboard --logdir {shlex.quote(studies)}"
    if "uri" not in tracking:
        return None
    uri = tracking["uri"] or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return "mlflow ui"
    shown_uri = without_password(uri)
    return shown_uri if uri.startswith(("http://", "https://")) else f"mlflow ui --backend-store-uri {shlex.quote(shown_uri)}"
