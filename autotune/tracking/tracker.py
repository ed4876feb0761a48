"""The interface of an experiment tracker: a protocol of four methods, and the records that they take.

A tracker only receives data: nothing in a study depends on what it keeps, so the search is the same if it is slow or absent. A
tracker is made by ``tracker_class(info, finished=...)``, where ``finished`` holds the runs that ended before the study was resumed,
so that it can fill in what it missed: ``FinishedRuns``, each of which is made when it is asked for. More functions are called
where there are any: of the tracker's module ``check``, with the configuration's ``tracking`` node, before anything takes seconds, and
``preload``, in the tracker's process, before all else there; and the tracker's ``log_model`` before ``close``, with a function that makes
the trained model of the best configuration, and inputs, and ``prepare_model`` some time before that, with a function that imports what
making the model takes.
"""

import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, overload

from autotune.hiding import without_secrets, without_secrets_in
from autotune.measurement import Evaluation, TrialResult
from autotune.space import override_text


@dataclass(frozen=True, kw_only=True)
class StudyInfo:
    """Facts on a study or a comparison that a tracker receives when it is made."""

    name: str
    kind: str
    """What is tracked: ``study`` or ``comparison``."""
    workload: str
    """Model and data set, such as ``simple_cnn-digits``; studies of the same workload can be compared."""
    experiment: str
    folder: str
    """Folder of the study's files; folder and ``name`` together identify a study."""
    settings: Mapping[str, Any]
    """The study's settings as a flat mapping: target, sampler, number of trials, ..."""
    tags: Mapping[str, str]
    parameters: Sequence[str] = ()
    """Config keys of the search space; empty where nothing is searched."""
    baseline: Mapping[str, Any] = field(default_factory=dict)
    """Values of the baseline by config key, as ``TrackedTrial.values``; empty if the search space does not contain it."""
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Plain data to keep as YAML files, by file name: the content of a study's recording besides its trials."""

    def __post_init__(self) -> None:
        _hide_secrets(self, "settings", "tags", "baseline", "files")


@dataclass(frozen=True, kw_only=True)
class TrackedTrial:
    """One run of a study: a search trial, one confirmation run of a trial's configuration, or one run of a comparison."""

    name: str
    """Name of the run, unique within the study, such as ``trial-7``, ``confirm-7-1`` or ``a-1``."""
    phase: str
    """What the run is part of: ``search``, ``confirm`` or ``compare``."""
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

    def __post_init__(self) -> None:
        _hide_secrets(self, "values", "overrides", "config")


def _hide_secrets(facts: StudyInfo | TrackedTrial, *names: str) -> None:
    """Hide the secrets in fields of a record when it is made: trackers keep what they are told."""
    for name in names:
        object.__setattr__(facts, name, without_secrets_in(getattr(facts, name)))


_MAX_NAME_CHARACTERS = 60


def display_name(trial: TrackedTrial, baseline: Mapping[str, Any]) -> str:
    """A name that tells a study's runs apart at a glance: the run, and which of its values are not the baseline's.

    Keys lose the leading parts that tell none of the run's keys apart: ``12: optimizer=adamw, lr=0.003``. Values that would make the name
    longer than 60 characters are only counted. Runs of a comparison have their plain names, which say their side.
    """
    if trial.phase not in ("search", "confirm"):
        return trial.name
    different = {key: value for key, value in trial.values.items() if key not in baseline or value != baseline[key]}
    parts = [f"{_short_key(key, trial.values)}={_short_value(value)}" for key, value in different.items()] or ["baseline"]
    begin = trial.name.removeprefix("trial-")
    for num_shown in range(len(parts), -1, -1):
        rest = [f"+{len(parts) - num_shown}"] if num_shown < len(parts) else []
        name = f"{begin}: {', '.join([*parts[:num_shown], *rest])}"
        if len(name) <= _MAX_NAME_CHARACTERS:
            break
    return name


def _short_key(key: str, keys: Collection[str]) -> str:
    """The last parts of a dotted key, as few as no other key ends with."""
    parts = key.split(".")
    endings = (".".join(parts[begin:]) for begin in range(len(parts) - 1, 0, -1))
    return next((ending for ending in endings if not any(f".{other}".endswith(f".{ending}") for other in keys if other != key)), key)


def _short_value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else override_text(value)


FinishedRun = tuple[TrackedTrial, TrialResult, float | None]
"""A run that has ended, its result, and its score; the score is None if the objective gives none."""


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """What is told of a run that has ended without its configuration, which takes milliseconds to make."""

    name: str
    phase: str
    stopped_at: float
    """Unix time of its end."""
    score: float | None

    @classmethod
    def of(cls, run: FinishedRun) -> Self:
        """The end of a run."""
        trial, result, score = run
        return cls(name=trial.name, phase=trial.phase, stopped_at=result.stopped_at, score=score)


class FinishedRuns(Sequence[FinishedRun]):
    """The runs that ended before a study was resumed, in order, each made when it is asked for.

    A tracker reads ``ends``, and asks only for the runs that it lacks. It asks while it is made; runs that it asks for later stand at the
    places in its attribute ``lacking`` then, or in all places if it has no such attribute.

    Args:
        ends: what is told of each run.
        make: makes the run at a place.
    """

    def __init__(self, ends: Sequence[RunEnd] = (), make: Callable[[int], FinishedRun] | None = None) -> None:
        self.ends, self._make = ends, make

    @classmethod
    def of(cls, runs: Sequence[FinishedRun]) -> "FinishedRuns":
        """The runs as they are, if they are ``FinishedRuns`` already, or those of a list."""
        return runs if isinstance(runs, cls) else cls([RunEnd.of(run) for run in runs], runs.__getitem__)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> FinishedRun: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[FinishedRun]: ...

    def __getitem__(self, index: int | slice) -> FinishedRun | Sequence[FinishedRun]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self[place] for place in places]
        assert self._make is not None, "there are none"
        return self._make(places)


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


def search_name(trial: int) -> str:
    """Name of the run of a search trial."""
    return f"trial-{trial}"


def confirmation_name(trial: int, round_number: int) -> str:
    """Name of a confirmation run of a trial's configuration."""
    return f"confirm-{trial}-{round_number}"


def browse_command(tracking: Mapping[str, Any], studies: str) -> str | None:
    """The command or the server address that shows the tracked runs; None for a tracker that is not part of autotune.

    Args:
        tracking: the ``tracking`` node of the configuration.
        studies: folder that contains the studies' folders.
    """
    if tracking["_target_"].endswith(".TensorBoardTracker"):
        return f"tensorboard --logdir {shlex.quote(studies)}"
    if tracking["_target_"].endswith(".WandbTracker"):
        offline = f"wandb sync {shlex.quote(studies)}/*/wandb/offline-run-*"
        return {"offline": offline, "online": os.environ.get("WANDB_BASE_URL", "https://wandb.ai")}.get(tracking["mode"])
    if "uri" not in tracking:
        return None
    uri = tracking["uri"] or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return "mlflow ui"
    shown_uri = without_secrets(uri)
    return shown_uri if uri.startswith(("http://", "https://")) else f"mlflow ui --backend-store-uri {shlex.quote(shown_uri)}"
