"""What stands still while this process waits for another machine's files: clocks and deadlines of trainings.

A file that is fetched once a machine would otherwise make the first trial there slow, or count it as hung. Who measures says so here;
who waits need not know who measures.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

Pause = Callable[[], AbstractContextManager[None]]

_pauses: list[Pause] = []
_is_waiting = False


@contextmanager
def paused_while_waiting(pause: Pause) -> Iterator[None]:
    """While the context lasts, ``pause`` is entered whenever this process waits for another machine, and left after that."""
    _pauses.append(pause)
    try:
        yield
    finally:
        _pauses.remove(pause)


@contextmanager
def waiting() -> Iterator[None]:
    """What is done within waits for another machine; may be nested."""
    global _is_waiting  # noqa: PLW0603  # one for the process, as what it pauses is
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
