"""Runs to tell a tracker of, without a study."""

import time
from pathlib import Path
from typing import Any

from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.policy import Run
from autotune.space import Suggestion
from autotune.tracking.tracker import FinishedRun, StudyEnd, StudyInfo, Tracker
from tests.support import records

STARTED_AT = 1_700_000_000.0


def make_info(folder: Path | str, **changes: Any) -> StudyInfo:
    """Facts on a study that is named ``cnn-1`` and kept in a folder."""
    given = {
        "name": "cnn-1",
        "kind": "study",
        "workload": "simple_cnn-digits",
        "experiment": "cnn",
        "settings": {"target.value": 0.98, "num_trials": 40},
        "tags": {},
    }
    return StudyInfo(folder=str(folder), **{**given, **changes})


def make_evaluation(step: int, **changes: Any) -> Evaluation:
    """An evaluation after so many steps."""
    given = {"step": step, "metric": 0.9, "loss": 0.3, "metrics": {"f1": 0.8, "loss": 7.0}}
    return records.make_evaluation(0.1 * step, **{"build_seconds": 0.5, **given, **changes})


def make_run(
    number: int = 0, outcome: Outcome = Outcome.REACHED, num_evaluations: int = 3, **changes: Any
) -> FinishedRun:
    """A search trial that has ended, with its result and its score."""
    lr = 0.1 * (number + 1)
    point: dict[str, Any] = {
        "values": {"optimizer": "sgd", "optimizer.lr": lr},
        "overrides": ("optimizer=sgd", f"optimizer.lr={lr}"),
        "seed": number,
        "started_at": STARTED_AT,
    }
    config = {"optimizer": {"lr": lr}, "batch_size": 64, "target": {"metric": "accuracy"}}
    trial = Run(
        number=number,
        name=f"trial-{number}",
        trial=number,
        suggestion=Suggestion(point["values"]),
        overrides=point["overrides"],
        make_config=lambda: config,
        seed=number,
        started_at=STARTED_AT,
    )
    evaluations = [make_evaluation(step) for step in range(1, num_evaluations + 1)]
    ended = {"stopped_at": STARTED_AT + 100.0, "fingerprint": {"torch": "2.13.0"}}
    evaluations = changes.pop("evaluations", evaluations)
    result = records.make_result(number, outcome, *evaluations, **{**point, **ended, **changes})
    return trial, result, 1.5 if outcome is Outcome.REACHED else None


def tell(tracker: Tracker, run: FinishedRun) -> None:
    trial, result, score = run
    tracker.start(trial)
    for evaluation in result.evaluations:
        tracker.evaluate(trial.name, evaluation)
    tracker.finish(trial, result, score)


def close(tracker: Tracker, **changes: Any) -> None:
    tracker.close(StudyEnd(**{"status": "FINISHED", **changes}))


class FileTracker:
    """Writes a line of all that it is told."""

    def __init__(
        self,
        info: StudyInfo,
        *,
        path: str,
        complete: tuple[str, ...] = (),
        close_seconds: float = 0,
    ) -> None:
        self._path, self.complete = Path(path), set(complete)

    def start(self, trial: Run) -> None:
        self.write(f"start {trial.name}")

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        self.write(f"evaluate {name}")

    def finish(self, trial: Run, result: TrialResult, score: float | None) -> None:
        self.write(f"finish {trial.name}")
        self.complete.add(trial.name)

    def close(self, end: StudyEnd) -> None:
        self.write(
            f"close {end.status} {[(best.num_ended, best.score) for best in end.best_scores]}"
        )

    def write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{time.time()} {line}\n")
