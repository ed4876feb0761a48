"""The files that autotune writes: each whole or not at all, and with the number of its format.

Everything that autotune writes goes through this module; ``tests/test_written_files.py`` walks the
source and says so where it does not.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from autotune.errors import DataError, FileError, one_line

FORMAT = 1
"""The newest format of files that this autotune writes and reads; a file without a number is of
format 1."""

FORMAT_KEY = "format"
"""Key of a file's format in its JSON or YAML."""
WEIGHTS_FILE, STATE_FILE = "weights.safetensors", "state.pt"
"""Names of the files, in a training's folder, of its weights and of the state that it continues
from."""
STATES_FOLDER = "states"
"""Name of the folder of a study that has a folder for the states of each run that has not ended."""
TEXTS_FOLDER = ".mlflow"
"""Name of the folder of a study from which a run's texts are copied to MLflow."""
NOTICE_FILE = ".notice"
"""Name of a file beside trainings' folders of states that has all of them saved at once, or,
followed by ``-`` and a machine's address, those on that machine."""


class StudyFile(NamedTuple):
    """A file or a folder that autotune keeps in the folder of a study or a comparison."""

    name: str
    is_result: bool = False
    """Whether it holds what trials gave, so that it is never written over by another study."""


STUDY_FILES = (
    StudyFile("best.json", True),  # every confirmation run, speed-up, candidates
    StudyFile("summary.json", True),  # the same, also where nothing was confirmed
    StudyFile("best.yaml", True),  # the winner as an experiment
    StudyFile("best_arguments.yaml", True),  # the winner's arguments of a function
    StudyFile("trials.csv", True),  # a row a trial
    StudyFile("pareto_front.csv", True),  # the trials that none is better than in all
    StudyFile("recording", True),  # all learning curves
    StudyFile("report.html", True),  # all of it on a page
    StudyFile("best.safetensors"),  # the winner's weights
    StudyFile("figures"),  # the report's charts, a page each
    StudyFile("trace.csv"),  # which worker trained which trial, and when
    StudyFile("study.log"),  # Optuna's journal
    StudyFile("machine.yaml"),  # the machine
    StudyFile("autotune.log"),  # what libraries logged
    StudyFile("compare.json"),  # a comparison's runs and ratios
    StudyFile("runs.csv"),  # a row a run of a comparison
    StudyFile("trials"),  # what each run of the user's code wrote and printed
    StudyFile("mlflow"),  # what runs logged to MLflow, until the tracker has it
    StudyFile(TEXTS_FOLDER),  # texts of a run, while MLflow copies them
    StudyFile(STATES_FOLDER),  # states of runs that have not ended
    StudyFile("compiled"),  # what confirmation compiles anew, while it runs
    StudyFile(".weights"),  # weights of candidates
    StudyFile(".ray"),  # what Ray cannot do without, during the search
    StudyFile(".lock"),  # locked by the process that runs the study
)


def check_format(found: Any, where: object) -> None:
    """Check the format of a file, from the number ``found`` in it; None for a file without one.

    Raises:
        DataError: a newer autotune wrote the file, or ``found`` is no number of a format.
    """
    if found is not None and (type(found) is not int or not 1 <= found <= FORMAT):
        raise DataError(
            f"{where}: {FORMAT_KEY}: found {str(found)[:80]!r}, this autotune reads 1 to {FORMAT};"
            " update autotune if the number is higher"
        )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield an empty file beside ``path`` to write to.

    What was written takes the place of ``path`` at once when the context ends.

    A reader sees the old file or the new one, never half of it, also after the machine has lost its
    power. A symbolic link at ``path`` is replaced, not followed. After an error the old file stays,
    and the part that was written goes.

    Raises:
        FileError: the file cannot be written, or ``path`` is a folder; names ``path``.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # that of a process that was killed
        with part.open("xb") as file:
            yield part
            os.fsync(file.fileno())
        part.replace(path)
        _flush_names(path.parent)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) and str(error.filename or path) in map(str, (part, path)):
            raise _cannot_be_written(path, error) from error
        raise


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a whole file, a text in UTF-8, as ``replacing`` does.

    Raises:
        FileError: the file cannot be written; names it.
    """
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def appending(path: Path) -> TextIO:
    """Open a text file to append to it, or to lock it, made if missing; line ends are written as
    they are.

    Raises:
        FileError: the file cannot be opened; names it.
    """
    try:
        return path.open("a", newline="", encoding="utf-8")
    except OSError as error:
        raise _cannot_be_written(path, error) from error


def make_folder(path: Path) -> Path:
    """Make a folder, with those above it, unless it is there already, and return it.

    Raises:
        FileError: the folder cannot be made; names it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_written(path, error) from error
    return path


def drop_middle(path: Path, *, num_first: int, num_last: int) -> None:
    """Cut the middle out of a file that others append to; what is written meanwhile may be lost.

    Args:
        num_first: bytes to keep of the file's begin.
        num_last: bytes to keep of its end.
    """
    with path.open("ab+") as file:
        num_dropped = path.stat().st_size - num_first - num_last
        if num_dropped > 0:
            file.seek(num_first + num_dropped)
            last = file.read(num_last)
            file.truncate(num_first)
            file.write(b"\n[autotune left out what was here]\n" + last)


def check_writable(folder: Path) -> None:
    """Write a file of a few bytes into a folder and remove it.

    Raises:
        FileError: the folder cannot be written, or its disk is full.
    """
    probe = folder / ".probe"
    try:
        replace_file(probe, "autotune looked whether it may write here\n")
        probe.unlink(missing_ok=True)
    except FileError as error:
        raise FileError(str(error).replace(str(probe), str(folder), 1)) from error


def _flush_names(folder: Path) -> None:
    """Flush a folder's entries (the names of its files) to disk.

    File systems that cannot are left alone.
    """
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _cannot_be_written(path: Path, error: OSError) -> FileError:
    # The system's own words first: pyarrow puts a sentence of its own, with the number in it, into
    # `strerror`.
    reason = os.strerror(error.errno) if error.errno else one_line(error)
    return FileError(f"{path}: cannot be written: {reason}", error.errno)
