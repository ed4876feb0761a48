"""The folder of a study or a comparison: locked by one process at a time, with a file of all log messages."""

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import StudyError
from autotune.execution.task_run import HANG_FILES
from autotune.hiding import LogFormatter


@contextlib.contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Lock a folder for this process and delete the hang files that ended workers left in it; the lock also ends with the process.

    Raises:
        StudyError: another process has locked the folder, or it cannot be written.
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
            _delete_hang_files(folder)
            yield
        finally:
            _delete_hang_files(folder)


def _delete_hang_files(folder: Path) -> None:
    for path in folder.glob(HANG_FILES):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Write all log messages, of autotune and of libraries, to a file while the context lasts; also Python's warnings."""
    handler = logging.FileHandler(path)
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
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
    """A path as text for a reader: relative to the working folder if it lies within that."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
