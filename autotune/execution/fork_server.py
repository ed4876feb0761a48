"""A process that forks one process for each training or worker: it has imported all that they need, and has never trained.

A new Python process takes seconds to import torch; a forked one begins at once, and shares with its parent only what imports leave.
The fork server is a new process all the same (started by ``exec``, not a fork of the driver or the Ray worker that it belongs to): it
has no threads of theirs and no CUDA context, which is why its children may train on a GPU.

Whoever knows its address has a process by connecting: the one that is forked answers on that connection, and the fork server says
there how it ended. Who ends with whom: a forked process with its connection, or with the fork server, by the kernel's own hand; what it
has started itself with it, by its process group; the fork server when its owner is gone, whatever became of that.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.execution.task_run import TaskRun, TrialTask, WorkerReport, how_it_died
from autotune.training.preload import fork_fault, one_blas_thread, preload, usual_blas_threads

LOOK_EVERY_SECONDS = 0.2
"""For an interrupt, while waiting for a training."""
_END_SECONDS = 10.0
"""What a training's process may take to end once the training has, and a fork server to end what it has forked; then it is killed."""
_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
import socket
from multiprocessing.connection import Connection
from autotune.execution.fork_server import serve
serve(Connection(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])))
"""
CAN_FORK = sys.platform == "linux"
"""Elsewhere torch does not stand a fork, and no process can be tied to its parent."""


@dataclass(frozen=True, kw_only=True)
class Died:
    """In place of a training's last report: its process was gone before it said how the training ended."""

    reason: str
    """By what the process ended."""


class ForkServer:
    """A fork server as the process that started it sees it.

    The process is started at once and imports in the background; ``fault`` waits for it.

    Args:
        is_quiet: what is printed in it and in what it forks goes nowhere.
    """

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._folder = tempfile.mkdtemp(prefix="autotune-")  # nobody else may open it
        self.address = str(Path(self._folder) / "fork_server")
        """Of processes on this machine that want one forked, see ``ForkedProcess``."""
        ours, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            fds = [theirs.fileno(), listener.fileno()]
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and code
                [sys.executable, "-c", _MAIN, *map(str, fds), json.dumps(sys.path)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if is_quiet else None,
                stderr=subprocess.DEVNULL if is_quiet else None,
                env=one_blas_thread(os.environ),
                process_group=0,  # Ctrl-C is for the driver
            )
        self._connection = Connection(ours.detach())
        self._is_ready = False
        self._checks: ForkedProcess | None = None

    def fault(self, interrupt: Callable[[], bool] = lambda: False) -> str | None:
        """Why no process can be forked, once it is ready; None where they can, and once ``interrupt`` says so."""
        if self._process.poll() is not None:
            return f"it {_ended_by(self._process.returncode)}"
        try:
            while not self._is_ready and not interrupt():
                if self._connection.poll(LOOK_EVERY_SECONDS):
                    fault: str | None = self._connection.recv()
                    if fault is not None:
                        return fault
                    self._is_ready = True
        except (EOFError, OSError):
            return f"it {_ended_by(self._process.wait())}"
        return None

    def train(self, task: TrialTask, interrupt: Callable[[], bool] = lambda: False) -> Iterator[WorkerReport | Died]:
        """Fork a process that trains a task: all reports as they come, and the last one, or that it died, when the process is gone.

        Fewer come once ``interrupt`` says so; the process ends then.
        """
        try:
            process = ForkedProcess(self.address, share_of(task))
        except OSError:
            yield Died(reason=f"the worker died: its fork server {_ended_by(self._process.wait())}")
            return
        with contextlib.closing(process):
            yield from process.train(task, interrupt)

    def check(self, config: TrialConfig) -> None:
        """``training.run.check_training`` in a forked process, so that the driver need not import what trainings do.

        Raises:
            ConfigError: as there, or its process ended.
            DataError: as there.
        """
        if self.fault() is not None:
            check_in_this_process(config)
            return
        if self._checks is None:
            self._checks = ForkedProcess(self.address, {})
        said = self._checks.call("check", config)
        if isinstance(said, Died):
            raise ConfigError(f"the parts of a configuration cannot be made: {said.reason}")

    def close(self) -> None:
        """End the process, and with it what it has forked."""
        self._connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class ForkedProcess:
    """A process forked by a fork server, as the one that asked for it sees it.

    Args:
        address: of the fork server.
        share: environment variables of the process, see ``share_of``.

    Raises:
        OSError: the fork server is gone.
    """

    def __init__(self, address: str, share: Mapping[str, str]) -> None:
        self._connection = Client(address, family="AF_UNIX")
        self._connection.send(dict(share))
        self.is_gone = False
        """It has ended by itself."""

    def close(self) -> None:
        """End it, and with it whatever it still trains."""
        self._connection.close()

    def train(self, task: TrialTask, interrupt: Callable[[], bool]) -> Iterator[WorkerReport | Died]:
        """See ``ForkServer.train``; the process serves for nothing else then."""
        last: WorkerReport | None = None
        try:
            self._connection.send(("train", task))
            while last is None:
                if not self._says_something(interrupt):
                    return
                said: WorkerReport | Died = self._connection.recv()
                if isinstance(said, Died):
                    yield said
                    return
                if said.outcome is None:
                    yield said
                else:
                    last = said
            if self._connection.poll(_END_SECONDS):
                self._connection.recv()
        except (EOFError, OSError):
            if last is None:
                yield Died(reason=_SERVER_DIED)
        if last is not None:
            self._connection.close()
            yield last

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of ``_Trials`` returns in the process, ``Died`` where that ended.

        Raises:
            Exception: what the method raised.
        """
        try:
            self._connection.send((method, *arguments))
            said = self._connection.recv()
        except (EOFError, OSError):
            said = Died(reason=_SERVER_DIED)
        self.is_gone = self.is_gone or isinstance(said, Died)
        if isinstance(said, BaseException):
            raise said
        return said

    def _says_something(self, interrupt: Callable[[], bool]) -> bool:
        """Wait until it does, or ``interrupt`` says that nobody wants to know any more."""
        while not self._connection.poll(LOOK_EVERY_SECONDS):
            if interrupt():
                return False
        return True


class ForkedRun:
    """One training in a forked process, as ``TaskRun`` is one in this process; further ones may follow it there."""

    num_workers = 1

    def __init__(self, process: ForkedProcess, task: TrialTask) -> None:
        self._process, self._task = process, task
        self._began_at = time.time()
        self._process.call("begin", task)

    def next_report(self) -> WorkerReport:
        """Train to the next evaluation, or to the training's end; that its process ended is an end, too."""
        said = self._process.call("next_report")
        if isinstance(said, Died):
            outcome, why = how_it_died(self._task, seconds=time.time() - self._began_at, reason=said.reason)
            return WorkerReport(evaluation=None, outcome=outcome, error=why)
        report: WorkerReport = said
        return report

    def keep(self) -> None:
        """Write the training's state to the task's folder, for another process to go on from.

        Raises:
            DataError: it cannot be written.
        """
        self._process.call("keep")

    def close(self) -> None:
        """End the training where it stands and free what it holds."""
        self._process.call("close")


_SERVER_DIED = "the worker died: its fork server was ended"


def share_of(task: TrialTask) -> dict[str, str]:
    """What Ray lets an actor of the task's size see, such as this process where it is one: GPUs, and as many OpenMP threads as CPUs."""
    share = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(task.num_cpus))}
    if task.num_gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        own = visible[: task.num_gpus] if visible[0] else [str(index) for index in range(task.num_gpus)]
        share["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return share


def serve(owner: Connection, listener: socket.socket) -> None:
    """Fork a process for each connection that comes, until the owner's end of its own is gone.

    The owner is sent why this process cannot be forked, None where it can, as soon as all is imported.
    """
    preload()
    with contextlib.suppress(EOFError, OSError):
        owner.send(fork_fault())
        _Children(owner, listener).serve()


@dataclass(frozen=True, kw_only=True)
class _Child:
    process: BaseProcess
    connection: Connection
    gone: int
    """A file descriptor that can be read once the process has ended."""
    num_killed: int
    """Processes that the kernel had killed for memory when it was forked."""


class _Children:
    """The processes that a fork server has forked."""

    def __init__(self, owner: Connection, listener: socket.socket) -> None:
        self._owner, self._listener = owner, listener
        self._children: dict[int, _Child] = {}
        """By the file descriptors of each: that of its connection, and that of its end."""
        self._poll = select.poll()
        self._poll.register(owner.fileno(), select.POLLIN)
        self._poll.register(listener.fileno(), select.POLLIN)

    def serve(self) -> None:
        """Fork and bury, until the owner is gone."""
        try:
            while True:
                for fd, _ in self._poll.poll():
                    if fd == self._owner.fileno():  # it says nothing: so it is gone
                        return
                    if fd == self._listener.fileno():
                        self._fork()
                    elif (child := self._children.get(fd)) is not None:
                        self._end(child, is_gone=fd == child.gone)
        finally:
            for child in set(self._children.values()):
                _kill(child.process)

    def _fork(self) -> None:
        connection = Connection(self._listener.accept()[0].detach())
        others = [self._owner, self._listener, *(each.connection for each in self._children.values())]
        num_killed = _num_killed_for_memory()
        process = multiprocessing.get_context("fork").Process(target=_serve_trainings, args=(connection, others, os.getpid()))
        process.start()
        assert process.pid is not None, "it was started"
        _lead_a_group(process.pid)
        child = _Child(process=process, connection=connection, gone=os.pidfd_open(process.pid), num_killed=num_killed)
        self._children |= {connection.fileno(): child, child.gone: child}
        self._poll.register(connection.fileno(), select.POLLRDHUP)  # what is said there is said to the child
        self._poll.register(child.gone, select.POLLIN)

    def _end(self, child: _Child, *, is_gone: bool) -> None:
        """A process has ended, or nobody wants it any more."""
        _kill(child.process)  # with what it has started
        if not is_gone:
            self._poll.unregister(child.connection.fileno())
            return
        child.process.join()
        was_low = _num_killed_for_memory() > child.num_killed and child.process.exitcode == -signal.SIGKILL
        last_word = ", while this machine was low on memory" if was_low else ""
        with contextlib.suppress(OSError):
            child.connection.send(Died(reason=f"the worker died: it {_ended_by(child.process.exitcode)}{last_word}"))
        for fd in (child.connection.fileno(), child.gone):
            with contextlib.suppress(KeyError):
                self._poll.unregister(fd)
            del self._children[fd]
        child.connection.close()
        os.close(child.gone)


def _serve_trainings(connection: Connection, others: list[Connection | socket.socket], parent: int) -> None:
    """Train what is asked for on the connection, in this process, which was forked for it."""
    _lead_a_group(0)
    _die_with(parent)
    for each in others:
        each.close()
    share: Mapping[str, str] = connection.recv()
    os.environ.update(share)
    usual_blas_threads()
    trials = _Trials()
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, *arguments = connection.recv()
            if method == "train":
                for report in trials.train(*arguments):
                    connection.send(report)
                return
            connection.send(_said(getattr(trials, method), *arguments))


def _said(method: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return method(*arguments)
    except Exception as error:  # noqa: BLE001  # whoever called it meets it
        return error


def check_in_this_process(config: TrialConfig) -> None:
    """``training.run.check_training``, which imports what trainings do."""
    from autotune.training.run import check_training  # noqa: PLC0415  # imports torch

    check_training(config)


class _Trials:
    """One training after another in a forked process."""

    def __init__(self) -> None:
        self._run: TaskRun | None = None

    def check(self, config: TrialConfig) -> None:
        check_in_this_process(config)

    def begin(self, task: TrialTask) -> None:
        self._run = TaskRun(task)

    def next_report(self) -> WorkerReport:
        assert self._run is not None, "it was begun"
        return self._run.next_report()

    def keep(self) -> None:
        assert self._run is not None, "it was begun"
        self._run.keep()

    def close(self) -> None:
        if self._run is not None:
            self._run.close()

    def train(self, task: TrialTask) -> Iterator[WorkerReport]:
        """All reports of one training; nothing of it is left when the last one comes."""
        self.begin(task)
        report = self.next_report()
        while report.outcome is None:
            yield report
            report = self.next_report()
        self.close()
        yield report


def _die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


_PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""


def _lead_a_group(process: int) -> None:
    """Make a process group of a process and of all that it will start; both the process and its parent do, whoever comes first."""
    with contextlib.suppress(OSError):
        os.setpgid(process, process)


def _kill(process: BaseProcess) -> None:
    """Kill a process with its group; what of it has ended is left as it is."""
    with contextlib.suppress(ProcessLookupError):
        assert process.pid, "it was started"
        os.killpg(process.pid, signal.SIGKILL)


def _ended_by(exit_code: int | None) -> str:
    """How a process ended, as Python tells it: the negative number of a signal, or what it ended itself with."""
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def _num_killed_for_memory() -> int:
    """Processes that this machine's kernel has killed because memory ran out; 0 where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="utf-8").splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0
