"""``trace.csv``: which worker trained which trial when, with a row for each stretch that a trial trained without a pause.

Studies and replays write the same columns, so that a study can be compared with its replay.
"""

import csv
import time
from dataclasses import dataclass
from pathlib import Path

from autotune.measurement import PAUSED, Evaluation, TrialResult
from autotune.outcome import Outcome

COLUMNS = ("order", "trial", "worker", "started_seconds", "stopped_seconds", "from_train_seconds", "train_seconds", "outcome")
"""Columns of ``trace.csv``. ``started_seconds`` and ``stopped_seconds`` count from the start of the search; ``from_train_seconds`` and
``train_seconds`` are the trial's own seconds of prepare and train at the beginning and at the end of the stretch."""


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
        self._num_rows = 0
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    self._num_rows += 1
                    self._train_seconds[int(row["trial"])] = float(row["train_seconds"])
        else:
            self._write(COLUMNS)

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

    def trial_lost(self, trial: int) -> None:
        """Write the row of a running trial that was lost with its machine."""
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
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(row)
