"""The trace of a study: a row for each stretch, also where another process goes on."""

import csv
import time
from pathlib import Path

from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.report.trace_file import COLUMNS, TraceFile


def evaluation(train_seconds: float) -> Evaluation:
    return Evaluation(
        step=1, epoch=1.0, samples=1, build_seconds=3.0, prepare_seconds=0.5, train_seconds=train_seconds, evaluate_seconds=0.0, metric=0.5,
        loss=0.1, samples_per_second=1.0, peak_memory_bytes=None, energy_joules=None,
    )  # fmt: skip


def result(trial: int, outcome: Outcome) -> TrialResult:
    return TrialResult(
        trial=trial, values={}, overrides=(), seed=0, outcome=outcome, evaluations=(), started_at=0.0, stopped_at=0.0, fingerprint={}
    )


def rows(path: Path) -> list[tuple[str, ...]]:
    with path.open(newline="") as file:
        return [tuple(row[name] for name in COLUMNS if not name.startswith("st")) for row in csv.DictReader(file)]


def test_a_row_for_each_stretch_and_none_for_a_trial_that_waits(tmp_path: Path) -> None:
    path, began_at = tmp_path / "trace.csv", time.time()
    first = TraceFile(path, began_at=began_at)
    first.trial_started(0, ())
    first.trial_started(1, ())
    first.evaluated(0, evaluation(1.0))
    first.trial_paused(0)
    first.trial_started(2, ())
    first.evaluated(2, evaluation(4.0))
    first.trial_finished(result(2, Outcome.REACHED), 4.5)
    after = TraceFile(path, began_at=began_at)  # of another process: what trial 1 was doing is lost
    after.trial_started(0, ())
    after.evaluated(0, evaluation(2.0))
    after.trial_paused(0)
    after.trial_finished(result(0, Outcome.STOPPED), None)
    assert rows(path) == [
        ("0", "0", "0", "0.0", "1.5", "PAUSED"),
        ("1", "2", "0", "0.0", "4.5", "REACHED"),
        ("2", "0", "0", "1.5", "2.5", "PAUSED"),
    ]
    with path.open(newline="") as file:
        assert all(0 <= float(row["started_seconds"]) <= float(row["stopped_seconds"]) < 60 for row in csv.DictReader(file))
