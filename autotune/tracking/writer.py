"""The thread that tells the tracker of a study: neither the search nor a training waits for a
server, a database or MLflow's import.

What the tracker did not take, since the driver was killed, its server was away or more was told
than it could write, is made from the runs that the study itself has kept, when the study ends and
when it is taken up again.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from autotune.config.build import build_partial, call
from autotune.hiding import without_secrets
from autotune.measurement import Evaluation, TrialResult
from autotune.tracking.tracker import (
    BestScore,
    FinishedRun,
    StudyEnd,
    StudyInfo,
    TrackedTrial,
    Tracker,
)

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 300.0
"""Longest time in seconds to catch up once the study has ended, unless
``tracking.close_seconds`` says otherwise."""
INTERRUPTED_CLOSE_SECONDS = 15.0
RETRY_SECONDS = 30.0
"""Seconds after a failure in which the tracker is told nothing."""
_HURRY_SECONDS = 1.0
_GRACE_SECONDS = 10.0
"""Seconds past its limit after which the thread is left behind: a call to the store may hang."""
_MAX_QUEUED = 2000
_MAX_FAILURES = 3
"""Runs in a row that the tracker may refuse before no further one is tried."""
_NAMES = {"Mlflow": "MLflow", "Wandb": "W&B"}


class TrackerWriter:
    """Tells a tracker of a study's runs from a thread, and is closed once, however the study ends.

    Args:
        node: the ``tracking`` node of the configuration.
        allowed_targets: packages whose components the configuration may name.
        make_info: makes the facts on the study; called in the thread.
        ended: returns the runs that have ended; called when the writer is made and when it is
            closed.
        rest_command: command line that writes what the tracker lacks; None if there is none.
        say: prints a line for the user; called from any thread.
    """

    def __init__(
        self,
        node: Mapping[str, Any],
        allowed_targets: Sequence[str],
        *,
        make_info: Callable[[], StudyInfo],
        ended: Callable[[], Sequence[FinishedRun]],
        rest_command: str | None = None,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._node, self._rest_command, self._say, self._ended = node, rest_command, say, ended
        name = str(node.get("_target_", "")).rpartition(".")[2].removesuffix("Tracker")
        self.name = _NAMES.get(name, name)
        """Name of the tracker for people."""
        self.page: str | None = None
        """Address of a page that shows the trials, once the tracker is open; None if it has
        none."""
        self.is_complete = False
        """Whether the tracker was closed and lacks nothing of the study."""
        self._messages: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(_MAX_QUEUED)
        self._may_write = threading.Event()
        self._may_write.set()
        self._opened: Future[Tracker] = Future()
        self._retry_at, self._has_failed = 0.0, False
        self._end: tuple[StudyEnd, Sequence[FinishedRun]] | None = None
        self._closes_by, self._most_seconds = math.inf, math.inf
        self._is_closed = False
        arguments = (tuple(allowed_targets), make_info, ended())
        self._thread = threading.Thread(
            target=self._work, args=arguments, name="tracker", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the tracker is open; called before anything is trained.

        Raises:
            ConfigError: the tracker cannot be opened.
        """
        self._opened.result()

    def start(self, trial: TrackedTrial) -> None:
        """Pass on ``Tracker.start`` without waiting for it."""
        self._tell("start", trial)

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Pass on ``Tracker.evaluate`` without waiting for it."""
        self._tell("evaluate", name, evaluation)

    def finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        """Pass on ``Tracker.finish`` without waiting for it."""
        self._tell("finish", trial, result, score)

    def pause(self) -> None:
        """Write nothing more while runs are timed on CPUs that writing would take from them,
        until ``go_on`` or ``close``.
        """
        self._may_write.clear()

    def go_on(self) -> None:
        """Write again after ``pause``."""
        self._may_write.set()

    def hurry(self) -> None:
        """Let ``close`` wait for a moment only: what is not written then is written when the
        study is taken up again.
        """
        self._most_seconds = _HURRY_SECONDS

    def close(
        self,
        *,
        status: str,
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        artifacts: Sequence[Path],
        make_model: Callable[[], tuple[Any, Any]] | None = None,
        most_seconds: float = math.inf,
    ) -> None:
        """Close the tracker with the study's results (see ``StudyEnd``), and wait until it has
        everything or its time is over.

        What it lacks then is told in a line, with the command that writes it. Its time is its
        ``close_seconds``, or ``most_seconds``.

        Raises:
            ConfigError: the tracker could not be opened.
        """
        self._is_closed = True
        tracker, ended = self._opened.result(), self._ended()
        end = StudyEnd(
            status=status,
            metrics=metrics,
            tags=tags,
            artifacts=artifacts,
            best_scores=_best_scores(ended),
            make_model=make_model,
        )
        seconds = min(
            float(self._node.get("close_seconds", CLOSE_SECONDS)), most_seconds, self._most_seconds
        )
        self._closes_by = time.monotonic() + seconds
        self._end = end, ended
        self.go_on()
        with contextlib.suppress(queue.Full):
            self._messages.put_nowait(None)
        self._thread.join(seconds + min(seconds, _GRACE_SECONDS))
        missing = _missing(tracker, ended)
        if not self.is_complete:
            what = f"{len(missing):,} runs" if missing else "the study's own end"
            rest = (
                f"; what is missing is written by\n  {self._rest_command}"
                if self._rest_command
                else ""
            )
            self._say(f"{self.name} lacks {what}{rest}")

    def close_if_open(self, *, is_interrupt: bool) -> None:
        """Close the tracker with status KILLED or FAILED, unless it is already closed or could
        not be opened.
        """
        if self._is_closed:
            return
        with contextlib.suppress(TimeoutError):
            if (
                self._opened.exception(
                    None if math.isinf(self._most_seconds) else self._most_seconds
                )
                is None
            ):
                status = "KILLED" if is_interrupt else "FAILED"
                self.close(
                    status=status,
                    metrics={},
                    tags={},
                    artifacts=[],
                    most_seconds=INTERRUPTED_CLOSE_SECONDS,
                )

    def _tell(self, verb: str, *arguments: Any) -> None:
        with contextlib.suppress(queue.Full):  # what is not told is made from the study's own runs
            self._messages.put_nowait((verb, arguments))

    def _work(
        self,
        allowed_targets: Sequence[str],
        make_info: Callable[[], StudyInfo],
        ended: Sequence[FinishedRun],
    ) -> None:
        try:
            tracker: Tracker = call(
                build_partial(self._node, allowed_targets, "tracking"), "tracking", make_info()
            )
        except Exception as error:  # noqa: BLE001  # raised again in the callers of wait and close
            self._opened.set_exception(error)
            return
        told = _Told(self._say)
        logging.getLogger("autotune.tracking").addHandler(told)
        self.page = getattr(tracker, "page", None)
        self._opened.set_result(tracker)
        self._fill(tracker, ended)
        while self._end is None:
            message = self._messages.get()
            self._may_write.wait()
            if message is not None and time.monotonic() >= self._retry_at:
                self._carry_out(tracker, *message)
        with contextlib.suppress(queue.Empty):  # a run's end comes with all its evaluations
            while time.monotonic() < self._closes_by:
                message = self._messages.get_nowait()
                if (
                    message is not None
                    and message[0] == "finish"
                    and time.monotonic() >= self._retry_at
                ):
                    self._carry_out(tracker, *message)
        end, ended = self._end
        self._retry_at = 0.0
        self._fill(tracker, ended)
        is_closed = self._attempt(partial(tracker.close, end))
        self.is_complete = is_closed and not _missing(tracker, ended)
        logging.getLogger("autotune.tracking").removeHandler(told)

    def _fill(self, tracker: Tracker, ended: Sequence[FinishedRun]) -> None:
        """Tell the tracker of the runs that it lacks, while there is time and it takes them."""
        num_failures = 0
        for run in _missing(tracker, ended):
            self._may_write.wait()
            if num_failures == _MAX_FAILURES or time.monotonic() > self._closes_by:
                return
            num_failures = 0 if self._carry_out(tracker, "finish", run) else num_failures + 1

    def _carry_out(self, tracker: Tracker, verb: str, arguments: Sequence[Any]) -> bool:
        return self._attempt(partial(getattr(tracker, verb), *arguments))

    def _attempt(self, action: Callable[[], None]) -> bool:
        try:
            action()
        # every kind of store raises its own client's errors, and the study must go on
        except Exception as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            reason = without_secrets((str(error) or type(error).__name__).partition("\n")[0])[:200]
            logger.info("%s: %s", self.name, reason, exc_info=True)
            if not self._has_failed:
                self._say(
                    f"{self.name} does not take what it is told ({reason}); the study goes on, and"
                    " it is tried again"
                )
            self._has_failed = True
            return False
        return True


class _Told(logging.Handler):
    """Shows the warnings of a tracker to the user."""

    def __init__(self, say: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Show a warning."""
        self._say(record.getMessage())


def _missing(tracker: Tracker, ended: Sequence[FinishedRun]) -> list[FinishedRun]:
    return [run for run in ended if run[0].name not in tracker.complete]


def _best_scores(ended: Sequence[FinishedRun]) -> list[BestScore]:
    """The best score after each trial that improved on those before, and after the last, so that
    a chart shows how long none has.
    """
    searched = [
        (result.stopped_at, score) for trial, result, score in ended if trial.phase == "search"
    ]
    searched.sort(key=itemgetter(0))
    found: list[BestScore] = []
    for num_ended, (at, score) in enumerate(searched, start=1):
        if score is not None and (not found or score < found[-1].score):
            found.append(BestScore(num_ended, score, at))
    if found and found[-1].num_ended < len(searched):
        found.append(BestScore(len(searched), found[-1].score, searched[-1][0]))
    return found
