"""The fork server: a process that has imported everything trainings need, has never trained, and
forks a process for each client.

A new Python process takes seconds to import torch; a forked one begins at once, and shares with its
parent only what imports leave. The fork server itself is started by ``exec``, not forked from the
driver or Ray worker that owns it: it has none of their threads and no CUDA context, which is why
its children may train on a GPU.

A client gets a process by connecting to the fork server's address: the forked process answers on
that connection, and the fork server reports there how the process ended. A forked process is ended
when its connection closes, or by the kernel when the fork server ends; the processes that it has
started end with it, as one process group. The fork server ends when its owner is gone, however that
ended.

What a user's training function imports from libraries, the fork server imports too, once a process
has told it, and before it forks the next one: that one then need not.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from autotune.config.schema import ClusterConfig, TrialConfig
from autotune.errors import ConfigError
from autotune.execution.death import LOW_ON_MEMORY, SERVER_ENDED, num_killed_for_memory
from autotune.execution.task_run import TaskRun, TrialTask, WorkerReport, report_of_death
from autotune.execution.watch import is_left
from autotune.files import replace_file
from autotune.training.capabilities import (
    Capabilities,
    visible_devices,
    visible_devices_environment,
)
from autotune.training.preload import (
    fork_fault,
    imported_libraries,
    one_blas_thread,
    preload,
    usual_blas_threads,
)

POLL_SECONDS = 0.2
"""Seconds between two looks for an interrupt while waiting for a training."""
_END_SECONDS = 10.0
"""Seconds that a process may take to end after its training, or a fork server to end its
processes; then it is killed."""
_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from multiprocessing.connection import Connection
from autotune.execution.fork_server import serve
serve(Connection(int(sys.argv[1])), sys.argv[2])
"""
_NOTES = "libraries-*.json"
"""Files beside the fork server's socket with the names of libraries that trainings imported."""
_IMPORT_SECONDS = 120.0
"""Longest wait for a process that tries to import them."""
CAN_FORK = sys.platform == "linux"
"""Whether fork servers work on this system: outside Linux torch does not survive a fork, and no
process can be tied to its parent."""

_MAX_FOLDER_BYTES = 70
"""Longest path of a temporary folder in which a socket is made: Linux takes 107 bytes as a
socket's path."""


@dataclass(frozen=True, kw_only=True)
class Died:
    """Sent in place of a training's last report if its process ended before it reported how the
    training ended.
    """

    reason: str
    """How the process ended, such as by which signal."""


def _new_address() -> Path:
    """Path of a socket in a temporary folder that is not there yet.

    In ``/tmp`` where the path in another would be too long.
    """
    temporary = tempfile.gettempdir()
    is_short = len(os.fsencode(temporary)) <= _MAX_FOLDER_BYTES
    folder = temporary if is_short else "/tmp"  # noqa: S108  # a name that is taken is refused
    return Path(folder, f"autotune-{secrets.token_hex(8)}", "fork_server")


class ForkServer:
    """A fork server, as seen by the process that starts and owns it.

    The fork server's process is started at once and imports in the background; ``fault`` waits
    until it is ready.

    Args:
        is_quiet: discard what the fork server and its forked processes print.
    """

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.address = str(_new_address())
        """Path of the socket that processes on this machine connect to for a forked process, see
        ``ForkedProcess``; it is there when ``fault`` has returned."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and code
                [
                    sys.executable,
                    "-c",
                    _MAIN,
                    str(theirs.fileno()),
                    self.address,
                    json.dumps(sys.path),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if is_quiet else None,
                stderr=subprocess.DEVNULL if is_quiet else None,
                env=one_blas_thread(os.environ),
                process_group=0,  # Ctrl-C is for the driver
            )
        self._connection = Connection(ours.detach())
        self._asking = threading.RLock()
        """Held by the one thread at a time that asks the fork server's process: trainings side
        by side have a thread each."""
        self._is_ready = False
        self._fault: str | None = None
        self._checks: ForkedProcess | None = None

    def fault(self, interrupt: Callable[[], bool] = lambda: False) -> str | None:
        """Wait until the fork server is ready and return why it cannot fork.

        None if it can, or once ``interrupt`` returns true.
        """
        if self._is_ready and self._process.poll() is not None:
            return f"it {_ended_by(self._process.returncode)}"
        with self._asking:
            try:
                while not self._is_ready and self._fault is None and not interrupt():
                    if self._connection.poll(POLL_SECONDS):
                        self._fault = self._connection.recv()
                        self._is_ready = self._fault is None
            except (EOFError, OSError):
                return f"it {_ended_by(self._process.wait())}"
            return self._fault

    def train(
        self,
        task: TrialTask,
        interrupt: Callable[[], bool] = lambda: False,
        *,
        devices: Sequence[str] | None = None,
    ) -> Iterator[WorkerReport | Died]:
        """Train a task in a forked process and yield its reports.

        The last report, or ``Died``, comes when the process is gone.

        Once ``interrupt`` returns true, the process is ended and no further report comes.

        Args:
            devices: ids of the GPUs that the process sees; None for as many as the task takes of
                those that this process sees.
        """
        try:
            if self.fault(interrupt) is None and not self._is_ready:
                return  # interrupted
            process = ForkedProcess(self.address, resource_environment(task, devices))
        except (EOFError, OSError):
            yield Died(reason=SERVER_ENDED)
            return
        with contextlib.closing(process):
            yield from process.train(task, interrupt)

    def capabilities(self) -> Capabilities:
        """Capabilities of this machine, found out in a forked process where possible: the driver
        then need not import torch.

        Raises:
            ConfigError: the forked process ended.
        """
        return cast(Capabilities, self._found_out("capabilities", capabilities_in_this_process))

    def machine(self) -> dict[str, Any]:
        """The record of this machine, found out as ``capabilities`` are.

        Raises:
            ConfigError: the forked process ended.
        """
        return cast(dict[str, Any], self._found_out("machine", machine_in_this_process))

    def _found_out(self, what: str, in_this_process: Callable[[], object]) -> object:
        if self.fault() is not None:
            return in_this_process()
        try:
            process = ForkedProcess(self.address, {})
        except (EOFError, OSError):  # it has ended since
            return in_this_process()
        with contextlib.closing(process):
            answer = process.call(what)
        if isinstance(answer, Died):
            raise ConfigError(f"what this machine has cannot be found out: {answer.reason}")
        return answer

    def check(self, config: TrialConfig) -> None:
        """Run ``training.run.check_training``, in a forked process where possible: the driver then
        need not import what trainings import.

        Raises:
            ConfigError: a component is not allowed, not there, or refuses its values; or the forked
                process ended.
            DataError: the data set is missing, unreadable or of the wrong form.
        """
        if self.fault() is not None:
            check_in_this_process(config)
            return
        if self._checks is None:
            self._checks = ForkedProcess(self.address, {})
        answer = self._checks.call("check", config)
        if isinstance(answer, Died):
            raise ConfigError(f"the parts of a configuration cannot be made: {answer.reason}")

    def close(self) -> None:
        """End the fork server and all processes that it has forked."""
        self._connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(Path(self.address).parent, ignore_errors=True)


class ForkedProcess:
    """A process forked by a fork server, as seen by the process that asked for it.

    Args:
        address: path of the fork server's socket.
        share: environment variables to set in the forked process, see ``resource_environment``.

    Raises:
        OSError: the fork server is gone.
    """

    def __init__(self, address: str, share: Mapping[str, str]) -> None:
        self._connection = Client(address, family="AF_UNIX")
        self._connection.send(dict(share))
        self.is_gone = False
        """Whether the process has ended by itself."""

    def close(self) -> None:
        """End the process, and the training that it still runs, and wait until it is gone with
        all that it held on a device.
        """
        with contextlib.suppress(EOFError, OSError):
            with socket.socket(fileno=os.dup(self._connection.fileno())) as half:
                half.shutdown(socket.SHUT_WR)
            while self._connection.poll(_END_SECONDS) and not isinstance(
                self._connection.recv(), Died
            ):
                pass  # a message that was on its way
        self._connection.close()

    def train(
        self, task: TrialTask, interrupt: Callable[[], bool]
    ) -> Iterator[WorkerReport | Died]:
        """Train a task as ``ForkServer.train`` does.

        The process ends with it and trains nothing else.
        """
        last: WorkerReport | None = None
        try:
            self._connection.send(("train", task))
            while last is None:
                if not self._wait_for_message(interrupt):
                    return
                report: WorkerReport | Died = self._connection.recv()
                if isinstance(report, Died):
                    yield report
                    return
                if report.outcome is None:
                    yield report
                else:
                    last = report
            if self._connection.poll(_END_SECONDS):
                self._connection.recv()
        except (EOFError, OSError):
            if last is None:
                yield Died(reason=SERVER_ENDED)
        if last is not None:
            self._connection.close()
            yield last

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of ``_Trials`` in the process and return its result, or ``Died`` if the
        process ended.

        Raises:
            Exception: what the method raised.
        """
        try:
            self._connection.send((method, *arguments))
            answer = self._connection.recv()
        except (EOFError, OSError):
            answer = Died(reason=SERVER_ENDED)
        self.is_gone = self.is_gone or isinstance(answer, Died)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _wait_for_message(self, interrupt: Callable[[], bool]) -> bool:
        """Wait for a message from the process; False once ``interrupt`` returns true."""
        while not self._connection.poll(POLL_SECONDS):
            if interrupt():
                return False
        return True


class ForkedRun:
    """One training in a forked process, with the interface of ``TaskRun``.

    The process may run further trainings afterwards.
    """

    num_workers = 1

    def __init__(self, process: ForkedProcess, task: TrialTask) -> None:
        self._process, self._task = process, task
        self._began_at = time.time()
        self._process.call("begin", task)

    def next_report(self) -> WorkerReport:
        """Train to the next evaluation or to the training's end.

        If the process died, the report says so.
        """
        report: WorkerReport | Died = self._process.call("next_report")
        if isinstance(report, Died):
            return report_of_death(
                self._task, seconds=time.time() - self._began_at, reason=report.reason
            )
        return report

    def keep(self) -> None:
        """Write the training's state to the task's state folder, for another process to continue
        from.

        Raises:
            DataError: the state cannot be written.
        """
        self._process.call("keep")

    def close(self) -> None:
        """End the training where it stands and free its resources."""
        self._process.call("close")


def started_fork_server(
    cluster: ClusterConfig, *, is_wanted: bool = True
) -> contextlib.AbstractContextManager[ForkServer | None]:
    """Start a driver's fork server, which imports what trainings need meanwhile.

    None if they run elsewhere, or this system cannot fork.
    """
    return (
        contextlib.closing(ForkServer(is_quiet=True))
        if is_wanted and CAN_FORK and cluster.is_local
        else contextlib.nullcontext()
    )


def resource_environment(task: TrialTask, devices: Sequence[str] | None = None) -> dict[str, str]:
    """Environment variables as Ray sets them for an actor of the task's size: its GPUs, and as many
    OpenMP threads as CPUs.

    Args:
        devices: ids of the GPUs; None for the first of those that this process sees, in a Ray
            worker those that Ray gave it.
    """
    gpus = visible_devices(task.num_gpus) if devices is None else devices
    share = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(task.num_cpus))}
    return share | (visible_devices_environment(gpus) if task.num_gpus else {})


def serve(owner: Connection, address: str) -> None:
    """Run the fork server in this process: fork a process for each connection to its socket, until
    the owner's connection closes.

    Once everything is imported, the owner is sent the reason why this process cannot be forked, or
    None if it can. The socket's folder is made and deleted here: an owner that was killed would not
    delete it.

    Args:
        address: path of the socket; its folder is made here, and no other user may open it.
    """
    folder = Path(address).parent

    def end_if_left() -> None:
        if is_left(owner):
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)  # without waiting for the imports

    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        with contextlib.suppress(OSError):
            owner.send(f"{folder.parent} takes no files ({error.strerror})")
        return
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            preload(check=end_if_left)
            with contextlib.suppress(EOFError, OSError):
                owner.send(fork_fault())
                _Children(owner, listener).serve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(kw_only=True, eq=False)
class _Child:
    process: BaseProcess
    connection: Connection
    gone: int
    """A pidfd: a file descriptor that becomes readable when the process has ended."""
    num_killed: int = field(default_factory=num_killed_for_memory)
    """Number of processes that the kernel had killed for memory before this one was forked."""


class _Children:
    """The processes that a fork server has forked."""

    def __init__(self, owner: Connection, listener: socket.socket) -> None:
        self._owner, self._listener = owner, listener
        self._notes = Path(listener.getsockname()).parent
        self._tried = set(sys.modules)
        """Names of modules that are imported, or could not be."""
        self._children: dict[int, _Child] = {}
        """Each child twice, by both of its file descriptors: that of its connection and its
        pidfd."""
        self._poll = select.poll()
        self._poll.register(owner.fileno(), select.POLLIN)
        self._poll.register(listener.fileno(), select.POLLIN)

    def serve(self) -> None:
        """Fork processes and clean up after them, until the owner is gone."""
        try:
            while True:
                for fd, _ in self._poll.poll():
                    if fd == self._owner.fileno():
                        self._owner.recv()  # EOFError: it is gone
                    if fd == self._listener.fileno():
                        self._fork()
                    elif (child := self._children.get(fd)) is not None:
                        self._end(child, is_gone=fd == child.gone)
        except (EOFError, OSError):
            pass  # the owner is gone
        finally:
            for child in set(self._children.values()):
                _kill(child.process)

    def _import_libraries(self) -> None:
        """Import what trainings have noted, unless a process that tries it could then not be
        forked: libraries may start threads.
        """
        names: dict[str, None] = {}
        for note in self._notes.glob(_NOTES):
            names |= dict.fromkeys(
                name
                for name in json.loads(note.read_text(encoding="utf-8"))
                if name not in self._tried
            )
            note.unlink()
        if not names:
            return
        self._tried |= names.keys()
        attempt = multiprocessing.get_context("fork").Process(
            target=_try_to_import, args=([*names], os.getpid())
        )
        attempt.start()
        attempt.join(_IMPORT_SECONDS)
        if attempt.exitcode == 0:
            preload([*names])
        elif attempt.exitcode is None:
            _kill(attempt)

    def _fork(self) -> None:
        self._import_libraries()
        connection = Connection(self._listener.accept()[0].detach())
        others = [
            self._owner,
            self._listener,
            *(child.connection for child in self._children.values()),
        ]
        arguments = (connection, others, os.getpid(), self._notes)
        process = multiprocessing.get_context("fork").Process(
            target=_serve_trainings, args=arguments
        )
        process.start()
        assert process.pid is not None, "it was started"
        _lead_a_group(process.pid)
        child = _Child(process=process, connection=connection, gone=os.pidfd_open(process.pid))
        self._children |= {connection.fileno(): child, child.gone: child}
        # only its end: messages there are for the child
        self._poll.register(connection.fileno(), select.POLLRDHUP)
        self._poll.register(child.gone, select.POLLIN)

    def _end(self, child: _Child, *, is_gone: bool) -> None:
        """Clean up after a child that has ended, or kill one whose client has closed the
        connection.
        """
        _kill(child.process)  # and the processes that it has started
        if not is_gone:
            self._poll.unregister(child.connection.fileno())
            return
        child.process.join()
        is_for_memory = (
            child.process.exitcode == -signal.SIGKILL and num_killed_for_memory() > child.num_killed
        )
        reason = (
            "the worker died: it"
            f" {_ended_by(child.process.exitcode)}{LOW_ON_MEMORY if is_for_memory else ''}"
        )
        with contextlib.suppress(OSError):
            child.connection.send(Died(reason=reason))
        for fd in (child.connection.fileno(), child.gone):
            with contextlib.suppress(KeyError):
                self._poll.unregister(fd)
            del self._children[fd]
        child.connection.close()
        os.close(child.gone)


def _try_to_import(names: Sequence[str], parent: int) -> None:
    """Import libraries in a forked process, which ends with 0 if it could be forked afterwards."""
    _lead_a_group(0)
    _die_with(parent)
    preload(names)
    os._exit(0 if fork_fault() is None else 1)


def _serve_trainings(
    connection: Connection, others: list[Connection | socket.socket], parent: int, notes: Path
) -> None:
    """Carry out the requests on a connection.

    Runs in the process that was forked for that connection.
    """
    _lead_a_group(0)
    _die_with(parent)
    for other in others:
        other.close()
    share: Mapping[str, str] = connection.recv()
    os.environ.update(share)
    usual_blas_threads()
    trials = _Trials(notes)
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, *arguments = connection.recv()
            if method == "train":
                for report in trials.train(*arguments):
                    connection.send(report)
                return
            connection.send(_result_or_error(getattr(trials, method), *arguments))


def _result_or_error(method: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return method(*arguments)
    except Exception as error:  # noqa: BLE001  # raised again in the client, by ForkedProcess.call
        return error


def capabilities_in_this_process() -> Capabilities:
    """Return ``training.device.local_capabilities()`` of this process, which then imports torch."""
    from autotune.training.device import local_capabilities  # noqa: PLC0415  # imports torch

    return local_capabilities()


def machine_in_this_process() -> dict[str, Any]:
    """Return ``training.diagnosis.this_machine()`` of this process, which then imports torch."""
    from autotune.training.diagnosis import this_machine  # noqa: PLC0415  # imports torch

    return this_machine()


def check_in_this_process(config: TrialConfig) -> None:
    """Run ``training.run.check_training`` in this process, which then imports what trainings
    import.
    """
    from autotune.training.run import check_training  # noqa: PLC0415  # imports torch

    check_training(config)


class _Trials:
    """The trainings of a forked process, one after another.

    Its methods are called by ``ForkedProcess.call``.
    """

    def __init__(self, notes: Path) -> None:
        self._run: TaskRun | None = None
        self._note: Path | None = notes / _NOTES.replace("*", str(os.getpid()))
        """File for the names of the libraries that a training function imports; None once it is
        written."""
        self._imported = frozenset(sys.modules)
        self._is_own = False
        """Whether the training is a function of the user's own."""

    def capabilities(self) -> Capabilities:
        return capabilities_in_this_process()

    def machine(self) -> dict[str, Any]:
        return machine_in_this_process()

    def check(self, config: TrialConfig) -> None:
        check_in_this_process(config)

    def begin(self, task: TrialTask) -> None:
        self._is_own = task.config.training is not None
        self._run = TaskRun(task)

    def next_report(self) -> WorkerReport:
        assert self._run is not None, "it was begun"
        report = self._run.next_report()
        if self._note is not None and self._is_own and report.evaluation is not None:
            replace_file(self._note, json.dumps(imported_libraries(self._imported)))
            self._note = None
        return report

    def keep(self) -> None:
        assert self._run is not None, "it was begun"
        self._run.keep()

    def close(self) -> None:
        if self._run is not None:
            self._run.close()

    def train(self, task: TrialTask) -> Iterator[WorkerReport]:
        """Yield all reports of one training; its resources are freed before the last report."""
        self.begin(task)
        report = self.next_report()
        while report.outcome is None:
            yield report
            report = self.next_report()
        self.close()
        yield report


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
    """Kill a process and all others of its process group, if any are still alive."""
    with contextlib.suppress(ProcessLookupError):
        assert process.pid, "it was started"
        os.killpg(process.pid, signal.SIGKILL)


def _ended_by(exit_code: int | None) -> str:
    """Describe how a process ended by its exit code, which Python gives as a negative signal
    number if a signal ended the process.
    """
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
