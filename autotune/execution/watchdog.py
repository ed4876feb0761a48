"""The watchdog thread of a training's process: it enforces the deadline and measures what else used
the machine meanwhile.

The deadline counts from the training's last report or saved state, so that no training which makes
progress meets it. It follows from the longest time between two reports so far, since nothing bounds
how long building and evaluating take.

It wakes ten times a second. If it wakes long after it was due, and the kernel says that it neither
ran nor waited for a CPU meanwhile, the whole process was stopped: the deadline moves by that time,
so that no trial counts as hung because someone else stopped it. (A thread that cannot get Python's
lock wakes every few milliseconds to try again, and one that the kernel does not let run is counted
as waiting.) Every two seconds it looks at the GPU. That the whole machine was suspended is told by
the clock that goes on meanwhile.

The watchdog ends a hung process, with the stack of every thread in its hang file. If even the
watchdog cannot run, since compiled code keeps Python's lock for ever, ``faulthandler``'s own timer
ends the process, some time later.
"""

import contextlib
import faulthandler
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import psutil

from autotune.contention import MAX_STOPPED_SECONDS, Contention
from autotune.training.device import look_at_gpus

_BEAT_SECONDS = 0.1
_LOCK_SHARE = 1.25
"""Upper limit on the time between two wakes of a thread that waits for Python's lock, in units
of Python's switch interval."""
_CATCH_UP_SECONDS = 10.0
"""Longest wait for the watchdog thread after its process was stopped."""
_SAMPLE_EVERY_SECONDS = 0.5
_TELL_EVERY_SECONDS = 2.0
"""Seconds between two calls of ``on_contention``, and at most between two looks at the GPU: NVML
tells who computed in the last two seconds."""
_INTERVALS = 10
"""Least deadline of a training, in units of the longest time between two of its reports so far."""
_SAVING_SECONDS = 3600.0
"""Least seconds that saving a state may take."""
_BACKSTOP_SECONDS = 20.0
"""Least seconds past the deadline after which ``faulthandler`` ends a hung process in which the
watchdog thread cannot run."""


class Watchdog:
    """Watches one training of this process.

    Args:
        deadline_seconds: wall seconds that the training may take from one report or saved state to
            the next, or infinity; time in which it was stopped or waited for another machine is
            free.
        is_deadline_fixed: whether the deadline stays what it is; else it grows with the longest
            time between two reports.
        budget_seconds: wall seconds that the training may take in all, whatever it does.
        driver: host and process id of the driver; all processes that the driver has started belong
            to the study.
        hang_file: opens the file that the stack traces of a hung process are written to; needed
            with a finite deadline.
        starts_training: whether processes that this one has started are those that train.
        on_contention: called, in the watchdog's thread, with what else used the machine so far, now
            and then and when the training was stopped.
    """

    def __init__(
        self,
        *,
        deadline_seconds: float,
        driver: tuple[str, int],
        is_deadline_fixed: bool = False,
        budget_seconds: float = math.inf,
        hang_file: Callable[[], TextIO] | None = None,
        starts_training: bool = False,
        on_contention: Callable[[Contention], None] | None = None,
    ) -> None:
        self._limit_seconds = deadline_seconds
        """Seconds from one report to the deadline."""
        self._deadline = time.monotonic() + deadline_seconds
        self._is_deadline_fixed = is_deadline_fixed
        self._budget_ends_at = time.monotonic() + budget_seconds
        self._driver = driver
        self._hang_file = hang_file
        self._starts_training = starts_training
        self._on_contention = on_contention
        self._tell_at = time.monotonic() + _TELL_EVERY_SECONDS
        """When the GPU is looked at and ``on_contention`` is called next."""
        self._changed = threading.Condition()
        self._is_on = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._stopped_seconds = 0.0
        self._due_at = math.inf
        """When the watchdog thread is to wake; infinite while it has nothing to watch."""
        self._on_seconds = 0.0
        self._on_since = 0.0
        self._first: _Sample | None = None
        self._waits: dict[tuple[int, str], float] = {}
        """Time that each thread has waited for a CPU, of those that have ended, too."""
        self._latest: Contention | None = None
        self._ran: _Ran | None = _Ran(0.0, 0.0, 0)
        """The watchdog thread's counters when it last woke."""
        self._study: Collection[int] = ()
        """The study's processes on this machine when they were last looked for."""
        self._gpus_seen_at = 0.0
        """Value of ``_seconds`` when the GPU was last looked at."""
        self._shared_seconds = 0.0
        self._brakes: set[str] = set()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Watch the training while the context lasts, up to its next report; the process is ended
        at the deadline.
        """
        if self._first is None:
            self._first = self._sample()
        with self._changed:
            self._deadline = time.monotonic() + self._limit_seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
                self._thread.start()
            self._switch(is_on=True)
        try:
            yield
        finally:
            with self._changed:
                self._note_interval()
                self._switch(is_on=False)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Context in which the training's state is written, which may take long; the deadline then
        counts from its end.
        """
        with self._changed:
            self._note_interval()
            self._move(time.monotonic() + max(self._limit_seconds, _SAVING_SECONDS))
        try:
            yield
        finally:
            with self._changed:
                self._move(time.monotonic() + self._limit_seconds)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Suspend ``on`` and move the deadline by the context's duration: fetching files to a
        machine may take longer than any trial.
        """
        began = time.monotonic()
        with self._changed:
            self._switch(is_on=False)
        try:
            yield
        finally:
            with self._changed:
                self._deadline += time.monotonic() - began
                self._switch(is_on=True)

    def close(self) -> None:
        """End the watchdog thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def contention(self, *, is_last: bool) -> Contention | None:
        """What else used the machine so far, measured anew now and then and at the training's
        end; None before the first measurement.
        """
        assert self._first is not None, "the training is under way"
        # a training that was stopped until now may be faster than the thread that is to see it
        with self._changed:
            self._changed.wait_for(
                lambda: time.monotonic() < self._due_at + MAX_STOPPED_SECONDS, _CATCH_UP_SECONDS
            )
        latest, seconds = self._latest, self._seconds
        is_recent = seconds - (latest.seconds if latest else 0.0) < _SAMPLE_EVERY_SECONDS
        has_stopped = self._stopped_seconds > (latest.stopped_seconds if latest else 0.0)
        if is_recent and not has_stopped and not is_last:
            return latest
        first, now = self._first, self._sample()
        self._waits |= now.waits
        # share of the time since the first sample that was trained in
        fraction = min(1.0, seconds / max(now.at - first.at, 1e-9))
        # of processes still alive
        used = {
            pid: max(0.0, cpu - first.study_cpu.get(pid, 0.0)) for pid, cpu in now.study_cpu.items()
        }
        waited = [
            (waited - first.waits.get(thread, 0.0), thread[0])
            for thread, waited in self._waits.items()
        ]
        waited_seconds, waiter = max(waited, default=(0.0, os.getpid()))
        study = sum(cpu for pid, cpu in used.items() if pid != waiter)
        others = max(0.0, now.busy_cpu - first.busy_cpu - sum(used.values()))
        with self._changed:
            self._study = now.study_cpu
            self._look_at_gpus()
        self._latest = Contention(
            seconds=seconds,
            stopped_seconds=self._stopped_seconds + max(0.0, now.suspended - first.suspended),
            waited_seconds=waited_seconds,
            others_cpu_seconds=others * fraction,
            study_cpu_seconds=study * fraction,
            shared_seconds=self._shared_seconds,
            brakes=tuple(sorted(self._brakes)),
        )
        return self._latest

    @property
    def _seconds(self) -> float:
        """Wall seconds that the training was watched so far."""
        return self._on_seconds + (time.monotonic() - self._on_since if self._is_on else 0.0)

    def _sample(self) -> "_Sample":
        training = [os.getpid(), *(descendants(os.getpid()) if self._starts_training else ())]
        return _sample(self._driver, training)

    def _switch(self, *, is_on: bool) -> None:
        now = time.monotonic()
        if self._is_on:
            self._on_seconds += now - self._on_since
        self._is_on, self._on_since = is_on, now
        if is_on:
            # the process may be stopped before the thread wakes
            self._due_at = min(self._due_at, now + _BEAT_SECONDS)
            self._arm()
        else:
            faulthandler.cancel_dump_traceback_later()
        self._changed.notify_all()

    def _note_interval(self) -> None:
        """Have the deadline follow from the time since the last report."""
        if not self._is_deadline_fixed and math.isfinite(self._deadline):
            left = self._deadline - time.monotonic()
            took_seconds = self._limit_seconds - left  # without what has moved the deadline
            self._limit_seconds = max(self._limit_seconds, _INTERVALS * took_seconds)

    def _move(self, deadline: float) -> None:
        self._deadline = deadline
        if self._is_on:
            self._arm()

    @property
    def _ends_at(self) -> float:
        return min(self._deadline, self._budget_ends_at)

    def _arm(self) -> None:
        left = max(0.0, self._ends_at - time.monotonic())
        if self._hang_file is not None and math.isfinite(left):
            faulthandler.dump_traceback_later(
                2 * left + _BACKSTOP_SECONDS, exit=True, file=self._hang_file()
            )

    def _look(self) -> None:
        with self._changed:
            while not self._is_closed:
                self._beat()
                self._changed.notify_all()
                self._changed.wait(
                    max(0.0, self._due_at - time.monotonic()) if self._is_on else None
                )

    def _beat(self) -> None:
        now, ran = time.monotonic(), _ran("thread-self")
        late, before, self._ran = now - self._due_at, self._ran, ran
        # of the same reading: the process may be stopped here, too
        self._due_at = now + _BEAT_SECONDS if self._is_on else math.inf
        if late >= MAX_STOPPED_SECONDS and before is not None and ran is not None:
            self._was_late(late, before, ran)
        if self._is_on and now >= self._ends_at:
            self._end_process()
        if self._is_on and now >= self._tell_at:
            self._tell_at = now + _TELL_EVERY_SECONDS
            if self._on_contention is None:
                self._look_at_gpus()
            else:
                measured = self.contention(is_last=True)
                assert measured is not None, "it was measured"
                self._on_contention(measured)

    def _was_late(self, late: float, before: "_Ran", after: "_Ran") -> None:
        ran, waited, times = (now - then for now, then in zip(after, before, strict=True))
        stopped = late - ran - waited - _LOCK_SHARE * sys.getswitchinterval() * times
        if stopped >= MAX_STOPPED_SECONDS:
            self._was_stopped(stopped)

    def _look_at_gpus(self) -> None:
        """Look at the GPU now; what is seen stands for the time since the look before."""
        started = [*descendants(os.getpid())]
        looks = look_at_gpus(self._study, started)
        if any(look.is_shared for look in looks):  # maybe with one of the study that is new
            self._study = _study_processes(self._driver)
            looks = look_at_gpus(self._study, started)
        # a driver that takes its time to answer has stopped nothing
        self._due_at = max(self._due_at, time.monotonic())
        seconds = self._seconds
        if any(look.is_shared for look in looks):
            self._shared_seconds += seconds - self._gpus_seen_at
        self._gpus_seen_at = seconds
        self._brakes.update(brake for look in looks for brake in look.brakes)

    def _was_stopped(self, seconds: float) -> None:
        self._stopped_seconds += seconds
        self._tell_at = 0.0
        self._move(self._deadline + seconds)

    def _end_process(self) -> None:
        assert self._hang_file is not None, "the deadline is finite"
        file = self._hang_file()
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.flush()
        os._exit(1)


class _Ran(NamedTuple):
    """The kernel's scheduling counters of a thread, from Linux's ``schedstat``."""

    ran_seconds: float
    """Seconds for which the thread had a CPU."""
    waited_seconds: float
    """Seconds that the thread has waited for a CPU."""
    times: int
    """Number of times that the thread was given a CPU."""


def _ran(thread: str) -> _Ran | None:
    """Read the counters of a thread, given its folder in ``/proc``.

    None if the kernel has none or the thread is gone.
    """
    try:
        ran, waited, times = Path(f"/proc/{thread}/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return _Ran(int(ran) / 1e9, int(waited) / 1e9, int(times))


def descendants(process: int) -> Iterator[int]:
    """Ids of the processes that a process has started, and of those that these have started,
    where the kernel tells them.
    """
    with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (thread / "children").read_text(encoding="ascii").split()):
                yield child
                yield from descendants(child)


class _Sample(NamedTuple):
    """Counters of CPU time at one moment, all in seconds."""

    at: float
    """Time of the sample on the monotonic clock."""
    busy_cpu: float
    """CPU time used by all processes of the machine."""
    study_cpu: dict[int, float]
    """CPU time used by each process of the study, including this one, by process id."""
    waits: dict[tuple[int, str], float]
    """Time that each thread of the processes that train has waited for a CPU, by process and thread
    id."""
    suspended: float
    """Time that the machine was suspended since it was started."""


def _sample(driver: tuple[str, int], training: Collection[int]) -> _Sample:
    machine = psutil.cpu_times()
    busy = sum(getattr(machine, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    study_cpu = {pid: _cpu_seconds(process) for pid, process in _study_processes(driver).items()}
    return _Sample(time.monotonic(), busy, study_cpu, _waits(training), _suspended())


def _study_processes(driver: tuple[str, int]) -> dict[int, psutil.Process]:
    """The study's processes on this machine, by id: the driver if it is here, the raylet, this
    process, and all that they have started.
    """
    host, pid = driver
    raylet = os.environ.get("RAY_RAYLET_PID", "")
    roots = [pid] if host == platform.node() else []
    roots += [int(raylet)] if raylet.isdigit() else []
    processes: dict[int, psutil.Process] = {}
    for root_pid in (*roots, os.getpid()):
        if root_pid not in processes:
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(root_pid)
                processes |= {each.pid: each for each in (root, *root.children(recursive=True))}
    return processes


def _cpu_seconds(process: psutil.Process) -> float:
    """CPU time that a process and those of its children that have ended have used, in seconds; 0
    if it cannot be read.
    """
    try:
        return float(sum(process.cpu_times()[:4]))
    except psutil.Error:
        return 0.0


def _suspended() -> float:
    # the monotonic clock stands still meanwhile, the other one goes on
    differences = [time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() for _ in range(3)]
    return round(max(differences), 1)


def _waits(processes: Collection[int]) -> dict[tuple[int, str], float]:
    waits = {}
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            for path in Path(f"/proc/{process}/task").iterdir():
                if (ran := _ran(f"{process}/task/{path.name}")) is not None:
                    waits[process, path.name] = ran.waited_seconds
    return waits
