"""A process that forks one process for each training: it has imported all that they need, and has never trained.

A new Python process takes seconds to import torch; a forked one begins at once, and shares with its parent only what imports leave.
The fork server is a new process all the same (started by ``exec``, not a fork of the Ray worker that it belongs to): it has no threads
of Ray's and no CUDA context, which is why its children may train on a GPU.

Who ends with whom: the fork server when the other end of its connection is gone, whatever became of the Ray worker; a training with the
fork server, by the kernel's own hand; what a training has started itself with the training, by its process group.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from autotune.execution.task_run import TaskRun, TrialTask, WorkerReport
from autotune.training.preload import fork_fault, one_blas_thread, preload, usual_blas_threads

_END_SECONDS = 10.0
"""What a training's process may take to end once the training has; then it is killed."""
_LOOK_EVERY_SECONDS = 0.2
"""For an interrupt."""
_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from multiprocessing.connection import Connection
from autotune.execution.fork_server import serve
serve(Connection(int(sys.argv[1])))
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
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _MAIN, str(theirs.fileno()), json.dumps(sys.path)]
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and code
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if is_quiet else None,
                stderr=subprocess.DEVNULL if is_quiet else None,
                env=one_blas_thread(os.environ),
                process_group=0,  # Ctrl-C is for the driver
            )
        self._connection = Connection(ours.detach())

    def fault(self, interrupt: Callable[[], bool] = lambda: False) -> str | None:
        """Why no training can be forked, once it is ready; None where they can, and once ``interrupt`` says so."""
        try:
            if not self._has_said_something(interrupt):
                return None
            fault: str | None = self._connection.recv()
        except (EOFError, OSError):
            return f"it ended with {self._process.wait()}"
        return fault

    def train(self, task: TrialTask, interrupt: Callable[[], bool] = lambda: False) -> Iterator[WorkerReport | Died]:
        """Fork a process that trains a task: all reports as they come, and the last one, or that it died, when the process is gone.

        Fewer come once ``interrupt`` says so; the training is under way then until the fork server is closed.
        """
        try:
            self._connection.send(task)
            while self._has_said_something(interrupt):
                said: WorkerReport | Died = self._connection.recv()
                yield said
                if isinstance(said, Died) or said.outcome is not None:
                    return
        except (EOFError, OSError):
            yield Died(reason=f"the worker died: its fork server {_ended_by(self._process.wait())}")

    def _has_said_something(self, interrupt: Callable[[], bool]) -> bool:
        """Wait until it has, or ``interrupt`` says that nobody wants to know any more."""
        while not self._connection.poll(_LOOK_EVERY_SECONDS):
            if interrupt():
                return False
        return True

    def close(self) -> None:
        """End the process, and with it what it has forked."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def serve(connection: Connection) -> None:
    """Fork a process for each task that comes, until the other end of the connection is gone.

    The first thing sent is why this process cannot be forked, None where it can; then for each task its reports. The one with the
    training's outcome, or that the process died, is sent when the process is gone.
    """
    preload()
    with contextlib.suppress(EOFError, OSError):
        connection.send(fork_fault())
        while True:
            _train_forked(connection.recv(), connection)


def _train_forked(task: TrialTask, connection: Connection) -> None:
    """Train a task in a new process, and send its reports on.

    Raises:
        EOFError: the other end of the connection is gone; so is the process.
        OSError: likewise.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    num_killed = _num_killed_for_memory()
    process = multiprocessing.get_context("fork").Process(target=_train, args=(task, sender, (connection, receiver), os.getpid()))
    process.start()
    sender.close()
    assert process.pid is not None, "it was started"
    _lead_a_group(process.pid)
    last: WorkerReport | None = None
    gone = os.pidfd_open(process.pid)
    try:
        while last is None:
            ready = wait([receiver, connection, gone])
            if connection in ready:
                raise EOFError  # nobody asks for another training while one is under way
            if receiver not in ready:
                break
            try:
                report: WorkerReport = receiver.recv()
            except EOFError:
                break
            if report.outcome is None:
                connection.send(report)
            else:
                last = report
        wait([gone, connection], _END_SECONDS)
    finally:
        _kill(process.pid)
        process.join()
        os.close(gone)
        receiver.close()
    if last is None:
        was_low = _num_killed_for_memory() > num_killed and process.exitcode == -signal.SIGKILL
        last_word = ", while this machine was low on memory" if was_low else ""
        connection.send(Died(reason=f"the worker died: it {_ended_by(process.exitcode)}{last_word}"))
    else:
        connection.send(last)


def _train(task: TrialTask, sender: Connection, others: tuple[Connection, ...], parent: int) -> None:
    """Train a task in this process, which was forked for it, and send its reports."""
    _lead_a_group(0)
    _die_with(parent)
    for each in others:
        each.close()
    _take_share(task)
    usual_blas_threads()
    run = TaskRun(task)
    report = run.next_report()
    while report.outcome is None:
        sender.send(report)
        report = run.next_report()
    run.close()
    sender.send(report)


def _take_share(task: TrialTask) -> None:
    """Have this process see what Ray lets an actor of the task's size see: so many GPUs, and as many OpenMP threads as CPUs."""
    os.environ.setdefault("OMP_NUM_THREADS", str(task.num_cpus))
    if task.num_gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        own = visible[: task.num_gpus] if visible[0] else [str(index) for index in range(task.num_gpus)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)


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


def _kill(process: int) -> None:
    """Kill a process with its group; what of it has ended is left as it is."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


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
