"""The folder of a study or a comparison: locked by one process at a time, with a file of all log
messages.
"""

import contextlib
import fcntl
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune.errors import FileError, StudyError
from autotune.execution import task
from autotune.files import appending, check_writable, make_folder
from autotune.redaction import LogFormatter
from autotune.tracking.writer import ShownWarnings

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Lock a folder for this process and delete the hang files that ended workers left in it.

    The lock also ends with the process.

    Raises:
        StudyError: another process has locked the folder, or it cannot be written.
    """
    with _refused_as_study():
        make_folder(folder)
        file = appending(folder / ".lock")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StudyError(
                f"study.name={folder.name}: another process runs it; give another study.name"
            ) from error
        except OSError:  # a file system without locks: the driver's attribute in the storage guards
            logger.info("%s: cannot be locked on its file system", folder)
        with _refused_as_study():
            check_writable(folder)
        _delete_hang_files(folder)
        try:
            yield
        finally:
            _delete_hang_files(folder)


@contextlib.contextmanager
def _refused_as_study() -> Iterator[None]:
    """Context whose errors of files are errors of the key ``study.folder``."""
    try:
        yield
    except FileError as error:
        raise StudyError(f"study.folder: {error}") from error


def _delete_hang_files(folder: Path) -> None:
    for path in folder.glob(task.HANG_FILES):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def log_file(path: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Write all log messages, of autotune and of libraries, to a file while the context lasts.

    Also Python's warnings. Those that concern all trials are shown, too. Where the disk is full,
    messages are lost, and the line that ends the study for it is the only one.

    Args:
        say: prints a line for the user; called from any thread.

    Raises:
        FileError: the file cannot be written.
    """
    handler = logging.StreamHandler(appending(path))
    raises, logging.raiseExceptions = logging.raiseExceptions, False  # else it would be printed
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    of_trials, shown = logging.getLogger(task.__name__), ShownWarnings(say)
    of_trials.addHandler(shown)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        logging.raiseExceptions = raises
        root.removeHandler(handler)
        of_trials.removeHandler(shown)
        with contextlib.suppress(OSError):
            handler.stream.close()


def shown_path(path: Path) -> str:
    """A path as text for a reader: relative to the working folder if it lies within that."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
