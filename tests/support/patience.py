"""How long tests wait for what they have started: many times what it takes, since the machine
may have other things to do.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable

import psutil

PATIENCE_SECONDS = 400.0
"""What takes longer hangs."""


def wait_until(
    is_so: Callable[[], bool],
    *,
    process: "subprocess.Popen[bytes] | None" = None,
    said: Callable[[], str] = lambda: "",
) -> None:
    """Return once it is so.

    Args:
        process: that is to make it so; it is killed, with its process group, where it does not.
        said: what to tell where it never is so.

    Raises:
        AssertionError: it is not so in time, or the process ended.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the process ended with {process.returncode}\n{said()}")
        if time.monotonic() > until:
            if process is not None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise AssertionError(f"not so after {PATIENCE_SECONDS:g} s\n{said()}")
        time.sleep(0.05)


def exit_code(process: "subprocess.Popen[bytes]") -> int:
    """Of a process that is to end; it is killed, with its process group, where it does not.

    Raises:
        subprocess.TimeoutExpired: it did not.
    """
    try:
        return process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def is_alive(process: int) -> bool:
    """Whether a process runs, by its id: one that ended and was not waited for does not."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
