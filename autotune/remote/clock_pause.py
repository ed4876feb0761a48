"""Pauses clocks and deadlines of trainings while this process waits for another machine's files.

A file is fetched once per machine, which would make the first trial there slow, or let it count as hung. Code that measures time registers
a pause here, and code that waits enters all registered pauses, so neither needs to know the other.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

Pause = Callable[[], AbstractContextManager[None]]
"""Makes a context in which one clock or deadline is paused."""

_pauses: list[Pause] = []
_is_waiting = False


@contextmanager
def paused_while_waiting(pause: Pause) -> Iterator[None]:
    """Register a pause for as long as the context lasts: it is entered whenever this process waits for another machine."""
    _pauses.append(pause)
    try:
        yield
    finally:
        _pauses.remove(pause)


@contextmanager
def waiting() -> Iterator[None]:
    """Context for code that waits for another machine: all registered pauses are entered; may be nested."""
    global _is_waiting  # noqa: PLW0603  # one flag for the process, like the list of pauses
    if _is_waiting:
        yield
        return
    with ExitStack() as paused:
        for pause in _pauses:
            paused.enter_context(pause())
        _is_waiting = True
        try:
            yield
        finally:
            _is_waiting = False
