"""Imports of libraries without the parts of them that take seconds and are not used here."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def absent(name: str) -> Iterator[None]:
    """Have imports of a module fail while the context lasts, as if it were not installed.

    For optional parts of what is imported.
    """
    module = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]  # None makes Python's import of it fail
    try:
        yield
    finally:
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
