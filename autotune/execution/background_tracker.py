"""A tracker in a process of its own: importing MLflow, creating its database and writing to it take no time from the driver."""

import contextlib
import importlib
import io
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autotune.config.build import build_partial, call
from autotune.errors import ConfigError
from autotune.execution.study_folder import log_file
from autotune.measurement import Evaluation, TrialResult
from autotune.tracking.tracker import FinishedRun, StudyInfo, TrackedTrial, Tracker

logger = logging.getLogger(__name__)

_HURRY_SECONDS = 2.0
MAX_HOLD_SECONDS = 60.0
"""Upper limit in seconds on how long a message to the tracker's process is held back while runs are timed."""
_NICENESS = 10
"""Niceness added to the tracker's process once its tracker is open: trainings and the driver go first where CPUs are few."""
_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from multiprocessing.connection import Connection
from autotune.execution.background_tracker import serve
serve(Connection(int(sys.argv[1])), sys.argv[3])
"""


@dataclass(frozen=True, kw_only=True)
class TrackerOpening:
    """Everything that opening a tracker needs; sent to the tracker's process."""

    node: Mapping[str, Any]
    """The ``tracking`` node of the configuration."""
    allowed_targets: tuple[str, ...]
    log_path: Path
    """File that the tracker's log messages are appended to."""
    info: StudyInfo
    finished: tuple[FinishedRun, ...] = ()
    """Runs that ended before this process began, for the tracker to fill in."""

    def open(self) -> Tracker:
        """Make the tracker that the configuration names.

        Raises:
            ConfigError: the tracker cannot be opened.
        """
        factory = build_partial(self.node, self.allowed_targets, "tracking")
        return call(factory, "tracking", self.info, finished=self.finished)  # type: ignore[no-any-return]  # the contract of tracking:


class TrackerProcess:
    """The process that a tracker will be opened in; it imports what takes seconds to import before the tracker is opened.

    Args:
        node: the ``tracking`` node of the configuration.
    """

    def __init__(self, node: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and code
                [sys.executable, "-c", _MAIN, str(theirs.fileno()), json.dumps(sys.path), str(node.get("_target_", ""))],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for the driver
            )
        self.connection = Connection(ours.detach())

    def wait(self) -> None:
        """Close the connection and wait until the process has ended."""
        self.connection.close()
        self._process.wait()

    def kill(self) -> None:
        """Kill the process; a tracker that was opened in it and not closed before has not written everything."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and close the connection."""
        self.kill()
        self.wait()


class BackgroundTracker:
    """A tracker in a process of its own, closed once, however the study ends.

    Args:
        opening: returns what the tracker is made of; called in a separate thread.
        process: the process that the tracker is opened in.
    """

    def __init__(self, opening: Callable[[], TrackerOpening], process: TrackerProcess) -> None:
        self._opened: Future[None] = Future()
        self._queue: queue.SimpleQueue[tuple[float, tuple[str, tuple[Any, ...], Mapping[str, Any]]]] = queue.SimpleQueue()
        self._may_write = threading.Event()
        self._may_write.set()
        self._is_closed = False
        self._end_seconds: float | None = None
        """Longest wait for the tracker to write everything when it is closed; None waits until it has."""
        self._process = process
        self._thread = threading.Thread(target=self._work, args=(opening, process.connection), name="tracker", daemon=True)
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

    def log_model(self, make_model: Callable[[], tuple[Any, Any]]) -> None:
        """Pass on ``log_model`` to a tracker that has one, without waiting for it; ``make_model`` is called in the tracker's process."""
        self._tell("log_model", make_model)

    def hold(self) -> None:
        """Hold back all messages to the tracker from now on, each for ``MAX_HOLD_SECONDS`` at most, until ``held`` or the tracker ends."""
        self._may_write.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold back messages to the tracker while short runs are timed, since writing would take CPUs from the runs.

        The process still writes what it was told before; to hold back the end of a search as well, call ``hold`` earlier.
        """
        self.hold()
        try:
            yield
        finally:
            self._may_write.set()

    def hurry(self) -> None:
        """Let ``close`` wait for a moment only: what is not written then is written when the study is taken up again."""
        self._end_seconds = _HURRY_SECONDS

    def close(self, *, status: str, metrics: Mapping[str, float], tags: Mapping[str, str], artifacts: Sequence[Path]) -> None:
        """Close the tracker with the study's results, and wait until it has written everything.

        Raises:
            ConfigError: the tracker could not be opened.
        """
        self._is_closed = True
        self._may_write.set()
        self._tell("close", status=status, metrics=metrics, tags=tags, artifacts=artifacts)
        self._thread.join(self._end_seconds)
        if self._thread.is_alive():
            self._process.kill()  # which ends the thread, too
            self._thread.join()
        self._opened.result()

    def close_if_open(self, *, is_interrupt: bool) -> None:
        """Close the tracker with status KILLED or FAILED, unless it is already closed or could not be opened."""
        if self._is_closed:
            return
        try:
            fault = self._opened.exception(self._end_seconds)
        except TimeoutError:
            self._process.kill()
            fault = self._opened.exception()
        if fault is None:
            self.close(status="KILLED" if is_interrupt else "FAILED", metrics={}, tags={}, artifacts=[])

    def _tell(self, verb: str, *arguments: Any, **named: Any) -> None:
        self._queue.put((time.monotonic(), (verb, arguments, named)))

    def _work(self, opening: Callable[[], TrackerOpening], connection: Connection) -> None:
        """Have the process open the tracker, then send it the queued messages; runs in the thread."""
        try:
            connection.send(opening())
            error = connection.recv()
        except Exception as fault:  # noqa: BLE001  # raised again in the callers of wait and close
            error = ConfigError("tracking: its process ended") if isinstance(fault, EOFError | OSError) else fault
        if error is not None:
            self._opened.set_exception(error)
        else:
            self._opened.set_result(None)
            self._pass_on(connection)
        self._process.wait()

    def _pass_on(self, connection: Connection) -> None:
        verb = ""
        try:
            while verb != "close":
                told_at, message = self._queue.get()
                self._may_write.wait(max(0.0, told_at + MAX_HOLD_SECONDS - time.monotonic()))
                connection.send(message)
                verb = message[0]
            connection.recv()
        except (EOFError, OSError):
            logger.warning("the tracker's process was ended; the study goes on, and resuming it writes what is missing")


def serve(connection: Connection, target: str) -> None:
    """Open a tracker in this process and carry out the messages from the connection, until the tracker is closed.

    The process exits at once if the study's own process is gone. ``target`` is the tracker's ``_target_``: if it is one of autotune's
    own, the ``preload`` of its module is called before the first message is read.
    """
    try:
        module, _, _ = target.rpartition(".")
        if module.startswith("autotune.tracking."):
            with contextlib.redirect_stderr(io.StringIO()):  # an error shows again when the tracker is opened
                getattr(importlib.import_module(module), "preload", lambda: None)()
        opening: TrackerOpening = connection.recv()
        with log_file(opening.log_path):
            try:
                tracker = opening.open()
            except Exception as error:  # noqa: BLE001  # raised again in the study's process
                connection.send(error)
                return
            connection.send(None)
            os.nice(_NICENESS)
            verb = ""
            while verb != "close":
                verb, arguments, named = connection.recv()
                if verb != "log_model" or hasattr(tracker, verb):
                    getattr(tracker, verb)(*arguments, **named)
            connection.send(None)
    except (EOFError, OSError):
        os._exit(1)  # without waiting for a thread of the tracker that may still be writing
