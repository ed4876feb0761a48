"""Writes a study to MLflow: an MLflow experiment for each experiment, a parent run per study, a child run per trial or confirmation run.

A store that fails for a while costs only delay, and one that fails for good costs its own record but never the study: resuming the study,
or ``autotune record study=NAME --push``, writes what is missing. Little of what is not written yet is kept in memory: while ``has_room`` is
false, whoever tells the tracker of runs keeps them.
"""

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, TrialResult
from autotune.tracking import mlflow_fields as fields
from autotune.tracking.mlflow_uri import check_answers, store_uri, unusable
from autotune.tracking.tracker import FinishedRun, FinishedRuns, RunEnd, StudyInfo, TrackedTrial

LOGGER = logging.getLogger("autotune.tracking")
WRITE_EVERY_SECONDS = 5.0
"""Least seconds between writes of a running trial; a trial that ends before its first write is written all at once."""
RETRY_AFTER_SECONDS = 30.0
CLOSE_RETRY_SECONDS = 2.0
"""Seconds between attempts to write once the study has ended."""
GIVE_UP_SECONDS = 20.0
"""Seconds after the study's end without a single successful write after which the tracker gives up."""
MAX_UNWRITTEN = 200
"""Runs that have ended and are not written yet which the tracker keeps in memory; it has no room for more."""
_MAX_TOGETHER = 25
"""Runs that are written to a database in one transaction, which other programs that write to it wait for."""
_MAX_QUEUED = 1000
"""Messages that the tracker keeps in memory besides."""
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


def check(node: Mapping[str, Any]) -> None:
    """Check, before MLflow is imported, that the server answers which a configuration's ``tracking`` node names, if it names one.

    Raises:
        ConfigError: it does not, or ``uri`` is no text.
    """
    uri = node.get("uri")
    if not isinstance(uri, str | None):
        raise unusable(str(uri), "it is no text")
    check_answers(store_uri(uri))


class MlflowTracker:
    """Tracker that writes a study to an MLflow store.

    Args:
        uri: of the store; if None, MLFLOW_TRACKING_URI of the environment, else ``mlflow.db`` in the working folder.
        log_model: whether a study's run gets the trained model of the configuration that it exports, as an MLflow model.
        close_seconds: longest time that writing may take once the study has ended.
        finished: runs of this study that ended before it was resumed; read again for what the store lacks of them.

    Raises:
        ConfigError: the store does not answer, ``close_seconds`` is no number from 0, or ``log_model`` is neither true nor false.
    """

    def __init__(
        self,
        info: StudyInfo,
        *,
        uri: str | None = None,
        log_model: bool = True,
        close_seconds: float = 300.0,
        finished: Sequence[FinishedRun] = (),
    ) -> None:
        if not isinstance(close_seconds, int | float) or not 0 <= close_seconds < math.inf:
            raise ConfigError(f"tracking.close_seconds: found {close_seconds}; accepted is a number from 0")
        if not isinstance(log_model, bool):
            raise ConfigError(f"tracking.log_model: found {log_model}; accepted is true or false")
        preload()
        from autotune.tracking.mlflow_runs import MlflowRuns  # noqa: PLC0415  # MLflow takes seconds to import

        self._finished = FinishedRuns.of(finished)
        self._store = MlflowRuns(info, uri, {end.name for end in self._finished.ends})
        self.page = self._store.page
        """Address of the page that shows the trials of the experiment, best first."""
        self._complete = {name for name, run_id in self._store.left.items() if run_id is None}
        self.lacking = [place for place, end in enumerate(self._finished.ends) if end.name not in self._complete]
        """Places in ``finished`` of the runs that the store lacked when the tracker was made."""
        self._earlier = deque(self.lacking)
        self._runs: dict[str, _Run] = {}
        self._num_waiting = 0
        """Number of runs in ``_runs`` that have ended."""
        self._num_told = len(self._earlier)
        self._num_written = 0
        self.lacks_end = False
        """Whether the study's own end could not be written."""
        self._best_scores = _BestScores(self._finished.ends)
        self._logs_model = log_model
        self._close_seconds = close_seconds
        self._closes_by = math.inf
        self._retry_at = 0.0
        self._num_failures = 0
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="autotune-mlflow", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether the tracker can be told more without keeping too much in memory."""
        return self._queue.qsize() < _MAX_QUEUED and self._num_waiting < MAX_UNWRITTEN

    @property
    def num_unwritten(self) -> int:
        """Number of runs that have ended and that the store does not hold completely."""
        return self._num_told - self._num_written

    def start(self, trial: TrackedTrial) -> None:
        """Queue the creation of the trial's run."""
        self._queue.put(partial(self._take_start, trial))

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Queue an evaluation of the run ``name``, with the current time."""
        self._queue.put(partial(self._take_evaluation, name, evaluation, time.time()))

    def finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        """Queue the end of a run: its result and all that is not written of it yet."""
        self._num_told += 1
        self._queue.put(partial(self._take_finish, trial, result, score))

    def prepare_model(self, prepare: Callable[[], object]) -> None:
        """Queue the import of what logging a model takes, and ``prepare``, which imports what making it takes."""
        if self._logs_model:
            self._queue.put(partial(self._take_preparation, prepare))

    def log_model(self, make_model: Callable[[], tuple[Any, Any]]) -> None:
        """Queue the model that the study exports; ``make_model`` returns it, a ``torch.nn.Module``, with a batch of inputs."""
        if self._logs_model:
            self._queue.put(partial(self._take_model, make_model))

    def close_by(self, ends_at: float) -> None:
        """Set the time of the monotonic clock by which ``close`` is to have written what it can."""
        self._closes_by = ends_at

    def close(self, *, status: str, metrics: Mapping[str, float], tags: Mapping[str, str], artifacts: Sequence[Path]) -> None:
        """Write all that is queued, end every open run and then the study's run; a second call does nothing."""
        if self._thread.is_alive():
            self._closes_by = min(self._closes_by, time.monotonic() + self._close_seconds)
            write_study = partial(self._store.close, status=status, metrics=metrics, tags=tags, artifacts=artifacts)
            self._queue.put(partial(self._take_close, write_study))
            self._queue.put(None)
            self._thread.join()

    # All methods below run in the writing thread.

    def _work(self) -> None:
        is_over = False
        while not is_over:
            with contextlib.suppress(queue.Empty):
                action = self._queue.get(timeout=1.0)
                while action is not None:
                    self._attempt(action)
                    if self._num_waiting >= MAX_UNWRITTEN:
                        break
                    action = self._queue.get_nowait()
                is_over = action is None
            self._write_due()

    def _take_start(self, trial: TrackedTrial) -> None:
        self._complete.discard(trial.name)
        self._runs[trial.name] = self._new_run(trial) if trial.phase == "search" else _Run(trial)  # only searches go on with a run

    def _take_evaluation(self, name: str, evaluation: Evaluation, at: float) -> None:
        run = self._runs.get(name)
        if run is not None and run.steps is not None:
            run.steps.add(evaluation.step)
            run.points += fields.evaluation_points(evaluation, at, fields.metric_name_of(run.trial))

    def _take_finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        self._best_scores.add(result.stopped_at, trial.phase, score)
        if trial.name in self._complete:
            self._num_written += 1
        else:
            self._end_run(self._runs.setdefault(trial.name, self._new_run(trial)), result, score)

    def _new_run(self, trial: TrackedTrial) -> "_Run":
        """A run that is not in the store yet, or one that an earlier process left there open or interrupted."""
        run_id = self._store.left.get(trial.name)
        return _Run(trial) if run_id is None else _Run(trial, run_id=run_id, is_left=True, steps=None)

    def _end_run(self, run: "_Run", result: TrialResult, score: float | None) -> None:
        if run.end is None:
            self._num_waiting += 1
        else:
            self._num_written += 1  # it was told before
        run.end = (result, score)

    def _take_earlier(self) -> None:
        """Take up runs that ended before this process began and that the store lacks, as many as there is room for."""
        while self._earlier and self._num_waiting < MAX_UNWRITTEN:
            trial, result, score = self._finished[self._earlier.popleft()]
            self._end_run(self._runs.setdefault(trial.name, self._new_run(trial)), result, score)

    def _take_preparation(self, prepare: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):  # told when the model is logged
            self._store.import_for_models()
            prepare()

    def _take_model(self, make_model: Callable[[], tuple[Any, Any]]) -> None:
        try:
            self._store.log_model(*make_model())
        except Exception as error:  # noqa: BLE001  # a model of any kind, which torch may refuse to export in as many ways
            LOGGER.warning("MLflow has no model of the best configuration (%s)", " ".join(str(error).split())[:200])

    def _take_close(self, write_study: Callable[[], None]) -> None:
        """Write all runs, trying again until the time is over, or until nothing was written for a while."""
        written_at = time.monotonic()
        self._take_earlier()
        while self._runs and (now := time.monotonic()) < self._closes_by and now - written_at < GIVE_UP_SECONDS:
            is_refused = False
            if self._num_waiting > 1:
                num_written = self._num_written
                self._write_together()
                written_at = time.monotonic() if self._num_written > num_written else written_at
            for run in self._by_failures():
                if time.monotonic() > self._closes_by:
                    break
                if self._attempt(partial(self._end, run), run):
                    written_at = time.monotonic()
                else:
                    is_refused = True
                    if time.monotonic() - written_at > GIVE_UP_SECONDS:
                        break
            self._take_earlier()
            if is_refused and not any(run.num_failures == 0 for run in self._runs.values()):
                time.sleep(min(CLOSE_RETRY_SECONDS, max(0.0, self._closes_by - time.monotonic())))
        self._best_scores.end()
        is_written = all(map(self._attempt, (self._store.interrupt_open, self._write_best_scores, write_study)))
        self.lacks_end = not is_written
        if self.num_unwritten or not is_written:
            LOGGER.warning(
                "MLflow did not take %d runs%s; resuming the study writes them",
                self.num_unwritten,
                "" if is_written else " and the study's own end",
            )

    def _write_due(self) -> None:
        now = time.monotonic()
        if now < self._retry_at:
            return
        self._take_earlier()
        self._write_together()
        for run in self._by_failures():
            if run.is_due(now) and not self._attempt(partial(self._write, run), run):
                return
        if self._best_scores.unwritten:
            self._attempt(self._write_best_scores)

    def _write_together(self) -> None:
        """Write ended runs, several in one transaction, while that works; those of a transaction that fails are written one by one."""
        while (
            self._store.has_transactions
            and len(runs := [run for run in self._by_failures() if run.end is not None and not run.num_failures][:_MAX_TOGETHER]) > 1
        ):
            copies = [run.copy() for run in runs]
            try:
                with self._store.together():
                    for run in copies:
                        self._store_run(run)
            except Exception as error:  # noqa: BLE001  # told where a run fails by itself, too
                LOGGER.debug("a transaction of %d runs failed: %s", len(runs), error)
                return
            for run in copies:
                self._mark_written(run)

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
        self._store_run(run)
        if run.end is not None:
            self._mark_written(run)

    def _store_run(self, run: "_Run") -> None:
        is_new = run.run_id is None
        if run.is_left and run.end is None:
            self._store.reopen(str(run.run_id))
            run.is_left = False
        if run.run_id is None:
            tags = {} if run.end is None else fields.result_tags(run.trial, run.end[0])
            run.run_id = self._store.start(run.trial, tags)
        if not run.is_described and run.end is None:
            self._store.describe(run.run_id, run.trial)
            run.is_described = True
        if run.end is not None and run.steps is None:
            run.steps = self._store.steps(run.run_id)
        run.add_missing_points()
        if run.end is not None:
            self._store.finish(run.run_id, run.trial, *run.end, points=run.points, is_described=run.is_described, is_tagged=is_new)
            return
        if run.points:
            self._store.write(run.run_id, run.points)
            run.points = []
        run.written_at = time.monotonic()

    def _mark_written(self, run: "_Run") -> None:
        self._store.forget(str(run.run_id), run.trial.name)
        self._complete.add(run.trial.name)
        self._num_waiting -= 1
        self._num_written += 1
        del self._runs[run.trial.name]

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

    def __init__(self, ends: Sequence[RunEnd]) -> None:
        self._num_ended = 0
        self._best = math.inf
        self._last_step = 0
        self.unwritten: list[fields.Point] = []
        for end in sorted(ends, key=lambda end: end.stopped_at):
            self.add(end.stopped_at, end.phase, end.score)
        self.unwritten.clear()  # an earlier process wrote them

    def add(self, stopped_at: float, phase: str, score: float | None) -> None:
        """Count a run that ended, if it is a trial of the search."""
        if phase != "search":
            return
        self._num_ended += 1
        if score is not None and score < self._best:
            self._best = score
            self._append(stopped_at)

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
    is_left: bool = False
    """Whether an earlier process began the run and did not end it."""
    is_described: bool = False
    steps: set[int] | None = field(default_factory=set)
    """Steps whose evaluations are written or in ``points``; None if they have to be read from the store."""
    points: list[fields.Point] = field(default_factory=list)
    written_at: float = field(default_factory=time.monotonic)
    end: tuple[TrialResult, float | None] | None = None
    num_failures: int = 0

    def copy(self) -> "_Run":
        """A copy that can be written without a change to this run."""
        return replace(self, steps=None if self.steps is None else set(self.steps), points=list(self.points))

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
