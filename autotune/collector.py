"""Keeps Python's garbage collector from walking what imports create: torch and MLflow hold most of a million objects, none garbage."""

import atexit
import gc

_USUAL = gc.get_threshold()
_RARELY = (50_000, 20, 50)


def spare_imports() -> None:
    """Collect rarely until training begins, and skip the collection at the process's end, which alone takes more than a second."""
    gc.set_threshold(*_RARELY)
    atexit.register(gc.freeze)


def collect_as_usual() -> None:
    """Restore the usual thresholds if ``spare_imports`` changed them, but leave out what exists by now.

    Garbage in a training may hold a device's memory; to walk what imports have created takes 0.1 s a collection.
    """
    if gc.get_threshold() == _RARELY:
        gc.set_threshold(*_USUAL)
        gc.freeze()
