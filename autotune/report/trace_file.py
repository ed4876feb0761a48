"""``trace.csv``: which worker trained what, a row for each stretch that a trial was trained without a pause.

Studies and replays write the same columns, so that the one can be held against the other.
"""

import csv
import time
from dataclasses import dataclass
from pathlib import Path

from autotune.measurement import PAUSED, Evaluation, TrialResult
from autotune.outcome import Outcome

COLUMNS = ("order", "trial", "worker", "started_seconds", "stopped_seconds", "from_train_seconds", "train_seconds", "outcome")
"""Seconds of the search's clock, and where in its own training (prepare and train) a trial began the stretch and stood at its end."""


@dataclass
class _Stretch:
    worker: int
    started_seconds: float
    from_train_seconds: float


class TraceFile:
    """Writes a study's trace as it runs, a row when a trial leaves its worker; a file that is there is gone on with.

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
        """A worker began a trial, or went on with it."""
        taken = {each.worker for each in self._running.values()}
        worker = next(each for each in range(len(taken) + 1) if each not in taken)
        self._running[trial] = _Stretch(worker, self._seconds(), self._train_seconds.get(trial, 0.0))

    def evaluated(self, trial: int, evaluation: Evaluation) -> None:
        """A running trial reported."""
        self._train_seconds[trial] = evaluation.warm_seconds

    def trial_paused(self, trial: int) -> None:
        """A running trial left its worker, and may go on later."""
        self._end(trial, PAUSED)

    def trial_lost(self, trial: int) -> None:
        """A running trial was lost with its machine."""
        if trial in self._running:
            self._end(trial, Outcome.LOST)

    def trial_contended(self, trial: int, why: str) -> None:
        """A trial's times say little, and its point is tried again."""
        if trial in self._running:
            self._end(trial, Outcome.CONTENDED)

    def trial_finished(self, result: TrialResult, score: float | None) -> None:
        """A trial ended; one that was paused has its last row already."""
        if result.trial in self._running:
            self._end(result.trial, result.outcome)

    def _end(self, trial: int, outcome: str) -> None:
        stretch = self._running.pop(trial)
        seconds = self._train_seconds.get(trial, 0.0)
        self._write(
            (self._num_rows, trial, stretch.worker, stretch.started_seconds, self._seconds(), stretch.from_train_seconds, seconds, outcome)
        )
        self._num_rows += 1

    def _seconds(self) -> float:
        return time.time() - self._began_at

    def _write(self, row: tuple[object, ...]) -> None:
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(row)
