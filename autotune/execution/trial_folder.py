"""The folder of a run of the user's own code: what the code writes there, and all that it prints,
in ``output.txt``.

While the code runs, the file takes the place of its process's stdout and stderr, so that it also
has what C libraries and further processes print, and what a process printed that was killed.
"""

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from autotune.errors import FileError, last_exception
from autotune.failure import is_lost_connection
from autotune.files import appending, drop_middle, make_folder
from autotune.session import OUTPUT_FILE, TrialInfo, in_trial

RUNS_FOLDER = "trials"
_RUN = re.compile(r"trial-\d+|confirm-\d+-\d+")
"""Names of a study's runs; what else is in their folder is somebody else's."""
_NUM_FIRST, _NUM_LAST = 100_000, 900_000
"""Bytes that are kept of a run's output: the first tell its set-up, the last why it failed. While
it runs it may have a few times as many."""
_MAX_LINE = 300
"""Characters of a printed line that an error tells."""


def folder_of(study: Path, run: str) -> Path:
    """The folder of a run, in that of its study."""
    return study / RUNS_FOLDER / run


@contextlib.contextmanager
def trial_folder(
    wanted: Path, *, number: int | None, seed: int, is_first: bool, is_resumed: bool = False
) -> Iterator[Path]:
    """Context in which a rank of the user's code runs: ``autotune.trial`` tells it the run's
    folder, which has all that is printed meanwhile.

    The folder is a temporary one on a machine that does not have the study's, or for another rank
    the first one's.

    Args:
        wanted: the run's folder.
        is_first: whether this is the first rank, for which the folder is empty at first, unless the
            run is resumed, and deleted if it is empty at the end.

    Raises:
        FileError: the folder cannot be made, or its file for the output cannot.
    """
    folder = wanted
    has_own = not (wanted.parents[1] if is_first else wanted).is_dir()
    if has_own:
        folder = Path(tempfile.mkdtemp(prefix="autotune-")) / wanted.name
    if is_first and not is_resumed:
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was lost or spoilt
    trial = TrialInfo(number=number, name=folder.name, folder=folder, seed=seed)
    try:
        with in_trial(trial), _printing_to(make_folder(folder) / OUTPUT_FILE):
            yield folder
    finally:
        if is_first or has_own:
            _delete_if_empty(folder)
        if has_own:
            with contextlib.suppress(OSError):  # something is in it
                folder.parent.rmdir()


def _delete_if_empty(folder: Path) -> None:
    """Delete the folder of a run that has left nothing in it, or what it did not print."""
    output = folder / OUTPUT_FILE
    with contextlib.suppress(OSError):
        if not output.stat().st_size:
            output.unlink()
    with contextlib.suppress(OSError):  # something is in it
        folder.rmdir()


def run_names(study: Path) -> set[str]:
    """Names of a study's runs that have a folder."""
    return {path.name for path in (study / RUNS_FOLDER).glob("*") if _RUN.fullmatch(path.name)}


def delete_files(study: Path, runs: Iterable[str]) -> None:
    """Delete what ended runs left in their folders, except what they printed.

    Links are deleted and not followed. Nothing is deleted where a link stands for a run's folder,
    or for that of all runs.
    """
    for folder in (folder_of(study, run) for run in runs):
        if folder.is_symlink() or folder.parent.is_symlink():
            continue
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name != OUTPUT_FILE:
                    path.unlink(missing_ok=True)
        _delete_if_empty(folder)


def has_printed(folder: Path) -> bool:
    """Whether there is any output of the run whose folder this is."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    output = folder / OUTPUT_FILE
    return output.is_file() and output.stat().st_size > 0


def bound_output(folder: Path, *, most: int = 4 * (_NUM_FIRST + _NUM_LAST)) -> None:
    """Cut the middle out of a run's output, if that has more than ``most`` bytes; the run may still
    print.
    """
    path = folder / OUTPUT_FILE
    with contextlib.suppress(OSError, FileError):
        if path.stat().st_size > most:
            drop_middle(path, num_first=_NUM_FIRST, num_last=_NUM_LAST)


def end_of_output(folder: Path) -> str:
    """What the run whose folder this is has printed last; empty if that is not known here."""
    try:
        with (folder / OUTPUT_FILE).open("rb") as file:
            file.seek(-min(_NUM_FIRST, file.seek(0, os.SEEK_END)), os.SEEK_END)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_printed(study: Path, run: str) -> tuple[str, str | None]:
    """What a run whose process died printed last, an exception or a line, in words with the path of
    the file that has all of it; and that path.

    Empty and None if that is not known here.
    """
    path = folder_of(study, run) / OUTPUT_FILE
    lines = [line for line in re.split(r"[\r\n]+", end_of_output(path.parent)) if line.strip()]
    if not lines:
        return "", None
    index = last_exception(lines)
    line = lines[-1 if index is None else index].strip()[:_MAX_LINE]
    if is_lost_connection(line):  # of a rank that only met the end of another one
        return f"its output: {path}", str(path)
    return f"it last printed: {line} (all of it: {path})", str(path)


@contextlib.contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    with appending(path) as file, contextlib.ExitStack() as undo:
        undo.callback(bound_output, path.parent, most=_NUM_FIRST + _NUM_LAST)
        for descriptor, stream in enumerate((sys.stdout, sys.stderr), start=1):
            stream.flush()
            kept = os.dup(descriptor)
            undo.callback(os.close, kept)
            undo.callback(os.dup2, kept, descriptor)
            os.dup2(file.fileno(), descriptor)
            if isinstance(stream, io.TextIOWrapper):
                undo.callback(
                    stream.reconfigure,
                    line_buffering=stream.line_buffering,
                    write_through=stream.write_through,
                )
                # what a process has not yet written is lost if it is killed, and a line in parts
                # would have other ranks' between them
                stream.reconfigure(line_buffering=True, write_through=False)
        yield
