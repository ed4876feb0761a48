"""Python's garbage collector, kept from walking what imports make: torch and MLflow hold most of a million objects that are no garbage."""

import atexit
import gc

_USUAL = gc.get_threshold()
_RARELY = (50_000, 20, 50)


def spare_imports() -> None:
    """Collect rarely until training begins, and not what still lives at the process's end, which alone takes more than a second."""
    gc.set_threshold(*_RARELY)
    atexit.register(gc.freeze)


def collect_as_usual() -> None:
    """Undo the first half of ``spare_imports``, where it was called: garbage in a training may hold a device's memory."""
    if gc.get_threshold() == _RARELY:
        gc.set_threshold(*_USUAL)
