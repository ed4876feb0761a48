"""The folder of a study or a comparison: held by one process at a time, with a log file of all that is logged."""

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import StudyError
from autotune.execution.task_run import HANG_FILES


@contextlib.contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Hold a folder, and sweep out what workers that were ended left in it; the lock goes with the process.

    Raises:
        StudyError: another process holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise StudyError(f"study.folder: {folder}: cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StudyError(f"study.name={folder.name}: another process runs it; accepted is another study.name") from error
        try:
            _sweep(folder)
            yield
        finally:
            _sweep(folder)


def _sweep(folder: Path) -> None:
    for path in folder.glob(HANG_FILES):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Everything that is logged, by autotune and by the libraries, goes to a log file."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        handler.close()


def shown_path(path: Path) -> str:
    """A path as a person is told it: from the working folder where it lies within."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
