"""A tracker in a process of its own: importing MLflow, creating its database and writing to it take no time from the driver.

What the tracker is told goes through a file (``spool.py``), so that a tracker that falls behind takes no memory of either process. How far
it is behind can be asked at any time; at the end it has ``close_seconds`` to catch up, and whatever it still lacks then is told in a line.
"""

import contextlib
import gc
import importlib
import io
import json
import logging
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from autotune.config.build import build_partial, call
from autotune.errors import ConfigError
from autotune.execution.spool import Message, Spool, SpooledObjects
from autotune.execution.study_folder import log_file
from autotune.execution.watch import is_left
from autotune.measurement import Evaluation, TrialResult
from autotune.tracking.tracker import FinishedRuns, StudyInfo, TrackedTrial, Tracker

logger = logging.getLogger(__name__)

_HURRY_SECONDS = 2.0
MAX_HOLD_SECONDS = 60.0
"""Upper limit in seconds on how long a message to the tracker's process is held back while runs are timed."""
CLOSE_SECONDS = 300.0
"""Longest time in seconds that a tracker may take to catch up once the study has ended, unless its ``close_seconds`` says otherwise."""
INTERRUPTED_CLOSE_SECONDS = 15.0
"""Longest time in seconds that a tracker may take to catch up once the study was interrupted or has failed."""
FEW_RUNS = 20
"""Runs that a tracker may be behind without a word."""
_GRACE_SECONDS = 10.0
"""Seconds past its limit after which a tracker's process is killed: a call to the store may hang."""
_MAX_SPOOL_BYTES = 2**26
"""Size of a spool file in bytes after which messages go to a new one, so that the space of what was read is freed."""
_POLL_SECONDS = 0.1
_LOOK_SECONDS = 0.25
"""Seconds between two looks whether the study's process is gone, while the tracker is being opened."""
_REPORT_EVERY_SECONDS = 0.5
NICENESS = 10
"""Niceness added to the tracker's process once its tracker is open: trainings and the driver go first where CPUs are few."""
_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from multiprocessing.connection import Connection
from autotune.execution.background_tracker import serve
serve(Connection(int(sys.argv[1])), sys.argv[3])
"""


_NAMES = {"Mlflow": "MLflow", "Wandb": "W&B"}


@dataclass(frozen=True, kw_only=True)
class TrackerOpening:
    """Everything that opening a tracker needs; sent to the tracker's process."""

    node: Mapping[str, Any]
    """The ``tracking`` node of the configuration."""
    allowed_targets: tuple[str, ...]
    log_path: Path
    """File that the tracker's log messages are appended to."""
    info: StudyInfo
    finished: FinishedRuns = field(default_factory=FinishedRuns)
    """Runs that ended before this process began; those that the tracker lacks go to its process through a file."""
    rest_command: str | None = None
    """Command line that writes what the tracker lacks at the end; None if there is none."""

    @property
    def close_seconds(self) -> float:
        """Longest time in seconds that the tracker may take to catch up once the study has ended."""
        return float(self.node.get("close_seconds", CLOSE_SECONDS))

    @property
    def tracker_name(self) -> str:
        """Name of the tracker for people, such as ``MLflow``."""
        name = str(self.node.get("_target_", "")).rpartition(".")[2].removesuffix("Tracker")
        return _NAMES.get(name, name)

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
        node: the ``tracking`` node of the configuration; if its tracker is one of autotune's own, ``check`` of its module sees it first.

    Raises:
        ConfigError: the check found something that the tracker needs and that is not there.
    """

    def __init__(self, node: Mapping[str, Any]) -> None:
        target = str(node.get("_target_", ""))
        with contextlib.suppress(ImportError):  # there is no such tracker, which is told when it is opened
            _of_own_module(target, "check", node)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and code
                [sys.executable, "-c", _MAIN, str(theirs.fileno()), json.dumps(sys.path), target],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for the driver
            )
        self.connection = Connection(ours.detach())
        self._closing = threading.Lock()

    def wait(self) -> None:
        """Close the connection and wait until the process has ended; several threads may."""
        with self._closing:
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
        spool_folder: folder on a disk, for the file of messages that are not written yet.
        say: prints a line for the user: what the tracker warns of, and what it lacks at the end; called from any thread.
    """

    def __init__(
        self,
        opening: Callable[[], TrackerOpening],
        process: TrackerProcess,
        *,
        spool_folder: Path | None = None,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._opened: Future[TrackerOpening] = Future()
        self._lock = threading.Lock()
        self._say = say
        self._spool_folder = spool_folder
        self._spool: Spool | None = Spool(spool_folder)
        """End of the file that messages are appended to; None once the tracker is gone."""
        self._num_ended = 0
        """Number of runs whose end was told."""
        self._num_dropped = 0
        """Number of runs whose end could not be told, since the disk is full or the process is gone."""
        self._num_written = 0
        self.page: str | None = None
        """Address of a page that shows the trials, once the tracker is open; None if it has none."""
        self._is_closed = False
        self._is_hurried = False
        self._closed: tuple[int, bool] | None = None
        """Number of runs that the tracker lacks at the end, and whether it lacks the study's own end; None before that."""
        self._process = process
        self._thread = threading.Thread(target=self._work, args=(opening, process.connection), name="tracker", daemon=True)
        self._thread.start()

    @property
    def num_behind(self) -> int:
        """Number of runs that have ended and that the tracker has not written completely."""
        if self._closed is not None:
            return self._closed[0] + self._num_dropped
        return max(0, self._num_ended + self._num_dropped - self._num_written)

    @property
    def backlog(self) -> str:
        """How far the tracker is behind, in words for the live table; empty where it is not worth a word."""
        behind = self.num_behind
        return f"{self._opened.result().tracker_name}: {behind:,} runs behind" if behind > FEW_RUNS and self._opened.done() else ""

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
        """Pass the model of a study that has ended on to a tracker that keeps models; its process calls ``make_model``."""
        self._control("log_model", make_model)

    def prepare_model(self, prepare: Callable[[], object]) -> None:
        """Have a tracker that keeps models get ready for one that it is told of later; its process calls ``prepare``, too."""
        self._control("prepare_model", prepare)

    def hold(self) -> None:
        """Hold back all messages to the tracker from now on, each for ``MAX_HOLD_SECONDS`` at most, until ``held`` or the tracker ends."""
        self._control("hold", True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold back messages to the tracker while short runs are timed, since writing would take CPUs from the runs.

        The process still writes what it has read before; to hold back the end of a search as well, call ``hold`` earlier.
        """
        self.hold()
        try:
            yield
        finally:
            self._control("hold", False)

    def hurry(self) -> None:
        """Let ``close`` wait for a moment only: what is not written then is written when the study is taken up again."""
        self._is_hurried = True

    def close(
        self,
        *,
        status: str,
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        artifacts: Sequence[Path],
        most_seconds: float = math.inf,
    ) -> None:
        """Close the tracker with the study's results, and wait until it has written everything or its time is over.

        What it lacks then is told in a line, with the command that writes it. Its time is its ``close_seconds``, or ``most_seconds``.

        Raises:
            ConfigError: the tracker could not be opened.
        """
        self._is_closed = True
        opening = self._opened.result()
        seconds, grace_seconds = min(opening.close_seconds, most_seconds), _GRACE_SECONDS
        if self._is_hurried:
            seconds = grace_seconds = _HURRY_SECONDS / 2
        end = {"status": status, "metrics": metrics, "tags": tags, "artifacts": artifacts}
        self._control("close", seconds, end)
        self._thread.join(min(1.0, seconds))
        if self._thread.is_alive() and self.num_behind > FEW_RUNS and not self._is_hurried:
            self._say(f"{self.backlog}; they are written now, for {seconds:.0f} s at most")
        self._thread.join(seconds + grace_seconds)
        if self._thread.is_alive():
            logger.warning("the tracker's process did not end within %.0f s of its time; it is killed", grace_seconds)
            self._process.kill()
            self._thread.join()
        self._tell_what_is_missing(opening)

    def close_if_open(self, *, is_interrupt: bool) -> None:
        """Close the tracker with status KILLED or FAILED, unless it is already closed or could not be opened."""
        if self._is_closed:
            return
        try:
            fault = self._opened.exception(_HURRY_SECONDS if self._is_hurried else None)
        except TimeoutError:
            self._process.kill()
            fault = self._opened.exception()
        if fault is None:
            status = "KILLED" if is_interrupt else "FAILED"
            self.close(status=status, metrics={}, tags={}, artifacts=[], most_seconds=INTERRUPTED_CLOSE_SECONDS)

    @property
    def name(self) -> str:
        """Name of the tracker for people; it must be open."""
        return self._opened.result().tracker_name

    @property
    def is_complete(self) -> bool:
        """Whether the tracker was closed and lacks nothing of the study."""
        return self._closed == (0, False) and not self._num_dropped

    def _tell_what_is_missing(self, opening: TrackerOpening) -> None:
        num_missing, lacks_end = self._closed or (self.num_behind, True)
        num_missing += self._num_dropped if self._closed else 0
        if num_missing or lacks_end:
            missing = f"{num_missing:,} runs" if num_missing else ""
            end = "the study's own end" if lacks_end else ""
            rest = f"; what is missing is written by\n  {opening.rest_command}" if opening.rest_command else ""
            self._say(f"{opening.tracker_name} lacks {' and '.join(filter(None, (missing, end)))}{rest}")

    def _tell(self, verb: str, *arguments: Any) -> None:
        """Append a message for the tracker to the file; one that cannot be written is dropped, and the study goes on."""
        is_end = verb == "finish"
        with self._lock:
            try:
                if self._spool is None:
                    raise OSError("the tracker's process has ended")
                self._spool.append((verb, arguments), ends_run=is_end, not_before=time.monotonic() + MAX_HOLD_SECONDS)
                self._num_ended += is_end
                if self._spool.position > _MAX_SPOOL_BYTES and self._opened.done():
                    self._renew_spool()
            except OSError as error:
                self._num_dropped += is_end
                if self._num_dropped == 1 and is_end and self._spool is not None:
                    logger.warning("what the tracker is to write cannot be kept (%s); the study goes on", error)
                    self._say(f"the tracker falls behind, since its file in {self._spool_folder} cannot be written: {error.strerror}")

    def _renew_spool(self) -> None:
        assert self._spool is not None, "checked by the caller"
        new, old = Spool(self._spool_folder), self._spool
        self._process.connection.send(("spool",))
        send_handle(self._process.connection, new.descriptor, None)
        self._spool = new
        old.close()

    def _control(self, *message: Any) -> None:
        """Send a message that the tracker's process heeds at once; there are few of them."""
        if self._opened.exception() is None:
            with self._lock, contextlib.suppress(OSError):
                self._process.connection.send(message)

    def _work(self, opening: Callable[[], TrackerOpening], connection: Connection) -> None:
        """Have the process open the tracker, then hear what it says; runs in the thread."""
        try:
            made = opening()
            error = self._open(made, connection)
        except Exception as fault:  # noqa: BLE001  # raised again in the callers of wait and close
            error = ConfigError("tracking: its process ended") if isinstance(fault, EOFError | OSError) else fault
        if error is not None:
            self._opened.set_exception(error)
        else:
            self._opened.set_result(made)
            self._hear(connection)
        self._process.wait()
        with self._lock:
            if self._spool is not None:
                self._spool.close()
            self._spool = None

    def _open(self, opening: TrackerOpening, connection: Connection) -> Exception | None:
        """Have the process open the tracker, and make the runs that it asks for meanwhile; return why it cannot be opened, or None."""
        finished = Spool(self._spool_folder)
        connection.send((replace(opening, finished=FinishedRuns()), opening.finished.ends))
        assert self._spool is not None, "it is closed by this thread"
        for spool in (finished, self._spool):
            send_handle(connection, spool.descriptor, None)
        try:
            answer: int | Exception | None = connection.recv()
            while isinstance(answer, int):
                run = opening.finished[answer]
                try:
                    finished.append(run)
                except OSError as error:
                    raise ConfigError(f"tracking: {self._spool_folder}: cannot be written: {error.strerror}") from error
                connection.send(None)
                answer = connection.recv()
        finally:
            finished.close()
        return answer

    def _hear(self, connection: Connection) -> None:
        try:
            while self._closed is None:
                verb, *said = connection.recv()
                if verb == "written":
                    (self._num_written,) = said
                elif verb == "said":
                    self._say(said[0])
                elif verb == "page":
                    (self.page,) = said
                else:
                    self._closed = said[0], said[1]
        except (EOFError, OSError):
            logger.warning("the tracker's process was ended; the study goes on, and resuming it writes what is missing")
            if not self._is_closed:
                self._say("the tracker's process was ended; the study goes on")


def serve(connection: Connection, target: str) -> None:
    """Open a tracker in this process and carry out the messages of the study's process, until the tracker is closed.

    The process exits at once if the study's own process is gone. ``target`` is the tracker's ``_target_``: if it is one of autotune's
    own, the ``preload`` of its module is called before the first message is read.
    """
    try:
        with _ended_if_left(connection), contextlib.redirect_stderr(io.StringIO()):  # an error shows again when the tracker is opened
            gc.disable()  # it would walk the imported objects again and again
            _of_own_module(target, "preload")
        gc.freeze()
        gc.enable()
        opening, ends = connection.recv()
        finished, spool = (Spool(descriptor=recv_handle(connection)) for _ in range(2))
        runs = _RunsOnDemand(connection, finished)
        with log_file(opening.log_path):
            try:
                with _ended_if_left(connection):
                    tracker = replace(opening, finished=FinishedRuns(ends, runs.run)).open()
                runs.keep(getattr(tracker, "lacking", range(len(ends))))
            except Exception as error:  # noqa: BLE001  # raised again in the study's process
                connection.send(error)
                return
            connection.send(None)
            connection.send(("page", getattr(tracker, "page", None)))
            before = os.getpriority(os.PRIO_PROCESS, 0)
            os.nice(NICENESS)
            connection.send(("closed", *_Reader(connection, tracker, spool, niceness_at_end=before).carry_out()))
    except (EOFError, OSError):
        os._exit(1)  # without waiting for a thread of the tracker that may still be writing


def _of_own_module(target: str, name: str, *arguments: Any) -> None:
    """Call a function of the module that a tracker's ``_target_`` lies in, if the module is autotune's own and has that function."""
    module, _, _ = target.rpartition(".")
    if module.startswith("autotune.tracking."):
        getattr(importlib.import_module(module), name, lambda *_: None)(*arguments)


@contextlib.contextmanager
def _ended_if_left(connection: Connection) -> Iterator[None]:
    """End this process at once if the other end of a connection is closed while the context lasts."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_LOOK_SECONDS):
            if is_left(connection):
                os._exit(1)

    threading.Thread(target=watch, name="owner", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


class _RunsOnDemand:
    """The runs that ended before the study was resumed, each made by the study's process when it is first asked for."""

    def __init__(self, connection: Connection, spool: Spool) -> None:
        self._connection, self._runs = connection, SpooledObjects(spool)
        self._lock = threading.Lock()
        self._may_ask = True

    def keep(self, places: Iterable[int]) -> None:
        """Have the runs at these places made too; no others can be asked for from then on, since the tracker is open."""
        for place in places:
            with self._lock:
                self._fetch(place)
        with self._lock:
            self._may_ask = False

    def run(self, place: int) -> Any:
        """The run at a place; a tracker's own thread may ask, too.

        Raises:
            LookupError: the tracker is open, and did not say that it would ask for this run.
        """
        with self._lock:
            self._fetch(place)
            return self._runs[place]

    def _fetch(self, place: int) -> None:
        if place in self._runs:
            return
        if not self._may_ask:
            raise LookupError(f"finished[{place}]: is asked for after the tracker was made, and is not in its attribute lacking")
        self._connection.send(place)
        self._connection.recv()
        self._runs.take(place)


def _set_niceness(niceness: int) -> None:
    """Set the niceness of this process, which Linux keeps for each thread; only some users, such as root, may make it less."""
    threads = [int(each.name) for each in Path("/proc/self/task").iterdir()] if sys.platform == "linux" else [0]
    for thread in threads:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


class _Reader(logging.Handler):
    """Hands the messages of the study's process to a tracker, as many as it has room for, and passes the tracker's warnings on.

    Args:
        niceness_at_end: what this process gets once the study has ended: no training is slowed down then, and the driver waits.
    """

    def __init__(self, connection: Connection, tracker: Any, spool: Spool, *, niceness_at_end: int) -> None:
        super().__init__(logging.WARNING)
        self._connection, self._tracker, self._niceness_at_end = connection, tracker, niceness_at_end
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._spools = deque([spool])
        self._holds = False
        self._close: tuple[float, Mapping[str, Any]] | None = None
        """Time of the monotonic clock at which reading ends, and the arguments of the tracker's ``close``."""
        self._num_ended = 0
        self._reported_at, self._reported = 0.0, 0

    def carry_out(self) -> tuple[int, bool]:
        """Carry out everything that the tracker is told; return the number of runs that it lacks, and whether it lacks the study's end."""
        tracking = logging.getLogger("autotune.tracking")
        tracking.addHandler(self)
        may_take = True
        while True:
            self._heed(0.0 if may_take else _POLL_SECONDS)
            close = self._close
            message = self._message()  # the last one before the close, if that is said
            self._heed(0.0)  # a hold that was said before the message
            if close is not None and (message is None or time.monotonic() > close[0]):
                tracking.removeHandler(self)  # what is missing at the end is told by the study's process
                return self._end(*close)
            may_take = message is not None and self._has_room and (not self._holds or time.monotonic() >= message.not_before)
            if may_take and message is not None:
                self._spools[0].take(message)
                self._num_ended += message.ends_run
                verb, arguments = message.open()
                getattr(self._tracker, verb)(*arguments)
            self._report()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning for the study's process, which shows it; called from any thread of the tracker."""
        self._warnings.put(record.getMessage())

    @property
    def _has_room(self) -> bool:
        return bool(getattr(self._tracker, "has_room", True))

    @property
    def _num_unwritten(self) -> int:
        return int(getattr(self._tracker, "num_unwritten", 0))

    def _message(self) -> Message | None:
        while (message := self._spools[0].read()) is None and len(self._spools) > 1:
            self._spools.popleft().close()
        return message

    def _heed(self, wait_seconds: float) -> None:
        while self._connection.poll(wait_seconds):
            verb, *arguments = self._connection.recv()
            wait_seconds = 0.0
            if verb == "hold":
                (self._holds,) = arguments
            elif verb == "spool":
                self._spools.append(Spool(descriptor=recv_handle(self._connection)))
            elif verb in ("prepare_model", "log_model"):
                if verb == "log_model":
                    _set_niceness(self._niceness_at_end)
                getattr(self._tracker, verb, lambda function: None)(*arguments)
            else:
                seconds, end = arguments
                self._holds, self._close = False, (time.monotonic() + seconds, end)
                _set_niceness(self._niceness_at_end)

    def _report(self) -> None:
        now, num_written = time.monotonic(), self._num_ended - self._num_unwritten
        if num_written != self._reported and now - self._reported_at >= _REPORT_EVERY_SECONDS:
            self._connection.send(("written", num_written))
            self._reported_at, self._reported = now, num_written
        while not self._warnings.empty():
            self._connection.send(("said", self._warnings.get()))

    def _end(self, ends_at: float, end: Mapping[str, Any]) -> tuple[int, bool]:
        num_skipped = 0
        while (message := self._message()) is not None:
            self._spools[0].take(message)
            num_skipped += message.ends_run
        if hasattr(self._tracker, "close_by"):
            self._tracker.close_by(ends_at)
        self._tracker.close(**end)
        return num_skipped + self._num_unwritten, bool(getattr(self._tracker, "lacks_end", False))
