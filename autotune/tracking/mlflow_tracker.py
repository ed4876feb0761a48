"""Writes a study to MLflow: an MLflow experiment for each experiment, a parent run per study, a child run per trial or confirmation run.

Data that is not written yet stays in memory: a store that fails for a while costs only delay, and one that fails for good costs its own
record but never the study. Resuming the study writes what is missing.
"""

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from autotune.measurement import Evaluation, TrialResult
from autotune.tracking import mlflow_fields as fields
from autotune.tracking.tracker import FinishedRun, StudyInfo, TrackedTrial

LOGGER = logging.getLogger("autotune.tracking")
WRITE_EVERY_SECONDS = 5.0
"""Least seconds between writes of a running trial; a trial that ends before its first write is written all at once."""
RETRY_AFTER_SECONDS = 30.0
_MAX_FAILURES_AT_CLOSE = 2
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Defaults of MLflow's environment variables: short timeouts, since failed writes are tried again, no telemetry and less output."""


def preload() -> None:
    """Import MLflow, which takes seconds, with defaults for those of its environment variables that the user did not set."""
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    import autotune.tracking.mlflow_runs  # noqa: F401, PLC0415  # MLflow reads its environment while it is imported


class MlflowTracker:
    """Tracker that writes a study to an MLflow store.

    Args:
        uri: of the store; if None, MLFLOW_TRACKING_URI of the environment, else ``mlflow.db`` in the working folder.
        log_model: whether a study's run gets the trained model of the configuration that it exports, as an MLflow model.
        finished: runs of this study that ended before it was resumed.

    Raises:
        ConfigError: the store does not answer.
    """

    def __init__(self, info: StudyInfo, *, uri: str | None = None, log_model: bool = True, finished: Sequence[FinishedRun] = ()) -> None:
        preload()
        from autotune.tracking.mlflow_runs import MlflowRuns  # noqa: PLC0415  # MLflow takes seconds to import

        self._store = MlflowRuns(info, uri, {trial.name for trial, _, _ in finished})
        self._runs = _unwritten_runs(finished, self._store.left)
        self._complete = {name for name, run_id in self._store.left.items() if run_id is None}
        self._best_scores = _BestScores(finished)
        self._logs_model = log_model
        self._retry_at = 0.0
        self._num_failures = 0
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="autotune-mlflow", daemon=True)
        self._thread.start()

    def start(self, trial: TrackedTrial) -> None:
        """Queue the creation of the trial's run."""
        self._queue.put(partial(self._take_start, trial))

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Queue an evaluation of the run ``name``, with the current time."""
        self._queue.put(partial(self._take_evaluation, name, evaluation, time.time()))

    def finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        """Queue the end of a run: its result and all that is not written of it yet."""
        self._queue.put(partial(self._take_finish, trial, result, score))

    def log_model(self, make_model: Callable[[], tuple[Any, Any]]) -> None:
        """Queue the model that the study exports; ``make_model`` returns it, a ``torch.nn.Module``, with a batch of inputs."""
        if self._logs_model:
            self._queue.put(partial(self._take_model, make_model))

    def close(self, *, status: str, metrics: Mapping[str, float], tags: Mapping[str, str], artifacts: Sequence[Path]) -> None:
        """Write all that is queued, end every open run and then the study's run; a second call does nothing."""
        if self._thread.is_alive():
            write_study = partial(self._store.close, status=status, metrics=metrics, tags=tags, artifacts=artifacts)
            self._queue.put(partial(self._take_close, write_study))
            self._queue.put(None)
            self._thread.join()

    # All methods below run in the writing thread.

    def _work(self) -> None:
        while True:
            try:
                action = self._queue.get(timeout=1.0)
            except queue.Empty:
                pass
            else:
                if action is None:
                    return
                self._attempt(action)
            self._write_due()

    def _take_start(self, trial: TrackedTrial) -> None:
        self._complete.discard(trial.name)
        self._runs[trial.name] = _Run(trial)

    def _take_evaluation(self, name: str, evaluation: Evaluation, at: float) -> None:
        run = self._runs.get(name)
        if run is not None and run.steps is not None:
            run.steps.add(evaluation.step)
            run.points += fields.evaluation_points(evaluation, at, fields.metric_name_of(run.trial))

    def _take_finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        self._best_scores.add(trial, result, score)
        if trial.name not in self._complete:
            self._runs.setdefault(trial.name, _Run(trial)).end = (result, score)

    def _take_model(self, make_model: Callable[[], tuple[Any, Any]]) -> None:
        try:
            self._store.log_model(*make_model())
        except Exception as error:  # noqa: BLE001  # a model of any kind, which torch may refuse to export in as many ways
            LOGGER.warning("MLflow has no model of the best configuration (%s)", " ".join(str(error).split())[:200])

    def _take_close(self, write_study: Callable[[], None]) -> None:
        num_failures = 0
        for run in self._by_failures():
            if not self._attempt(partial(self._end, run), run):
                num_failures += 1
                if num_failures == _MAX_FAILURES_AT_CLOSE:
                    break
        self._best_scores.end()
        is_written = all(map(self._attempt, (self._store.interrupt_open, self._write_best_scores, write_study)))
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
        if self._best_scores.unwritten:
            self._attempt(self._write_best_scores)

    def _by_failures(self) -> list["_Run"]:
        """Unwritten runs, those with the fewest failed writes first, so that a run that the store refuses does not hold up the others."""
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
        """Write the data of a run that is not in the store yet; safe to repeat after a failure midway."""
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

    def _write_best_scores(self) -> None:
        self._store.write(self._store.parent, self._best_scores.unwritten)
        self._best_scores.unwritten.clear()

    def _end(self, run: "_Run") -> None:
        """Write the data of a run that is not in the store yet, and end it, as interrupted if it has no result."""
        self._write(run)
        if run.end is None and run.run_id is not None:
            self._store.interrupt(run.run_id)
            del self._runs[run.trial.name]


class _BestScores:
    """The best score after each trial that improved it, and at the study's end, for its own run; the step is the number of trials ended."""

    def __init__(self, finished: Sequence[FinishedRun]) -> None:
        self._num_ended = 0
        self._best = math.inf
        self._last_step = 0
        self.unwritten: list[fields.Point] = []
        for run in sorted(finished, key=lambda run: run[1].stopped_at):
            self.add(*run)
        self.unwritten.clear()  # an earlier process wrote them

    def add(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        """Count a trial of the search that ended."""
        if trial.phase != "search":
            return
        self._num_ended += 1
        if score is not None and score < self._best:
            self._best = score
            self._append(result.stopped_at)

    def end(self) -> None:
        """Add the best score after all trials, so that a chart shows how long no trial has improved it."""
        if math.isfinite(self._best) and self._last_step < self._num_ended:
            self._append(time.time())

    def _append(self, at: float) -> None:
        self._last_step = self._num_ended
        self.unwritten.append(fields.Point("best_score", self._best, fields.milliseconds(at), self._num_ended))


@dataclass(kw_only=True)
class _Run:
    """A run that is not completely written to the store."""

    trial: TrackedTrial = field(kw_only=False)
    run_id: str | None = None
    is_described: bool = False
    steps: set[int] | None = field(default_factory=set)
    """Steps whose evaluations are written or in ``points``; None if they have to be read from the store."""
    points: list[fields.Point] = field(default_factory=list)
    written_at: float = field(default_factory=time.monotonic)
    end: tuple[TrialResult, float | None] | None = None
    num_failures: int = 0

    def is_due(self, now: float) -> bool:
        """Whether the run should be written now; ``now`` is a time of the monotonic clock."""
        has_unwritten = bool(self.points) or not self.is_described
        return self.end is not None or (has_unwritten and now - self.written_at >= WRITE_EVERY_SECONDS)

    def add_missing_points(self) -> None:
        """Add the metrics of those evaluations in the run's result that were not received live."""
        if self.end is None or self.steps is None:
            return
        result, _ = self.end
        for evaluation in result.evaluations:
            if evaluation.step not in self.steps:
                self.steps.add(evaluation.step)
                at = fields.evaluated_at(result, evaluation)
                self.points += fields.evaluation_points(evaluation, at, fields.metric_name_of(self.trial))


def _unwritten_runs(finished: Sequence[FinishedRun], left: Mapping[str, str | None]) -> dict[str, _Run]:
    """The finished runs that are not complete in the store; ``left`` has its runs by name: an id if open, None if complete."""
    unwritten = {}
    for trial, result, score in finished:
        if trial.name not in left:
            unwritten[trial.name] = _Run(trial, end=(result, score))
        elif (run_id := left[trial.name]) is not None:
            unwritten[trial.name] = _Run(trial, run_id=run_id, steps=None, end=(result, score))
    return unwritten
