"""A study in MLflow: one experiment a workload, one parent run a study, one child run a trial or confirmation run.

One thread does all the writing, fed by a queue, so that the driver never waits for a store. What a run still owes the store
stays in memory until it is written: a store that fails for a while costs nothing but delay, one that fails for good costs
its own record and never the study, and resuming the study writes what is missing.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from autotune.measurement import Evaluation, TrialResult
from autotune.tracking import mlflow_fields as fields
from autotune.tracking.mlflow_environment import set_environment
from autotune.tracking.tracker import FinishedRun, StudyInfo, TrackedTrial

LOGGER = logging.getLogger("autotune.tracking")
WRITE_EVERY_SECONDS = 5.0
"""How long a running trial and its evaluations may wait to be seen: one that has ended by then is written in one go."""
RETRY_AFTER_SECONDS = 30.0
_MAX_FAILURES_AT_CLOSE = 2


def preload() -> None:
    """Import what the tracker needs, which takes seconds."""
    set_environment()
    import autotune.tracking.mlflow_runs  # noqa: F401, PLC0415  # MLflow reads part of its environment as it is imported


class MlflowTracker:
    """Keeps a study in an MLflow store.

    ``uri`` names the store; None takes the environment's MLFLOW_TRACKING_URI, else ``mlflow.db`` in the working folder.
    ``finished`` are the runs of this study that ended before it was resumed.

    Raises:
        ConfigError: The store does not answer.
    """

    def __init__(self, info: StudyInfo, *, uri: str | None = None, finished: Sequence[FinishedRun] = ()) -> None:
        set_environment()
        # Imported here because MLflow takes seconds to import, and reads part of its environment as it is.
        from autotune.tracking.mlflow_runs import MlflowRuns  # noqa: PLC0415

        self._store = MlflowRuns(info, uri, {trial.name for trial, _, _ in finished})
        self._runs = _owed_runs(finished, self._store.left)
        self._complete = {name for name, run_id in self._store.left.items() if run_id is None}
        self._retry_at = 0.0
        self._num_failures = 0
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="autotune-mlflow", daemon=True)
        self._thread.start()

    def start(self, trial: TrackedTrial) -> None:
        """Make the trial's run."""
        self._queue.put(partial(self._take_start, trial))

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Keep an evaluation, as made now."""
        self._queue.put(partial(self._take_evaluation, name, evaluation, time.time()))

    def finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        """Write the whole run and end it."""
        self._queue.put(partial(self._take_finish, trial, result, score))

    def close(self, *, status: str, metrics: Mapping[str, float], tags: Mapping[str, str], artifacts: Sequence[Path]) -> None:
        """Write all that is waiting, end every open run and then the study's; a second call does nothing."""
        if self._thread.is_alive():
            write_study = partial(self._store.close, status=status, metrics=metrics, tags=tags, artifacts=artifacts)
            self._queue.put(partial(self._take_close, write_study))
            self._queue.put(None)
            self._thread.join()

    # All below runs in the writing thread.

    def _work(self) -> None:
        while True:
            try:
                take = self._queue.get(timeout=1.0)
            except queue.Empty:
                pass
            else:
                if take is None:
                    return
                self._attempt(take)
            self._write_due()

    def _take_start(self, trial: TrackedTrial) -> None:
        self._complete.discard(trial.name)
        self._runs[trial.name] = _Run(trial)

    def _take_evaluation(self, name: str, evaluation: Evaluation, at: float) -> None:
        run = self._runs.get(name)
        if run is not None and run.steps is not None:
            run.steps.add(evaluation.step)
            run.points += fields.evaluation_points(evaluation, at)

    def _take_finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        if trial.name not in self._complete:
            self._runs.setdefault(trial.name, _Run(trial)).end = (result, score)

    def _take_close(self, write_study: Callable[[], None]) -> None:
        num_failures = 0
        for run in self._by_failures():
            if not self._attempt(partial(self._end, run), run):
                num_failures += 1
                if num_failures == _MAX_FAILURES_AT_CLOSE:
                    break
        is_written = self._attempt(self._store.interrupt_open) and self._attempt(write_study)
        if self._runs or not is_written:
            LOGGER.warning(
                "MLflow did not take %d runs%s; resuming the study writes them",
                len(self._runs),
                "" if is_written else " and the study's own end",
            )

    def _write_due(self) -> None:
        now = time.monotonic()
        if now < self._retry_at:
            return
        for run in self._by_failures():
            if run.is_due(now) and not self._attempt(partial(self._write, run), run):
                return

    def _by_failures(self) -> list["_Run"]:
        """Runs that never failed first, so that one which the store refuses does not hold up the others."""
        return sorted(self._runs.values(), key=lambda run: run.num_failures)

    def _attempt(self, action: Callable[[], None], run: "_Run | None" = None) -> bool:
        try:
            action()
        except Exception as error:  # noqa: BLE001  # every kind of store raises its own client's errors, and the study must go on
            if run is not None:
                run.num_failures += 1
            self._num_failures += 1
            self._retry_at = time.monotonic() + RETRY_AFTER_SECONDS
            if self._num_failures == 1:
                reason = str(error).partition("\n")[0][:200]
                LOGGER.warning("MLflow does not take what it is told (%s); the study goes on, and it is tried again", reason)
            return False
        return True

    def _write(self, run: "_Run") -> None:
        """Write what a run owes; safe to repeat after it failed midway."""
        if run.run_id is None:
            run.run_id = self._store.start(run.trial)
        if not run.is_described and run.end is None:
            self._store.describe(run.run_id, run.trial)
            run.is_described = True
        if run.end is not None and run.steps is None:
            run.steps = self._store.steps(run.run_id)
        run.add_missing_points()
        if run.end is not None:
            self._store.finish(run.run_id, run.trial, *run.end, points=run.points, is_described=run.is_described)
            self._complete.add(run.trial.name)
            del self._runs[run.trial.name]
        else:
            if run.points:
                self._store.write(run.run_id, run.points)
                run.points = []
            run.written_at = time.monotonic()

    def _end(self, run: "_Run") -> None:
        """Write what a run owes and end it, also where no result of it came."""
        self._write(run)
        if run.end is None and run.run_id is not None:
            self._store.interrupt(run.run_id)
            del self._runs[run.trial.name]


@dataclass(kw_only=True)
class _Run:
    """A run that still owes the store something."""

    trial: TrackedTrial = field(kw_only=False)
    run_id: str | None = None
    is_described: bool = False
    steps: set[int] | None = field(default_factory=set)
    """The steps whose evaluations are written or in ``points``; None where only the store knows."""
    points: list[fields.Point] = field(default_factory=list)
    written_at: float = field(default_factory=time.monotonic)
    end: tuple[TrialResult, float | None] | None = None
    num_failures: int = 0

    def is_due(self, now: float) -> bool:
        """Whether something is to be written, at a time of the monotonic clock."""
        owes_something = bool(self.points) or not self.is_described
        return self.end is not None or (owes_something and now - self.written_at >= WRITE_EVERY_SECONDS)

    def add_missing_points(self) -> None:
        """Take the evaluations from the run's result that were not seen as they were made."""
        if self.end is None or self.steps is None:
            return
        result, _ = self.end
        for evaluation in result.evaluations:
            if evaluation.step not in self.steps:
                self.steps.add(evaluation.step)
                self.points += fields.evaluation_points(evaluation, fields.evaluated_at(result, evaluation))


def _owed_runs(finished: Sequence[FinishedRun], left: Mapping[str, str | None]) -> dict[str, _Run]:
    """The finished runs that are not complete in the store, given the open (id) and the complete (None) ones in it."""
    owed = {}
    for trial, result, score in finished:
        if trial.name not in left:
            owed[trial.name] = _Run(trial, end=(result, score))
        elif (run_id := left[trial.name]) is not None:
            owed[trial.name] = _Run(trial, run_id=run_id, steps=None, end=(result, score))
    return owed
