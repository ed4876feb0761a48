"""Processes that keep idle CPUs awake while short trainings are timed.

A CPU that has idled may be slow for a while: its clock was turned down, or a hypervisor has to find it a core again. Trainings that take a
fraction of a second, each in a new process, leave pauses in which CPUs idle, and some trainings would then be timed as slow. So meanwhile
one process on each CPU computes under Linux's scheduling policy ``SCHED_IDLE``: it runs only while nothing else wants the CPU, and the
kernel takes the CPU from it at once when something does. That holds among the processes of one group; where Linux shares the CPU out among
sessions (``autogroup``) or control groups first, it would take the share of a whole group. So a process that does not get the CPU at once
sleeps for a while. ``benchmarks/README.md`` has the measured effects.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from autotune.training.capabilities import cpu_quota

_MAX_CPUS = 4
"""No CPU is kept awake on a machine with more: busy CPUs share a power budget, so a lone training would be slower (not measured here)."""
_MAIN = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
last = time.monotonic()
while os.getppid() == int(sys.argv[2]):
    for _ in range(200):
        pass
    now = time.monotonic()
    if now - last > 0.001:
        time.sleep(0.02)
        now += 0.02
    last = now
os._exit(0)
"""
"""It computes for some microseconds, looks for its parent, and sleeps if something else had the CPU meanwhile, or before it was awake."""


@contextmanager
def kept_awake() -> Iterator[None]:
    """Keep the CPUs of this process awake while the context lasts, if they are few and no quota limits their use."""
    processes = [
        subprocess.Popen(  # noqa: S603  # our own interpreter and code
            [sys.executable, "-I", "-S", "-c", _MAIN, str(cpu), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for the driver
        )
        for cpu in _cpus()
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def has_idle_priority(process: int) -> bool:
    """Whether a process has the scheduling policy ``SCHED_IDLE``, and so makes no other process wait for a CPU."""
    if sys.platform != "linux":
        return False
    try:
        return os.sched_getscheduler(process) == os.SCHED_IDLE
    except OSError:  # the process has ended, or belongs to another user
        return False


def _cpus() -> list[int]:
    if sys.platform != "linux":
        return []
    cpus = sorted(os.sched_getaffinity(0))
    return cpus if len(cpus) <= _MAX_CPUS and cpu_quota() is None else []  # they would use a quota up
