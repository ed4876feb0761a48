"""The thread that tells the tracker of a study: neither the search nor a training waits for a
server, a database or MLflow's import.

What the tracker did not take, since the driver was killed, its server was away or more was told
than it could write, is made from the runs that the study itself has kept, when the study ends and
when it is resumed.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import accumulate
from operator import methodcaller
from typing import Any

from autotune.config.build import build_partial, call
from autotune.errors import ConfigError, one_line
from autotune.measurement import Evaluation, TrialResult
from autotune.policy import Run
from autotune.tracking.tracker import (
    BestScore,
    FinishedRun,
    StudyEnd,
    StudyInfo,
    Tracker,
)

logger = logging.getLogger(__name__)

_INTERRUPTED_SECONDS = 15.0
"""Longest time to catch up once the study has been interrupted."""
_RETRY_SECONDS = 30.0
"""Seconds after a failure in which the tracker is told nothing."""
_GRACE_SECONDS = 10.0
"""Seconds past its limit after which the thread is left behind: a call to the store may hang."""
_MAX_QUEUED = 2000
_MAX_FAILURES = 3
"""Runs in a row that the tracker may refuse before no further one is tried."""
_NAMES = {"Mlflow": "MLflow", "Wandb": "W&B"}


class TrackerWriter:
    """Tells a tracker of a study's runs from a thread, and is closed once, however the study ends.

    Args:
        node: the ``tracking`` node of the configuration; its ``close_seconds`` is the longest time
            that writing may take once the study has ended.
        allowed_targets: packages whose components the configuration may name.
        make_info: makes the facts on the study; called in the thread.
        ended: returns the runs that have ended; called when the writer is made and when it is
            closed.
        rest_command: command line that writes what the tracker lacks.
        say: prints a line for the user; called from any thread.

    Raises:
        ConfigError: ``close_seconds`` is no number from 0.
    """

    def __init__(
        self,
        node: Mapping[str, Any],
        allowed_targets: Sequence[str],
        *,
        make_info: Callable[[], StudyInfo],
        ended: Callable[[], Sequence[FinishedRun]],
        rest_command: str,
        say: Callable[[str], object],
    ) -> None:
        self.close_seconds = node.get("close_seconds", 300.0)
        """Longest time that ``close`` may wait."""
        if not (isinstance(self.close_seconds, int | float) and 0 <= self.close_seconds < math.inf):
            raise ConfigError(
                f"tracking.close_seconds: found {self.close_seconds}; give a number from 0"
            )
        self._rest_command, self._say, self._ended = rest_command, say, ended
        name = str(node.get("_target_", "")).rpartition(".")[2].removesuffix("Tracker")
        self.name = _NAMES.get(name, name)
        """Name of the tracker for people."""
        self.is_complete = False
        """Whether the tracker was closed and lacks nothing of the study."""
        self._calls: queue.SimpleQueue[methodcaller | None] = queue.SimpleQueue()
        """Calls of the tracker's methods; None after the last."""
        self.may_write = threading.Event()
        """Cleared while runs are timed on CPUs that writing would take from them."""
        self.may_write.set()
        self._opened: Future[Tracker] = Future()
        self._retry_at, self._has_failed = 0.0, False
        self._end, self._closes_by = StudyEnd(status="KILLED"), math.inf
        self._is_closed = False
        self._runs = ended()
        """The runs that the tracker must hold: those that ended before it was made, and all when
        it is closed."""

        def make() -> Tracker:
            made = build_partial(node, tuple(allowed_targets), "tracking")
            tracker: Tracker = call(made, "tracking", make_info())
            return tracker

        self._thread = threading.Thread(
            target=self._work, args=(make,), name="tracker", daemon=True
        )
        self._thread.start()

    @property
    def page(self) -> str | None:
        """Address of a page that shows the trials; None if the tracker has none."""
        return getattr(self._opened.result(), "page", None)

    @property
    def browse(self) -> str | None:
        """The command or the address that shows the runs; None if the tracker has none."""
        return getattr(self._opened.result(), "browse", None)

    def wait(self) -> None:
        """Wait until the tracker is open; called before anything is trained.

        Raises:
            ConfigError: the tracker cannot be opened.
        """
        self._opened.result()

    def start(self, trial: Run) -> None:
        """Pass on ``Tracker.start`` without waiting for it."""
        self._tell(methodcaller("start", trial))

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Pass on ``Tracker.evaluate`` without waiting for it."""
        self._tell(methodcaller("evaluate", name, evaluation))

    def finish(self, trial: Run, result: TrialResult, score: float | None) -> None:
        """Pass on ``Tracker.finish`` without waiting for it."""
        self._tell(methodcaller("finish", trial, result, score))

    def _tell(self, method_call: methodcaller) -> None:
        if self._calls.qsize() < _MAX_QUEUED:  # the rest is made from the study's own runs
            self._calls.put(method_call)

    def close(self, end: StudyEnd) -> None:
        """Close the tracker with the study's results, and wait until it has everything or
        ``close_seconds`` have passed.

        What it lacks then is told in a line, with the command that writes it.

        Raises:
            ConfigError: the tracker could not be opened.
        """
        self._is_closed = True
        tracker, self._runs = self._opened.result(), self._ended()
        self._end = replace(end, best_scores=_best_scores(self._runs))
        self._closes_by = time.monotonic() + self.close_seconds
        self.may_write.set()
        self._calls.put(None)
        self._thread.join(self.close_seconds + min(self.close_seconds, _GRACE_SECONDS))
        if not self.is_complete:
            num_missing = len(self._missing(tracker))
            what = f"{num_missing:,} runs" if num_missing else "the study's own end"
            self._say(
                f"{self.name} lacks {what}; what is missing is written by\n  {self._rest_command}"
            )

    def close_if_open(self, *, is_interrupt: bool) -> None:
        """Close the tracker with status KILLED or FAILED, unless it is already closed or could
        not be opened.
        """
        self.close_seconds = min(self.close_seconds, _INTERRUPTED_SECONDS)
        with contextlib.suppress(TimeoutError):
            if not self._is_closed and self._opened.exception(self.close_seconds) is None:
                self.close(StudyEnd(status="KILLED" if is_interrupt else "FAILED"))

    def _work(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
        except Exception as error:  # noqa: BLE001  # raised again in the callers of wait and close
            self._opened.set_exception(error)
            return
        warnings = ShownWarnings(self._say)
        logging.getLogger("autotune.tracking").addHandler(warnings)
        self._opened.set_result(tracker)
        self._fill(tracker)
        while (method_call := self._calls.get()) is not None:
            self.may_write.wait()
            if self._retry_at <= time.monotonic() < self._closes_by:
                self._attempt(method_call, tracker)
        self._fill(tracker)
        is_closed = self._attempt(methodcaller("close", self._end), tracker)
        self.is_complete = is_closed and not self._missing(tracker)
        logging.getLogger("autotune.tracking").removeHandler(warnings)

    def _missing(self, tracker: Tracker) -> list[FinishedRun]:
        return [run for run in self._runs if run[0].name not in tracker.complete]

    def _fill(self, tracker: Tracker) -> None:
        """Tell the tracker of the runs that it lacks, while there is time and it takes them."""
        num_failures = 0
        for run in self._missing(tracker):
            self.may_write.wait()
            if num_failures == _MAX_FAILURES or time.monotonic() > self._closes_by:
                return
            is_taken = self._attempt(methodcaller("finish", *run), tracker)
            num_failures = 0 if is_taken else num_failures + 1

    def _attempt(self, method_call: methodcaller, tracker: Tracker) -> bool:
        try:
            method_call(tracker)
        # every kind of store raises its own client's errors, and the study must continue
        except Exception as error:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            reason = one_line(error)
            logger.info("%s: %s", self.name, reason, exc_info=True)
            if not self._has_failed:
                self._say(
                    f"{self.name} does not take what it is told ({reason}); the study continues,"
                    " and it is tried again"
                )
            self._has_failed = True
            return False
        return True


class ShownWarnings(logging.Handler):
    """Shows the warnings of a logger to the user.

    Args:
        say: prints a line; called from any thread.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Show a warning."""
        self._say(record.getMessage())


def _best_scores(runs: Sequence[FinishedRun]) -> list[BestScore]:
    """The best score after each trial, from the first that has one on."""
    trials = [(result, score) for trial, result, score in runs if trial.phase == "search"]
    trials.sort(key=lambda ended: ended[0].stopped_at)
    scores = accumulate((math.inf if score is None else score for _, score in trials), min)
    return [
        BestScore(num_ended, score, result.stopped_at)
        for num_ended, ((result, _), score) in enumerate(zip(trials, scores, strict=True), start=1)
        if math.isfinite(score)
    ]
