"""The machine-readable files of a study's folder: trials.csv, summary.json, best.json, pareto_front.csv and trace.csv.

Studies and replays write the same columns to ``trace.csv``, so that a study can be compared with its replay.
"""

import csv
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.comparison import reach_rate_interval
from autotune.errors import DataError, FileError
from autotune.files import FORMAT_KEY, FORMATS, appending, check_format, check_kind, replace_file, replacing
from autotune.hiding import without_secrets_in
from autotune.measurement import PAUSED, Evaluation, TrialResult
from autotune.objective import Pareto
from autotune.outcome import Outcome
from autotune.pareto import pareto_front
from autotune.reporting.scores import SECONDS, ArmScores, ScoreFormat, score_format_of
from autotune.space import SearchSpace, Suggestion, override_text

logger = logging.getLogger(__name__)

REPORT = "report.html"
SUMMARY = "summary.json"
"""File of a study's folder with its result as plain data; ``best.json`` says the same, and is there only if something was confirmed."""

_MEASURED = (
    "outcome", "score", "score_unit", "time_to_target_seconds", "build_seconds", "prepare_seconds", "train_seconds", "evaluate_seconds",
    "num_evaluations", "metric", "loss", "epoch", "samples_per_second", "peak_memory_bytes", "num_workers", "device_kind",
    "energy_joules", "started_at", "stopped_at", "seed", "contention", "error",
)  # fmt: skip
COLUMNS = ("order", "trial", "worker", "started_seconds", "stopped_seconds", "from_train_seconds", "train_seconds", "outcome")
"""Columns of ``trace.csv``. ``started_seconds`` and ``stopped_seconds`` count from the start of the search; ``from_train_seconds`` and
``train_seconds`` are the trial's own seconds of prepare and train at the beginning and at the end of the stretch."""


class TrialsTable:
    """Writes ``trials.csv``: a row for each ended trial, in the order in which trials end, with the varied parameters last.

    Parameters stand there as in an override: ``null`` is the value null, an empty cell a parameter that the trial does not have.

    The file is rewritten with the trials that ended in earlier sessions, then a row is appended for each trial that ends.
    """

    def __init__(
        self, path: Path, space: SearchSpace, results: Sequence[TrialResult], scores: Mapping[int, float], unit: str = SECONDS.unit
    ) -> None:
        self._path = path
        self._unit = unit
        self._parameters = space.keys
        with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["trial", *_MEASURED, *self._parameters])
            ended = sorted(results, key=lambda result: result.stopped_at)
            writer.writerows(self._row(result, scores.get(result.trial)) for result in ended)

    def trial_finished(self, result: TrialResult, score: float | None) -> None:
        """Append the row of a trial that ended."""
        _append_row(self._path, self._row(result, score))

    def trial_started(self, trial: int, overrides: tuple[str, ...]) -> None:
        """Write nothing: only ended trials have a row."""

    def evaluated(self, trial: int, evaluation: Any) -> None:
        """Write nothing: only ended trials have a row."""

    def trial_paused(self, trial: int) -> None:
        """Write nothing: only ended trials have a row."""

    def trial_lost(self, trial: int, why: str) -> None:
        """Write nothing: only ended trials have a row."""

    def trial_contended(self, trial: int, why: str) -> None:
        """Write nothing: only ended trials have a row."""

    def _row(self, result: TrialResult, score: float | None) -> list[Any]:
        last = result.last.as_dict() if result.last else {}
        measured = {
            **last,
            "outcome": result.outcome.value,
            "score": score,
            "score_unit": self._unit,
            "time_to_target_seconds": result.time_to_target_seconds,
            "num_evaluations": len(result.evaluations),
            "started_at": result.started_at,
            "stopped_at": result.stopped_at,
            "seed": result.seed,
            "contention": result.contention,
            "error": result.error_line,
        }
        values = [override_text(result.values[key]) if key in result.values else "" for key in self._parameters]
        return [result.trial, *(_cell(measured.get(name)) for name in _MEASURED), *values]


def _cell(value: Any) -> Any:
    """A cell of a table: a text that a spreadsheet would run as a formula begins with an apostrophe, which makes it a text there."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def arm_json(arm: ArmScores) -> dict[str, Any]:
    """The repeated runs of one configuration as JSON data, with keys for times or, if the objective is not time, for scores."""
    is_time = arm.scale.is_time
    scores, bounds, expected = (
        ("times_seconds", "lower_bounds_seconds", "expected_seconds") if is_time else ("scores", "lower_bounds", "expected_score")
    )
    return {
        "unit": arm.scale.unit,
        scores: [score for score, reached in arm.scored_runs if reached],
        "num_runs": arm.num_runs,
        "num_reached": arm.num_reached,
        bounds: [score for score, reached in arm.scored_runs if not reached],
        expected: arm.expected_score,
        "reach_rate_interval": reach_rate_interval(arm.num_reached, arm.num_runs) if arm.runs else None,
    }


def write_json(path: Path, kind: str, content: Mapping[str, Any]) -> None:
    """Write strict JSON, with the number of its format, replacing the file; not finite numbers become null, and secrets ``***``.

    Args:
        kind: of the file, one of ``autotune.files.FORMATS``.

    Raises:
        FileError: the file cannot be written.
    """
    replace_file(path, json_text(kind, content))


def json_text(kind: str, content: Mapping[str, Any]) -> str:
    """The text of a file that ``write_json`` writes."""
    return json.dumps(finite(without_secrets_in({FORMAT_KEY: FORMATS[kind], **content})), indent=2, allow_nan=False) + "\n"


def read_summary(path: Path) -> dict[str, Any]:
    """Read ``summary.json`` or ``best.json``; empty if there is no such file.

    Raises:
        DataError: the file is not what a study writes, or a newer autotune wrote it.
    """
    check_kind(path, is_folder=False, may_be_link=True)
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: found {type(content).__name__}, accepted is a mapping")
    check_format("summary", content.get(FORMAT_KEY), path)
    for key, (accepted, is_accepted) in _SUMMARY.items():
        if key in content and not is_accepted(content[key]):
            raise DataError(f"{path}: {key}: found {shorten_text(content[key])}, accepted is {accepted}")
    return content


def shorten_text(value: Any) -> str:
    """A value of plain data as text of at most 80 characters, for a message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_arm(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("num_runs"), int) and value["num_runs"] <= _MAX_RUNS


_MAX_RUNS = 100_000

_SUMMARY: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("study", "experiment", "command"), ("a text", lambda value: isinstance(value, str))),
    **dict.fromkeys(("config_dirs", "allowed_targets"), ("a list of texts", _are_texts)),
    "overrides": ("a list of texts, or null", lambda value: value is None or _are_texts(value)),
    **dict.fromkeys(
        ("target", "objective", "outcomes", "versions", "settings", "seeds"), ("a mapping", lambda value: isinstance(value, dict))
    ),
    **dict.fromkeys(("baseline", "best"), ("the runs of a configuration, or null", lambda value: value is None or _is_arm(value))),
    "candidates": ("a list of the runs of configurations", lambda value: isinstance(value, list) and all(map(_is_arm, value))),
    "speed_up": ("a ratio with its interval, or null", lambda value: value is None or isinstance(value, dict)),
    "trial": ("the number of a trial, or null", lambda value: value is None or type(value) is int),
    "num_threads": ("a whole number from 1", lambda value: type(value) is int and value >= 1),
}
"""What is accepted under the keys of ``summary.json`` that autotune reads, in words and as a condition."""


def finite(value: Any) -> Any:
    """Plain data as JSON holds it: lists for tuples, and null for numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


@dataclass(frozen=True, kw_only=True)
class Front:
    """Scores by several objectives of the trials that reached the target; each is one run of the search, not confirmed."""

    scales: Mapping[str, ScoreFormat]
    """The score format of each objective, by the objective's name in the configuration."""
    points: Mapping[int, tuple[float, ...]]
    """The score of a trial by each objective, by trial number."""
    members: tuple[int, ...]
    """Trials that no other trial beats in all objectives, sorted by the first objective, best first."""
    picks: Mapping[str, int]
    """The trial that each preference picks, by the preference's name."""

    def picked_by(self, trial: int) -> list[str]:
        """Names of the preferences that pick a trial."""
        return [name for name, picked in self.picks.items() if picked == trial]


def make_front(objective: Pareto, results: Iterable[TrialResult]) -> Front | None:
    """The Pareto front of the trials that REACHED the target; None if no trial did."""
    reached = [result for result in results if result.outcome is Outcome.REACHED]
    points = {result.trial: objective.values(result.last) for result in reached if result.last is not None}
    if not points:
        return None
    trials = list(points)
    members = tuple(trials[index] for index in pareto_front(list(points.values())))
    return Front(
        scales={name: score_format_of(component) for name, component in objective.objectives.items()},
        points=points,
        members=members,
        picks=objective.picks({trial: points[trial] for trial in members}),
    )


def write_front(path: Path, front: Front, results: Mapping[int, TrialResult]) -> None:
    """Write the front as CSV: for each trial its score by each objective, the preferences that pick it, and its overrides."""
    with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["trial", *(f"{name} ({scale.unit})" for name, scale in front.scales.items()), "picked_by", "overrides"])
        for trial in front.members:
            overrides = " ".join(Suggestion(results[trial].values).as_overrides())
            writer.writerow([trial, *front.points[trial], " ".join(front.picked_by(trial)), overrides])


def describe_front(front: Front) -> list[str]:
    """Lines on the front's size and on the trial that each preference picks."""
    lines = [f"Pareto front: {len(front.members)} of {len(front.points)} trials that reached the target, by {', '.join(front.scales)}"]
    width = max(map(len, front.picks))
    for name, trial in front.picks.items():
        values = zip(front.scales.items(), front.points[trial], strict=True)
        scores = ", ".join(f"{objective} {scale.format(value)}" for (objective, scale), value in values)
        lines.append(f"  {name:<{width}}  picks trial {trial}: {scores}")
    return lines


@dataclass
class _Stretch:
    worker: int
    started_seconds: float
    from_train_seconds: float


class TraceFile:
    """Writes a study's trace while it runs: a row each time a trial leaves its worker, appended to an existing file.

    Args:
        began_at: Unix time at which the search began, in the first process of the study.
    """

    def __init__(self, path: Path, *, began_at: float) -> None:
        self._path = path
        self._began_at = began_at
        self._running: dict[int, _Stretch] = {}
        self._train_seconds: dict[int, float] = {}
        rows = _whole_rows(path)
        self._num_rows = len(rows)
        self._train_seconds |= {int(row[1]): float(row[6]) for row in rows}
        with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])

    def trial_started(self, trial: int, overrides: tuple[str, ...]) -> None:
        """Note that a worker begins or resumes a trial."""
        busy = {stretch.worker for stretch in self._running.values()}
        worker = next(number for number in range(len(busy) + 1) if number not in busy)
        self._running[trial] = _Stretch(worker, self._seconds(), self._train_seconds.get(trial, 0.0))

    def evaluated(self, trial: int, evaluation: Evaluation) -> None:
        """Note how many seconds a running trial has trained."""
        self._train_seconds[trial] = evaluation.warm_seconds

    def trial_paused(self, trial: int) -> None:
        """Write the row of a trial that is paused and may be resumed later."""
        self._end(trial, PAUSED)

    def trial_lost(self, trial: int, why: str) -> None:
        """Write the row of a running trial that was lost with its machine, or whose process was killed."""
        if trial in self._running:
            self._end(trial, Outcome.LOST)

    def trial_contended(self, trial: int, why: str) -> None:
        """Write the row of a running trial that is discarded since other programs spoilt its times."""
        if trial in self._running:
            self._end(trial, Outcome.CONTENDED)

    def trial_finished(self, result: TrialResult, score: float | None) -> None:
        """Write the row of a trial that ended, unless it was paused and so has its last row already."""
        if result.trial in self._running:
            self._end(result.trial, result.outcome)

    def _end(self, trial: int, outcome: str) -> None:
        stretch = self._running.pop(trial)
        times = (stretch.started_seconds, self._seconds(), stretch.from_train_seconds, self._train_seconds.get(trial, 0.0))
        self._write((self._num_rows, trial, stretch.worker, *times, outcome))
        self._num_rows += 1

    def _seconds(self) -> float:
        return time.time() - self._began_at

    def _write(self, row: tuple[object, ...]) -> None:
        _append_row(self._path, row, lineterminator="\n")


def _whole_rows(path: Path) -> list[list[str]]:
    """The rows of a ``trace.csv`` that an earlier process left, without what it did not finish or what is no row."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        row = next(csv.reader([line.replace("\0", "")]), [])
        with suppress(ValueError):
            _ = [int(number) for number in row[:3]], [float(number) for number in row[3:7]]
            if len(row) == len(COLUMNS):
                rows.append(row)
    return rows


def _append_row(path: Path, row: Sequence[object], *, lineterminator: str = "\r\n") -> None:
    """Append a row to a CSV file; one that cannot be written is told in the log, since the study's storage has all that it says."""
    try:
        with appending(path) as file:
            csv.writer(file, lineterminator=lineterminator).writerow(row)
    except (FileError, OSError) as error:
        logger.warning("%s lacks a row (%s); the study goes on", path, error)
