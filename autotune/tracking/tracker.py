"""What follows a study as it runs: four verbs, and the records they take.

A tracker is told, never asked: nothing in a study depends on what it keeps, so it may be slow or absent and the search is
the same. A tracker is made by ``tracker_class(info, finished=...)``, where ``finished`` holds the runs that ended before a
study was resumed, so that it can fill in what it missed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from autotune.measurement import Evaluation, TrialResult


@dataclass(frozen=True, kw_only=True)
class StudyInfo:
    """What a tracker is told about a study, or about a comparison."""

    name: str
    kind: str
    """``study``, ``comparison`` or ``scaling``."""
    workload: str
    """What is trained on what, such as ``simple_cnn-digits``: studies of one workload can be compared."""
    experiment: str
    folder: str
    """Where the study keeps its files; with ``name`` it tells one study from another."""
    settings: Mapping[str, Any]
    """What the study was asked for, flat: target, sampler, number of trials, ..."""
    tags: Mapping[str, str]
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Plain data kept beside it as YAML, by file name: what a recording says of a study besides its trials."""


@dataclass(frozen=True, kw_only=True)
class TrackedTrial:
    """One run of a study: a search trial, one confirmation run of a trial's configuration, or one run of a comparison."""

    name: str
    """Unique within the study, such as ``trial-7``, ``confirm-7-1`` or ``a-1``."""
    phase: str
    """``search``, ``confirm``, ``compare`` or ``scale``."""
    trial: int
    """The trial's number; in a comparison that of the pair."""
    values: Mapping[str, Any]
    """The varied parameters by config key."""
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    """The resolved configuration."""
    seed: int
    started_at: float
    """Unix time."""
    retry_of: int | None = None
    """The trial of the same point that was lost before this one."""


FinishedRun = tuple[TrackedTrial, TrialResult, float | None]
"""A run that has ended: what it was, what became of it, and its score where the objective gives one."""


class Tracker(Protocol):
    """Contract of ``tracking:`` in the configuration. The verbs return at once: a training may be waiting."""

    def start(self, trial: TrackedTrial) -> None:
        """A run was handed to a worker."""
        ...

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """The started run of this name made an evaluation."""
        ...

    def finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        """A run ended; also told of runs that ``start`` never saw in this process."""
        ...

    def close(self, *, status: str, metrics: Mapping[str, float], tags: Mapping[str, str], artifacts: Sequence[Path]) -> None:
        """The study ended; waits until all that was told is kept.

        ``status`` is FINISHED, KILLED or FAILED; ``artifacts`` are files and folders of the study as a whole.
        """
        ...


class NoTracker:
    """Keeps nothing."""

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
