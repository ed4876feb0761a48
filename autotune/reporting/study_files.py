"""The machine-readable files of a study's folder: trials.csv, summary.json, best.json,
pareto_front.csv and trace.csv.

Studies and replays write the same columns to ``trace.csv``, so that a study can be compared with
its replay.
"""

import contextlib
import csv
import itertools
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from autotune.confirm.statistics import reach_rate_interval
from autotune.errors import DataError, FileError, explained
from autotune.files import (
    FORMAT,
    FORMAT_KEY,
    appending,
    check_format,
    replace_file,
    replacing,
)
from autotune.measurement import PAUSED, Evaluation, TrialResult
from autotune.objective import Pareto, pareto_front
from autotune.outcome import Outcome
from autotune.redaction import without_secrets_in
from autotune.reporting.scores import SECONDS, ConfigurationScores, score_format_of
from autotune.space import SearchSpace, Suggestion, override_text

logger = logging.getLogger(__name__)

REPORT = "report.html"
SUMMARY = "summary.json"
"""File of a study's folder with its result as plain data; ``best.json`` says the same, and is
there only if something was confirmed."""

MEASURED = (
    "outcome",
    "score",
    "score_unit",
    "time_to_target_seconds",
    "build_seconds",
    "prepare_seconds",
    "train_seconds",
    "evaluate_seconds",
    "num_evaluations",
    "metric",
    "loss",
    "epoch",
    "samples_per_second",
    "peak_memory_bytes",
    "num_workers",
    "device_kind",
    "trials_per_gpu",
    "energy_joules",
    "started_at",
    "stopped_at",
    "seed",
    "contention",
    "error",
)
"""Columns of what is measured of a training, in tables of trials and of runs."""
METRIC_COLUMN = "metrics."
"""Prefix of a further metric's column, as in MLflow's tables."""
COLUMNS = (
    "order",
    "trial",
    "worker",
    "started_seconds",
    "stopped_seconds",
    "from_train_seconds",
    "train_seconds",
    "outcome",
)
"""Columns of ``trace.csv``. ``started_seconds`` and ``stopped_seconds`` count from the start of
the search; ``from_train_seconds`` and ``train_seconds`` are the trial's own seconds of prepare
and train at the beginning and at the end of the stretch."""

_TRACE_ROW = re.compile(r"\d+,\d+,\d+(,-?\d+(\.\d+)?(e[+-]\d+)?){4},[A-Z_]+")


def write_trials(
    path: Path,
    space: SearchSpace,
    results: Sequence[TrialResult],
    scores: Mapping[int, float],
    unit: str = SECONDS.unit,
) -> list[str]:
    """Write ``trials.csv``: a row for each ended trial, in the order in which trials end, with the
    further metrics before ``error`` and the varied parameters last.

    Parameters stand there as in an override: ``null`` is the value null, an empty cell a parameter
    that the trial does not have. Returns the names of the further metrics.
    """
    ended = sorted(results, key=lambda result: result.stopped_at)
    names = sorted({name for result in ended for name in result.metrics})
    rows = [_trial_row(each, scores.get(each.trial), unit, names, space.keys) for each in ended]
    columns = [f"{METRIC_COLUMN}{name}" for name in names]
    write_csv(path, ["trial", *MEASURED[:-1], *columns, MEASURED[-1], *space.keys], rows)
    return names


def _trial_row(
    result: TrialResult, score: float | None, unit: str, metrics: Sequence[str], keys: Sequence[str]
) -> list[Any]:
    texts = {key: override_text(value) for key, value in result.values.items()}
    values = [texts.get(key, "") for key in keys]
    *cells, error = measured_cells(result, score, unit)
    return [result.trial, *cells, *map(result.metrics.get, metrics), error, *values]


def measured_cells(result: TrialResult, score: float | None, unit: str) -> list[Any]:
    """What a table says of a training, in the order of ``MEASURED``."""
    measured = {
        **(result.last.as_dict() if result.last else {}),
        **vars(result),
        "outcome": result.outcome.value,
        "score": score,
        "score_unit": unit,
        "time_to_target_seconds": result.time_to_target_seconds,
        "num_evaluations": len(result.evaluations),
        "trials_per_gpu": result.fingerprint.get("trials_per_gpu"),
        "error": result.error_line,
    }
    return [_cell(measured.get(name)) for name in MEASURED]


def _cell(value: Any) -> Any:
    """A cell of a table: a text that a spreadsheet would run as a formula begins with an
    apostrophe, which makes it a text there.
    """
    return (
        f"'{value}"
        if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r")
        else value
    )


def write_csv(path: Path, header: Sequence[object], rows: Sequence[Sequence[object]]) -> None:
    """Write a table, replacing the file."""
    with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def scores_json(arm: ConfigurationScores) -> dict[str, Any]:
    """The repeated runs of one configuration as JSON data, with keys for times or, if the
    objective is not time, for scores.
    """
    scores, bounds, expected = (
        ("times_seconds", "lower_bounds_seconds", "expected_seconds")
        if arm.scale.is_time
        else ("scores", "lower_bounds", "expected_score")
    )
    return {
        "unit": arm.scale.unit,
        scores: [score for score, reached in arm.scored_runs if reached],
        "num_runs": arm.num_runs,
        "num_reached": arm.num_reached,
        bounds: [score for score, reached in arm.scored_runs if not reached],
        expected: arm.expected_score,
        "reach_rate_interval": (
            reach_rate_interval(arm.num_reached, arm.num_runs) if arm.runs else None
        ),
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write strict JSON, with the number of its format, replacing the file.

    Not finite numbers become null, and secrets ``***``.

    Raises:
        FileError: the file cannot be written.
    """
    replace_file(path, json_text(content))


def json_text(content: Mapping[str, Any]) -> str:
    """The text of a file that ``write_json`` writes."""
    text = json.dumps(without_secrets_in({FORMAT_KEY: FORMAT, **content}))
    strict = json.loads(text, parse_constant=lambda not_finite: None)
    return f"{json.dumps(strict, indent=2)}\n"


def read_summary(path: Path) -> dict[str, Any]:
    """Read ``summary.json`` or ``best.json``; empty if there is no such file.

    Raises:
        DataError: the file is not what a study writes, or a newer autotune wrote it.
    """
    if not path.is_file():
        return {}
    with explained(f"{path}: cannot be read"):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise DataError(f"{path}: found {type(content).__name__}, it must be a mapping")
    check_format(content.get(FORMAT_KEY), path)
    return content


class Front(NamedTuple):
    """Trials that reached the target and that no other trial beats in all objectives, the best by
    the first objective first.

    Each is one run of the search, not confirmed.
    """

    header: list[str]
    rows: list[list[object]]
    """For each trial its score by each objective, the preferences that pick it, its overrides."""
    lines: list[str]
    """On the front's size and on the trial that each preference picks, for people."""


def make_front(objective: Pareto, results: Mapping[int, TrialResult]) -> Front | None:
    """The Pareto front of the trials that REACHED the target; None if no trial did."""
    reached = [
        (result.trial, objective.values(result.last))
        for result in results.values()
        if result.outcome is Outcome.REACHED and result.last is not None
    ]
    if not reached:
        return None
    points = dict(reached[index] for index in pareto_front([scores for _, scores in reached]))
    scales = {name: score_format_of(each) for name, each in objective.objectives.items()}
    picks = objective.picks(points)
    rows: list[list[object]] = []
    for trial, scores in points.items():
        picked_by = [name for name, picked in picks.items() if picked == trial]
        overrides = Suggestion(results[trial].values).as_overrides()
        rows.append([trial, *scores, " ".join(picked_by), " ".join(overrides)])
    lines = [
        f"Pareto front: {len(points)} of {len(reached)} trials that reached the target, by"
        f" {', '.join(scales)}"
    ]
    width = max(map(len, picks))
    for name, trial in picks.items():
        words = ", ".join(
            f"{key} {scale.format(score)}"
            for (key, scale), score in zip(scales.items(), points[trial], strict=True)
        )
        lines.append(f"  {name:<{width}}  picks trial {trial}: {words}")
    units = [f"{name} ({scale.unit})" for name, scale in scales.items()]
    return Front(["trial", *units, "picked_by", "overrides"], rows, lines)


class StudyTables:
    """Writes ``trials.csv`` and ``trace.csv`` while a study runs: a row for each trial that ends,
    and each time one leaves its worker.

    ``trials.csv`` is written anew with the trials that ended in earlier sessions; what earlier
    sessions left of ``trace.csv`` is kept.
    """

    def __init__(
        self,
        folder: Path,
        space: SearchSpace,
        results: Sequence[TrialResult],
        scores: Mapping[int, float],
        unit: str = SECONDS.unit,
    ) -> None:
        self._trials, self._trace = folder / "trials.csv", folder / "trace.csv"
        self._unit, self._keys = unit, space.keys
        self._results, self._scores = list(results), dict(scores)
        self._began_at = min((result.started_at for result in results), default=time.time())
        self._running: dict[int, tuple[int, float, float]] = {}
        """By trial: its worker, ``started_seconds`` and ``from_train_seconds``."""
        self._rewrite = partial(
            write_trials, self._trials, space, self._results, self._scores, unit
        )
        self._names = self._rewrite()
        is_file = self._trace.is_file()
        lines = self._trace.read_text(encoding="utf-8", errors="replace") if is_file else ""
        # one that an earlier process did not finish is left out
        rows = [line.split(",") for line in lines.splitlines() if _TRACE_ROW.fullmatch(line)]
        self._num_rows = len(rows)
        self._train_seconds = {int(row[1]): float(row[6]) for row in rows}
        write_csv(self._trace, COLUMNS, rows)

    def trial_started(self, trial: int, overrides: tuple[str, ...]) -> None:
        """Note that a worker begins or resumes a trial."""
        busy = {worker for worker, _, _ in self._running.values()}
        worker = next(number for number in itertools.count() if number not in busy)
        trained = self._train_seconds.get(trial, 0.0)
        self._running[trial] = (worker, time.time() - self._began_at, trained)

    def evaluated(self, trial: int, evaluation: Evaluation) -> None:
        """Note how many seconds a running trial has trained."""
        self._train_seconds[trial] = evaluation.warm_seconds

    def trial_paused(self, trial: int) -> None:
        """Write that a trial is paused, and may be resumed later."""
        self._end(trial, PAUSED)

    def trial_withdrawn(self, result: TrialResult) -> None:
        """Write that a trial is no result, and that its configuration is tried again."""
        self._end(result.trial, result.outcome)

    def trial_finished(self, result: TrialResult, score: float | None) -> None:
        """Write the rows of a trial that ended; one with a new metric adds a column."""
        self._end(result.trial, result.outcome)
        self._results.append(result)
        if score is not None:
            self._scores[result.trial] = score
        if result.metrics.keys() <= set(self._names):
            row = _trial_row(result, score, self._unit, self._names, self._keys)
            _append_row(self._trials, row)
        else:
            with _going_on(self._trials):
                self._names = self._rewrite()

    def _end(self, trial: int, outcome: str) -> None:
        """End the stretch of a trial, unless it was paused and so has its last row already."""
        if trial in self._running:
            worker, started, trained_before = self._running.pop(trial)
            stopped, trained = time.time() - self._began_at, self._train_seconds.get(trial, 0.0)
            row = [self._num_rows, trial, worker, started, stopped, trained_before, trained]
            _append_row(self._trace, [*row, outcome])
            self._num_rows += 1


def _append_row(path: Path, row: Sequence[object]) -> None:
    with _going_on(path), appending(path) as file:
        csv.writer(file).writerow(row)


@contextlib.contextmanager
def _going_on(path: Path) -> Iterator[None]:
    """A row that cannot be written is told in the log: the study's storage has all that it says."""
    try:
        yield
    except (FileError, OSError) as error:
        logger.warning("%s lacks a row (%s); the study goes on", path, error)
