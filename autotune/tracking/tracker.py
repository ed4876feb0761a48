"""The interface of an experiment tracker: a protocol of four methods, and the records that they
take.

A tracker only receives data: nothing in a study depends on what it keeps, so the search is the same
if it is slow or absent. It is made by ``tracker_class(info)``, and is called by one thread
(``writer.py``), which tells it of the runs that it lacks, too.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from autotune.measurement import Evaluation, TrialResult
from autotune.policy import COMPARE, Run
from autotune.redaction import without_secrets_in
from autotune.space import override_text


@dataclass(frozen=True, kw_only=True)
class StudyInfo:
    """Facts on a study or a comparison that a tracker receives when it is made."""

    name: str
    kind: str
    """What is tracked: ``study`` or ``comparison``."""
    workload: str
    """Model and data set, such as ``simple_cnn-digits``; studies of the same workload can be
    compared."""
    experiment: str
    folder: str
    """Folder of the study's files; folder and ``name`` together identify a study."""
    settings: Mapping[str, Any]
    """The study's settings as a flat mapping: target, sampler, number of trials, ..."""
    tags: Mapping[str, str]
    parameters: Sequence[str] = ()
    """Config keys of the search space; empty where nothing is searched."""
    baseline: Mapping[str, Any] = field(default_factory=dict)
    """Values of the baseline by config key, as ``Run.values``; empty if the search
    space does not contain it."""
    is_resumed: bool = False
    """Whether runs of the study have ended before the tracker is made."""

    def __post_init__(self) -> None:
        for name in ("settings", "tags", "baseline"):  # trackers keep what they are told
            object.__setattr__(self, name, without_secrets_in(getattr(self, name)))


_MAX_NAME_CHARACTERS = 60


def display_name(trial: Run, baseline: Mapping[str, Any]) -> str:
    """A name that tells a study's runs apart at a glance: the run, and which of its values are not
    the baseline's, such as ``12: optimizer=adamw, lr=0.003``.

    Keys lose the leading parts that tell none of the run's keys apart. Runs of a comparison have
    their plain names, which say their side.
    """
    if trial.phase == COMPARE:
        return trial.name
    changes = [
        f"{_short_key(key, trial.values)}="
        + (f"{value:.3g}" if isinstance(value, float) else override_text(value))
        for key, value in trial.values.items()
        if key not in baseline or value != baseline[key]
    ]
    name = f"{trial.name.removeprefix('trial-')}: {', '.join(changes) or 'baseline'}"
    return name if len(name) <= _MAX_NAME_CHARACTERS else name[: _MAX_NAME_CHARACTERS - 1] + "…"


def _short_key(key: str, keys: Collection[str]) -> str:
    """The last parts of a dotted key, as few as no other key ends with."""
    parts = key.split(".")
    for num_parts in range(1, len(parts)):
        ending = ".".join(parts[-num_parts:])
        if sum(f".{other}".endswith(f".{ending}") for other in keys) == 1:
            return ending
    return key


FinishedRun = tuple[Run, TrialResult, float | None]
"""A run that has ended, its result, and its score; the score is None if the objective gives
none."""


class BestScore(NamedTuple):
    """The best score of a search after a number of trials have ended."""

    num_ended: int
    score: float
    at: float
    """Unix time."""


@dataclass(frozen=True, kw_only=True)
class StudyEnd:
    """What a tracker receives when a study has ended."""

    status: str
    """FINISHED, KILLED or FAILED."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    artifacts: Sequence[Path] = ()
    """Files and folders of the study as a whole; some may not exist."""
    best_scores: Sequence[BestScore] = ()
    """One for each trial that improved on those before, and one for the last trial."""
    make_model: Callable[[], tuple[Any, Any]] | None = None
    """Makes the trained model of the best configuration, a ``torch.nn.Module``, and a batch of
    its inputs; None if there is none."""


class Tracker(Protocol):
    """Contract of ``tracking:`` in the configuration.

    Its methods may raise any error: the study goes on, and the run is told again.
    """

    complete: Set[str]
    """Names of the runs that the tracker holds as a whole; any other run that has ended is told
    again by ``finish`` alone."""

    def start(self, trial: Run) -> None:
        """Called when a run is handed to a worker."""
        ...

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Called after an evaluation of the run ``name``."""
        ...

    def finish(self, trial: Run, result: TrialResult, score: float | None) -> None:
        """Called when a run has ended, even one for which ``start`` was not called, or not all
        evaluations were told.
        """
        ...

    def close(self, end: StudyEnd) -> None:
        """Called once, when the study has ended or was interrupted."""
        ...


class NoTracker(Tracker):
    """Tracker that keeps nothing."""

    def __init__(self, info: StudyInfo) -> None:
        self.complete: set[str] = set()

    def finish(self, trial: Run, result: TrialResult, score: float | None) -> None:
        """Count the run as written."""
        self.complete.add(trial.name)
