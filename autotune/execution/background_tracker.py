"""A tracker in a process of its own: what MLflow does to import, to make a database and to write takes no time from deciding."""

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

MOST_HELD_SECONDS = 60.0
"""How late the process is told at most, while something is timed."""
_NICENESS = 10
"""Of the process once its tracker is open: trainings and decisions go first where CPUs are few."""
_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from multiprocessing.connection import Connection
from autotune.execution.background_tracker import serve
serve(Connection(int(sys.argv[1])), sys.argv[3])
"""


@dataclass(frozen=True, kw_only=True)
class TrackerOpening:
    """What a tracker is made of."""

    node: Mapping[str, Any]
    """The configuration's ``tracking``."""
    allowed_targets: tuple[str, ...]
    log_path: Path
    """Where what it logs goes."""
    info: StudyInfo
    finished: tuple[FinishedRun, ...] = ()
    """Runs that ended before this process began."""

    def open(self) -> Tracker:
        """The tracker.

        Raises:
            ConfigError: it cannot be opened.
        """
        made = build_partial(self.node, self.allowed_targets, "tracking")
        return call(made, "tracking", self.info, finished=self.finished)  # type: ignore[no-any-return]  # the contract of tracking:


class TrackerProcess:
    """The process that a tracker will be opened in, which imports meanwhile what takes seconds to import.

    Args:
        node: the configuration's ``tracking``.
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
        """Wait until it has ended; it does once its tracker is closed, or the connection to it."""
        self.connection.close()
        self._process.wait()

    def close(self) -> None:
        """End it as it stands: what was opened in it was closed before."""
        self._process.kill()
        self.wait()


class BackgroundTracker:
    """A tracker in a process of its own, closed once, however the study ends.

    Args:
        opening: what it is made of; called in a thread of its own.
        process: that it is opened in.
    """

    def __init__(self, opening: Callable[[], TrackerOpening], process: TrackerProcess) -> None:
        self._opened: Future[None] = Future()
        self._queue: queue.SimpleQueue[tuple[float, tuple[str, tuple[Any, ...], Mapping[str, Any]]]] = queue.SimpleQueue()
        self._may_write = threading.Event()
        self._may_write.set()
        self._is_closed = False
        self._process = process
        self._thread = threading.Thread(target=self._work, args=(opening, process.connection), name="tracker", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is open, before anything is trained.

        Raises:
            ConfigError: it cannot be opened.
        """
        self._opened.result()

    def start(self, trial: TrackedTrial) -> None:
        """See ``Tracker``."""
        self._tell("start", trial)

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """See ``Tracker``."""
        self._tell("evaluate", name, evaluation)

    def finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        """See ``Tracker``."""
        self._tell("finish", trial, result, score)

    def hold(self) -> None:
        """From now on what is told waits a while, until ``held`` has ended or the tracker is closed."""
        self._may_write.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """While short runs are timed: what is told waits a while, since writing it would take CPUs from them.

        What the process was told before it goes on writing: the end of a search is told once it is held, see ``hold``.
        """
        self.hold()
        try:
            yield
        finally:
            self._may_write.set()

    def close(self, *, status: str, metrics: Mapping[str, float], tags: Mapping[str, str], artifacts: Sequence[Path]) -> None:
        """Close the tracker now, with what came of the study.

        Raises:
            ConfigError: it could not be opened.
        """
        self._is_closed = True
        self._may_write.set()
        self._tell("close", status=status, metrics=metrics, tags=tags, artifacts=artifacts)
        self._thread.join()
        self._opened.result()

    def close_if_open(self, *, is_interrupt: bool) -> None:
        """Close it as ended by the user or as failed, where the study did not come to close it."""
        if not self._is_closed and self._opened.exception() is None:
            self.close(status="KILLED" if is_interrupt else "FAILED", metrics={}, tags={}, artifacts=[])

    def _tell(self, verb: str, *arguments: Any, **named: Any) -> None:
        self._queue.put((time.monotonic(), (verb, arguments, named)))

    def _work(self, opening: Callable[[], TrackerOpening], connection: Connection) -> None:
        """In a thread: have the process open the tracker, and pass on what that is told."""
        try:
            connection.send(opening())
            error = connection.recv()
        except Exception as fault:  # noqa: BLE001  # whoever tells it something meets it
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
                self._may_write.wait(max(0.0, told_at + MOST_HELD_SECONDS - time.monotonic()))
                connection.send(message)
                verb = message[0]
            connection.recv()
        except (EOFError, OSError):
            logger.warning("the tracker's process was ended; the study goes on, and resuming it writes what is missing")


def serve(connection: Connection, target: str) -> None:
    """Open a tracker and tell it what comes, until it is closed; ends at once where the study's own process is gone.

    ``target`` is the tracker's ``_target_``: one of our own has its module's ``preload`` called before anything is said.
    """
    try:
        module, _, _ = target.rpartition(".")
        if module.startswith("autotune.tracking."):
            with contextlib.redirect_stderr(io.StringIO()):  # what is wrong shows again when it is opened
                getattr(importlib.import_module(module), "preload", lambda: None)()
        opening: TrackerOpening = connection.recv()
        with log_file(opening.log_path):
            try:
                tracker = opening.open()
            except Exception as error:  # noqa: BLE001  # whoever opens it meets it
                connection.send(error)
                return
            connection.send(None)
            os.nice(_NICENESS)
            verb = ""
            while verb != "close":
                verb, arguments, named = connection.recv()
                getattr(tracker, verb)(*arguments, **named)
            connection.send(None)
    except (EOFError, OSError):
        os._exit(1)  # a thread of the tracker's may be writing still
