"""Ctrl-C, SIGTERM and SIGHUP: the first one ends a study in good order, the second one at once."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from autotune.config.command_line import ending_signals

_SAME_SECONDS = 1.0
"""Seconds within which signals count as one: ``timeout`` sends one to the process and one to its
group; a closed terminal may, too."""


latest_signal: int | None = None
"""Signal that ended, or is ending, the latest command of this process in good order; None if
none did."""


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C, SIGTERM or SIGHUP sets.

    The second one raises KeyboardInterrupt.
    """
    global latest_signal  # as signals are, it is the process's
    event, first_at, latest_signal = threading.Event(), 0.0, None

    def interrupt(number: int, frame: FrameType | None) -> None:
        global latest_signal  # likewise
        nonlocal first_at
        if not event.is_set():
            first_at, latest_signal = time.monotonic(), number
            event.set()
        elif time.monotonic() - first_at > _SAME_SECONDS:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield event  # only the main thread may handle signals
        return
    previous_handlers = {number: signal.signal(number, interrupt) for number in ending_signals()}
    try:
        yield event
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
