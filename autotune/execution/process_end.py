"""How a process that trained died, what that says of its trial, and whether the trial's point is
tried again.

A process that is killed from outside (SIGKILL) says nothing of the configuration, unless the
machine's memory had run out: then the same configuration may do it again, or it was another
program's fault. So it is tried once more, and only then counts as too large.
"""

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

from autotune.outcome import Outcome

HANG_FILES = "hang-*.txt"
"""Pattern of the files that watchdogs write stack traces to, ``*`` being the run's name; deleted
when the run ends."""
NOT_ENDED = "not ended at its deadline"
"""How the reason of a death says that another process ended one that hung."""
LOW_ON_MEMORY = ", while this machine was low on memory"
"""How the reason of a death ends if the kernel killed a process for memory meanwhile."""
LAUNCHER_ENDED = "the worker died: its launcher was ended"
MOST_RETRIES = 2**31
"""Number of retries of a point that ``search.max_retries`` alone limits."""
_SIGKILL = "SIGKILL"
_RAY_OUT_OF_MEMORY = ("OutOfMemory", "OUT_OF_MEMORY", "low on memory")
_RAY_UNEXPECTED = "connection error code 2"
"""Ray's words if a worker's process was gone all at once, be it by SIGKILL or by a crash."""


class Death(NamedTuple):
    """What the death of a process says of its trial."""

    outcome: Outcome
    """How the trial ended, if its point is not tried again."""
    error: str
    num_retries: int
    """Number of times that the point is tried again before; ``search.max_retries`` is another
    limit."""


def death_of(run: str, hang_folder: str, *, is_past_deadline: bool, reason: str) -> Death:
    """What the death of a run's process says; the run's hang file is deleted.

    Args:
        run: name of the run.
        hang_folder: folder of its hang file.
        is_past_deadline: whether so much time had passed that the process may have ended itself at
            the run's deadline.
        reason: how the process died, as its launcher or Ray tells.
    """
    hang_file, stack_traces = hang_path(run, hang_folder), ""
    # there is no hang file, such as from the watchdog of another machine
    with contextlib.suppress(OSError):
        stack_traces = hang_file.read_text(encoding="utf-8")
        hang_file.unlink()
    if stack_traces or (is_past_deadline and _SIGKILL not in reason):
        return Death(
            Outcome.TIMED_OUT, f"{NOT_ENDED}; the worker was ended\n{stack_traces}".rstrip(), 0
        )
    # Ray's own watch of the memory, or the kernel
    if any(words in reason for words in _RAY_OUT_OF_MEMORY):
        return Death(Outcome.OUT_OF_MEMORY, reason, 1)
    if is_lost(reason) or LAUNCHER_ENDED in reason:
        return Death(Outcome.LOST, reason, MOST_RETRIES)
    if _RAY_UNEXPECTED in reason:
        return Death(Outcome.ERRORED, reason, 1)
    return (
        Death(Outcome.LOST, reason, MOST_RETRIES)
        if _SIGKILL in reason
        else Death(Outcome.ERRORED, reason, 0)
    )


def is_lost(reason: str) -> bool:
    """Whether a worker was lost with its machine, or a paused trial's state with a disk that is
    full, judged by the error message.
    """
    return any(
        words in reason
        for words in ("node has died", "preempted", "temporarily unavailable", "cannot be written")
    )


def is_killed(error: BaseException) -> bool:
    """Whether an exception of a training means that a process of its own was killed: one that
    gathers batches, or a script.
    """
    # torch tells the signal in the first of two errors
    causes = (error, error.__cause__, error.__context__)
    return any(
        isinstance(cause, RuntimeError) and _TOLD_AS_KILLED.search(str(cause)) is not None
        for cause in causes
    )


_TOLD_AS_KILLED = re.compile(r"killed by signal: Killed|was ended by SIGKILL")


def hang_path(run: str, folder: str) -> Path:
    """The file for the stack traces of a run that hangs."""
    return Path(folder) / HANG_FILES.replace("*", run)


def num_killed_for_memory() -> int:
    """Number of processes that the kernel has killed for memory: of this process's control group,
    or else of the machine; 0 if unknown.

    Source: the kernel's documentation, "Control Group v2", memory.events; "Memory Resource
    Controller", memory.oom_control.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            for path in _counters(controllers, group.strip("/")):
                if (count := _count(path)) is not None:
                    return count
    return _count(Path("/proc/vmstat")) or 0


def _counters(controllers: str, group: str) -> list[Path]:
    root = Path("/sys/fs/cgroup")
    if controllers == "":
        return [root / group / "memory.events"] if group else []
    return (
        [root / "memory" / group / "memory.oom_control"]
        if "memory" in controllers.split(",") and group
        else []
    )


def _count(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return None
