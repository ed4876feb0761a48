"""The launcher: a process on each machine that starts the processes that train.

It has imported all that trainings need and has never trained. A new Python process takes seconds to
import torch; one that is forked from the launcher begins at once, and shares with it only what
imports leave. The launcher itself is started by ``exec``, not forked from the driver or Ray worker
that owns it: it has none of their threads and no CUDA context, which is why its children may train
on a GPU.

A client gets a process by connecting to the launcher's address: the new process answers on that
connection, and the launcher reports there how the process ended. A process is ended when its
connection closes, or by the kernel when the launcher ends; the processes that it has started end
with it, as one process group. The launcher ends when its owner is gone, however that ended.
"""

import contextlib
import ctypes
import errno
import json
import logging
import math
import multiprocessing
import os
import pkgutil
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Client, Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from autotune.config.schema import ClusterConfig
from autotune.errors import ClusterError, ConfigError
from autotune.execution.task import LOW_ON_MEMORY, ProcessExited, num_killed_for_memory
from autotune.training.main_thread import MainThread, in_thread
from autotune.training.preload import one_blas_thread, preload, usual_blas_threads

logger = logging.getLogger(__name__)

CHECK_TRAINING = "autotune.training.run:check_training"
"""What ``calling`` calls to make all parts of a training once."""
RAY_FOLDER = "r"
"""Folder of Ray's files within that of the launcher."""
RAY_MARK = "AUTOTUNE_RAY"
"""Environment variable by which the processes of a driver's Ray are known: the folder above."""
_STARTED_BY = "AUTOTUNE_STARTED_BY"
"""Environment variable with the id of the launcher's process that started the one that has it,
itself or through others."""
_LAUNCHED_BY = "AUTOTUNE_LAUNCHED_BY"
"""Environment variable with the folder of that launcher."""
_END_SECONDS = 10.0
"""Seconds that a process may take to end after its connection was closed, or a launcher to end its
processes; then it is killed."""
_CLEAN_UP_SECONDS = 5.0
"""Seconds of these in which a training function may clean up."""
_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from autotune.execution.launcher import serve
serve(int(sys.argv[1]), int(sys.argv[2]))
"""
_NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_MAX_FOLDER_BYTES = 70
"""Longest path of a temporary folder in which a socket is made: Linux takes 107 bytes as a
socket's path."""


class Launcher:
    """A launcher, as seen by the process that starts and owns it.

    Its process imports in the background; a client that connects meanwhile waits. One that is
    killed is started again, at the same address.

    Args:
        is_quiet: discard what the launcher and the processes that it starts print.
    """

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.folder = private_folder()
        """Folder for files that are to be gone with the owner, however that ends."""
        self.address = str(self.folder / "launcher")
        """Path of the socket that processes on this machine connect to, see ``TrainingProcess``."""
        self._listener = socket.socket(socket.AF_UNIX)  # of the process, also of its successors
        self._listener.bind(f"{self.address}.part")
        self._listener.listen()
        Path(f"{self.address}.part").rename(self.address)  # one that is there answers
        self._output = subprocess.DEVNULL if is_quiet else None
        self._start()
        in_thread("launcher", self._restart)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), self._listener.fileno()]
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and code
                [sys.executable, "-c", _MAIN, *map(str, fds), json.dumps(sys.path)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=one_blas_thread(os.environ),
                process_group=0,  # Ctrl-C is for the driver
            )
        self._connection = Connection(ours.detach())

    def _restart(self) -> None:
        """Start the process again whenever it is killed."""
        with self._listener:
            while self._process.wait() < 0 and not self._connection.closed:
                self._start()

    def close(self) -> None:
        """End the launcher and all processes that it has started."""
        self._connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _clean_up(self.folder)  # where the launcher was killed just now, else it is gone


def started_launcher(
    cluster: ClusterConfig, *, is_wanted: bool
) -> contextlib.AbstractContextManager[Launcher | None]:
    """Start a driver's launcher, which imports what trainings need meanwhile.

    None if they run elsewhere.
    """
    return (
        contextlib.closing(Launcher(is_quiet=True))
        if is_wanted and cluster.is_local
        else contextlib.nullcontext()
    )


def private_folder() -> Path:
    """Make a new folder for sockets, and for Ray's files, that no other user may open.

    It is in ``/tmp`` where the path in the temporary folder would be too long.

    Raises:
        ClusterError: the folder for temporary files takes none.
    """
    parent = os.environ.get("RAY_TMPDIR")
    if not parent:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > _MAX_FOLDER_BYTES:
            parent = "/tmp"  # noqa: S108  # ours is private
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        if len(os.fsencode(parent)) > _MAX_FOLDER_BYTES:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        for folder in {parent, tempfile.gettempdir()}:
            _delete_abandoned(Path(folder))
        return Path(tempfile.mkdtemp(prefix="autotune-", dir=parent))
    except OSError as error:
        raise ClusterError(
            f"cluster.address: local: {parent} takes no files ({error.strerror}); set RAY_TMPDIR to"
            " a writable folder of a short path"
        ) from error


def _delete_abandoned(parent: Path) -> None:
    """Delete the folders of launchers that were killed together with their owners, and those of
    commands whose process was.
    """
    for address in (*parent.glob("autotune-*/launcher"), *parent.glob("autotune-*/session")):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asked:
            if asked.connect_ex(str(address)) == errno.ECONNREFUSED:
                _clean_up(address.parent)


class TrainingProcess:
    """A process that a launcher has started, as seen by the process that asked for it.

    Args:
        address: path of the launcher's socket.
        environment: environment variables to set in the process, see ``rank_environment``.

    Raises:
        OSError: the launcher is gone.
    """

    is_gone = False
    """Whether the process is known to have ended."""
    host: str | None = None
    """Address of its machine; None for this one."""
    devices: Sequence[str] = ()
    """Ids of the GPUs that were reserved for it alone; empty if all ranks share those of their
    machine."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        self._connection = Client(address, family="AF_UNIX")
        self._connection.send(environment)

    def send(self, method: str, *arguments: Any) -> None:
        """Ask for ``begin``, ``follow`` or ``call``, or a method of the ``TaskRun`` that was begun,
        whose answer ``receive`` returns.
        """
        with contextlib.suppress(OSError):  # it has ended, which is the answer
            self._connection.send((method, *arguments))

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether an answer comes within so many seconds."""
        return self._connection.poll(seconds)

    def receive(self) -> Any:
        """The answer to the last request, or ``ProcessExited``.

        Raises:
            Exception: what the method raised.
        """
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            answer = ProcessExited(reason="the worker died: its launcher was ended")
        self.is_gone = self.is_gone or isinstance(answer, ProcessExited)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def call(self, method: str, *arguments: Any) -> Any:
        """Ask for a method as ``send`` does, and return its answer as ``receive`` does."""
        self.send(method, *arguments)
        return self.receive()

    def close(self) -> None:
        """End the process, and the training that it still runs, and wait until it is gone with
        all that it held on a device.
        """
        with contextlib.suppress(EOFError, OSError):
            with socket.socket(fileno=os.dup(self._connection.fileno())) as half:
                half.shutdown(socket.SHUT_WR)
            while self._connection.poll(_END_SECONDS) and not isinstance(
                self._connection.recv(), ProcessExited
            ):
                pass  # an answer that was on its way
        self._connection.close()
        self.is_gone = True


@contextlib.contextmanager
def calling(launcher: Launcher | None) -> Iterator[Callable[..., Any]]:
    """Yield a function that calls others, named like ``package.module:function``, in a process
    of the launcher's, so that this one need not import torch; in this process without a launcher.

    It raises what they raise, and a ConfigError if the process ended.
    """
    if launcher is None:
        yield call_by_name
        return
    process = TrainingProcess(launcher.address, {})

    def call(name: str, *arguments: Any) -> Any:
        answer = process.call("call", name, *arguments)
        if isinstance(answer, ProcessExited):
            raise ConfigError(f"{name.partition(':')[2]}: {answer.reason}")
        return answer

    with contextlib.closing(process):
        yield call


def call_by_name(name: str, *arguments: Any) -> Any:
    """Call a function named like ``package.module:function`` and return what it returns."""
    return pkgutil.resolve_name(name)(*arguments)


def serve(owner_fd: int, listener_fd: int) -> None:
    """Run a launcher in this process: start a process for each connection to its socket, until
    the owner's connection closes.

    The owner's folder is deleted here, too: an owner that was killed does not.
    """
    for number in _NOTICES:  # for the driver, though a job's are sent to all of its processes
        signal.signal(number, lambda *_: None)
    owner, listener = Connection(owner_fd), socket.socket(fileno=listener_fd)
    folder = Path(listener.getsockname()).parent
    os.environ[_LAUNCHED_BY] = str(folder)  # of what is started from now on
    _kill_marked(_LAUNCHED_BY, str(folder))  # commands of a process before this one, if killed
    try:
        preload()
        _Children(owner, listener).serve()
    finally:
        _clean_up(folder)


def _clean_up(folder: Path) -> None:
    """Delete an owner's folder, and end what is left of its Ray if it was killed."""
    for _ in range(3 if (folder / RAY_FOLDER).exists() else 0):  # some may just be starting
        left = [*_of_ray(folder)]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, 1.0)
    shutil.rmtree(folder, ignore_errors=True)


def _of_ray(folder: Path) -> Iterator[psutil.Process]:
    """The processes of the Ray whose files lie in an owner's folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            # a title, such as ray::DashboardAgent, is written over the environment
            is_titled = "".join(process.cmdline()).startswith("ray::")
            if process.environ().get(RAY_MARK) == str(folder) or (
                is_titled
                and any(Path(file.path).is_relative_to(folder) for file in process.open_files())
            ):
                yield process


@dataclass(kw_only=True, eq=False)
class _Child:
    process: BaseProcess
    connection: Connection
    gone: int
    """A file descriptor that becomes readable when the process has ended."""
    num_killed: int = field(default_factory=num_killed_for_memory)
    """Number of processes that the kernel had killed for memory before this one was started."""
    ends_by: float = math.inf
    """When the process is killed if it has not ended, on the monotonic clock."""


class _Children:
    """The processes that a launcher has started."""

    def __init__(self, owner: Connection, listener: socket.socket) -> None:
        self._owner, self._listener = owner, listener
        self._children: set[_Child] = set()
        self._acts: dict[int, Callable[[], object]] = {}
        """What is done once something happens to a file descriptor."""
        self._poll = select.poll()
        self._watch(owner.fileno(), select.POLLIN, owner.recv)  # EOFError: it is gone
        self._watch(listener.fileno(), select.POLLIN, self._start)

    def _watch(self, fd: int, events: int, act: Callable[[], object]) -> None:
        self._poll.register(fd, events)
        self._acts[fd] = act

    def _unwatch(self, *fds: int) -> None:
        for fd in fds:
            if self._acts.pop(fd, None) is not None:
                self._poll.unregister(fd)

    def serve(self) -> None:
        """Start processes and clean up after them, until the owner is gone."""
        try:
            while True:
                self._wait()
        except (EOFError, OSError):
            pass  # the owner is gone
        finally:
            self._unwatch(self._owner.fileno(), self._listener.fileno())
            for child in self._children:
                with (
                    contextlib.suppress(OSError),
                    socket.socket(fileno=os.dup(child.connection.fileno())) as half,
                ):
                    half.shutdown(socket.SHUT_RD)  # which the child sees
                self._let_end(child)
            while self._children:
                self._wait()

    def _wait(self) -> None:
        """Wait for what happens next, and act on it."""
        left = min((child.ends_by for child in self._children), default=math.inf)
        left -= time.monotonic()
        for fd, _ in self._poll.poll(max(0.0, 1000.0 * left) if math.isfinite(left) else None):
            if (act := self._acts.get(fd)) is not None:
                act()
        for child in self._children:
            if time.monotonic() >= child.ends_by:
                child.ends_by = math.inf
                _kill(child.process)

    def _let_end(self, child: _Child) -> None:
        """Let a child end by itself, which is told that its connection is closed; it is killed if
        that takes too long.
        """
        child.ends_by = min(child.ends_by, time.monotonic() + _CLEAN_UP_SECONDS)
        self._unwatch(child.connection.fileno())

    def _start(self) -> None:
        others = [self._owner, self._listener, *(child.connection for child in self._children)]
        connection = Connection(self._listener.accept()[0].detach())
        process = multiprocessing.get_context("fork").Process(
            target=_serve_requests, args=(connection, others, os.getpid())
        )
        try:
            process.start()
        except OSError:  # too little memory, or too many processes: the client sees the end
            logger.exception("no process can be started")
            connection.close()
            return
        assert process.pid is not None, "it was started"
        _lead_a_group(process.pid)
        child = _Child(process=process, connection=connection, gone=os.pidfd_open(process.pid))
        self._children.add(child)
        # only its end: messages there are for the child
        self._watch(connection.fileno(), select.POLLRDHUP, partial(self._let_end, child))
        self._watch(child.gone, select.POLLIN, partial(self._end, child))

    def _end(self, child: _Child) -> None:
        """Clean up after a child that has ended."""
        _kill(child.process)  # the processes that it has started
        child.process.join()
        if child.process.exitcode:
            _delete_abandoned(Path(tempfile.gettempdir()))  # a command's
        is_for_memory = (
            child.process.exitcode == -signal.SIGKILL and num_killed_for_memory() > child.num_killed
        )
        reason = f"the worker died: it {_ended_by(child.process.exitcode)}"
        with contextlib.suppress(OSError):
            child.connection.send(
                ProcessExited(
                    reason=f"{reason}{LOW_ON_MEMORY if is_for_memory else ''}",
                    exit_code=child.process.exitcode,
                    is_for_memory=is_for_memory,
                )
            )
        self._unwatch(child.connection.fileno(), child.gone)
        self._children.remove(child)
        child.connection.close()
        os.close(child.gone)


def _serve_requests(
    connection: Connection, others: Sequence[Connection | socket.socket], parent: int
) -> None:
    """Carry out the requests on a connection, in the process that was started for it, until it is
    closed: one training after another, as its first rank (``begin``) or another one (``follow``),
    or calls of functions.
    """
    for number in _NOTICES:
        signal.signal(number, signal.SIG_DFL)
    _lead_a_group(0)
    _die_with(parent)
    for other in others:
        other.close()
    with contextlib.suppress(EOFError, OSError):
        os.environ.update(connection.recv(), **{_STARTED_BY: str(os.getpid())})
        usual_blas_threads()
        # imports torch
        from autotune.execution.task_run import TaskRun, follow_task  # noqa: PLC0415

        main_thread = MainThread()
        in_thread("closed", _once_closed, connection, main_thread.end)
        functions = {"begin": TaskRun, "call": call_by_name, "follow": follow_task}
        main_thread.run(_answer_requests, connection, main_thread.start, functions)


def _answer_requests(
    connection: Connection,
    start: Callable[..., "Future[Any]"],
    functions: Mapping[str, Callable[..., Any]],
) -> None:
    """Answer the requests on a connection.

    Args:
        start: starts a call in the main thread, where all is trained.
        functions: what is called by the name of a request, or makes the object whose methods are.
    """
    run: Any = None
    has_main_thread = True
    while True:
        method, *arguments = connection.recv()
        answer: Any
        try:
            if method == "begin":
                # else a user's function has it, from the first report to the last
                has_main_thread = arguments[0].config.training is None
                run = functions[method](*arguments)
                answer = run.port
            elif (function := functions.get(method)) is None and not has_main_thread:
                answer = getattr(run, method)(*arguments)
            else:
                answer = start(function or getattr(run, method), *arguments).result()
        except Exception as error:  # noqa: BLE001  # raised again by TrainingProcess.receive
            answer = error
        connection.send(answer)


def _once_closed(connection: Connection, act: Callable[[], None]) -> None:
    """Act once the other end of a connection is closed."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    poll.poll()
    act()


def _die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent had ended before
        os._exit(1)


_PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""


def _lead_a_group(process: int) -> None:
    """Make a process the leader of a group that its children will join.

    Called in the process and in its parent, in either order.
    """
    with contextlib.suppress(OSError):
        os.setpgid(process, process)


def _kill(process: BaseProcess) -> None:
    """Kill a process, all others of its process group, and what it has started in further ones, as
    torchrun starts its ranks, if any are still alive.
    """
    assert process.pid, "it was started"
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    _kill_marked(_STARTED_BY, str(process.pid))


def _kill_marked(variable: str, value: str) -> None:
    """Kill the processes that were started with this value of an environment variable."""
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if other.environ().get(variable) == value:
                other.kill()


def _ended_by(exit_code: int | None) -> str:
    """Describe how a process ended by its exit code, which Python gives as a negative signal
    number if a signal ended the process.
    """
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
