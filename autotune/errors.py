"""The tree of autotune's errors.

    AutotuneError
    ├── ConfigError              a configuration or setting that cannot be run
    │   ├── SearchSpaceError     a search space file, or a parameter in it
    │   ├── InvalidTrialError    one suggested point that no training can run
    │   └── TargetNotAllowedError   a ``_target_`` outside the allow-list
    ├── DataError                data, such as a data set or a recording: missing or malformed
    │   └── FileError            a file that autotune writes: it cannot be written
    ├── StudyError               a study that does not exist, cannot be opened, or is another one
    └── ExecutionError           the cluster or its workers
        ├── ClusterError         a cluster that does not answer, or has no room for a trial
        └── WorkerError          trials that fail in the user's own code, with its traceback

How a *trial* ends is not an error but data: see ``autotune.outcome.Outcome``. Every message is one
line that says where (file and dotted key), what was found and what is accepted; entry points print
it and exit with 2.
"""

import difflib
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from autotune.failure import is_lost_connection
from autotune.redaction import without_secrets


class AutotuneError(Exception):
    """A failure that autotune explains in one line.

    The line holds no secret, for which ``***`` stands, and no line break or other control character
    of a file's, which would be a terminal's: Python's escape stands for each.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(
            "".join(c if c.isprintable() else repr(c)[1:-1] for c in without_secrets(message))
        )


class ConfigError(AutotuneError):
    """A configuration, a command line or a setting that cannot be run."""


class SearchSpaceError(ConfigError):
    """A search space that cannot be read, or contradicts itself."""


class InvalidTrialError(ConfigError):
    """A suggested point whose configuration cannot be composed or run."""


class TargetNotAllowedError(ConfigError):
    """A ``_target_`` outside the allow-list."""


class DataError(AutotuneError):
    """Data, such as a data set or a recording, that is missing or of the wrong form."""


class DivergedError(AutotuneError):
    """A process of several that train together reported a metric or a loss that is not finite."""


class TimedOutError(AutotuneError):
    """A training took all of its time without an evaluation."""


class StateError(DataError):
    """A saved state of a training that is missing or damaged."""


class FileError(DataError):
    """A file that cannot be written, or that has something else in its place, such as a folder
    or a symbolic link.

    ``errno`` is the system's number of the error; None if it gave none.
    """

    def __init__(self, message: str = "", errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class StudyError(AutotuneError):
    """A study that does not exist, cannot be opened, or was made for something else."""


class ExecutionError(AutotuneError):
    """The cluster or its workers cannot run trials."""


class ClusterError(ExecutionError):
    """The cluster does not answer, or has no room for even one trial."""


class WorkerError(ExecutionError):
    """Several trials in a row failed with an error in the code that they train.

    ``traceback_text`` is the traceback of the first failed trial, as its worker printed it.
    """

    def __init__(self, message: str, traceback_text: str) -> None:
        super().__init__(message)
        self.traceback_text = without_secrets(traceback_text)


def one_line(error: BaseException) -> str:
    """At most 200 characters of an error's message in one line, without a password; the error's
    kind where it has none.
    """
    return without_secrets(" ".join(str(error).split()) or type(error).__name__)[:200]


@contextmanager
def explained(
    what: str, kind: type[AutotuneError] = DataError, *, advice: str = ""
) -> Iterator[None]:
    """Context in which an error that is not autotune's own is told in one line, which begins with
    ``what`` and ends with ``advice``.

    Raises:
        AutotuneError: of ``kind``, if something else was raised.
    """
    try:
        yield
    except AutotuneError:
        raise
    except Exception as error:  # of whatever library reads: each raises its own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise kind(f"{what}: {without_secrets(reason)[:300]}{advice}") from error


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """Hint for an error message on the known name that is most similar to the one found.

    Empty if none is similar.
    """
    close = difflib.get_close_matches(found, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def check_fractions(where: str, **fractions: float) -> None:
    """Check values of a component's keys that lie in 0 to 1.

    Raises:
        ConfigError: one does not.
    """
    for key, value in fractions.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{where}.{key}: found {value}, must be 0 to 1")


def check_counts(where: str, least: int = 1, **counts: int | None) -> None:
    """Check values of a component's keys that are whole numbers from ``least``, or None.

    Raises:
        ConfigError: one is not.
    """
    for key, value in counts.items():
        if value is not None and value < least:
            raise ConfigError(f"{where}.{key}: found {value}, must be a whole number from {least}")


def check_choice(where: str, value: object, choices: Iterable[object]) -> None:
    """Check the value of a component's key that is one of a few.

    Raises:
        ConfigError: it is not.
    """
    choices = list(choices)
    if value not in choices:
        options = ", ".join("null" if choice is None else str(choice) for choice in choices)
        raise ConfigError(f"{where}: found {value!r}, use one of {options}")


def last_exception(lines: Sequence[str]) -> int | None:
    """Index of the line that tells the exception which the last Python traceback in a program's
    output ends with; None without one.

    Exceptions by which a launcher such as torchrun tells that a process of its own failed, or a
    rank that another one is gone, are no cause, unless there is no other.
    """
    found: list[int] = []
    in_traceback = False
    for index, line in enumerate(_OF_RANK.sub("", line) for line in lines):
        if line.lstrip().startswith("Traceback (most recent call last):"):
            in_traceback = True
        elif in_traceback and line.strip() and not line[0].isspace():
            in_traceback = False
            found += [index] if _EXCEPTION.match(line) else []
        elif _TOLD_ALONE.match(line):  # what ends a script before it is run has no traceback
            found.append(index)
    causes = [index for index in found if not _OF_LAUNCHER.match(_OF_RANK.sub("", lines[index]))]
    causes = [index for index in causes if not is_lost_connection(lines[index])] or causes
    return next(reversed(causes or found), None)


def refusal_of(error: BaseException) -> str | None:
    """What autotune refused in this process, or in one that the training had started, whose
    traceback is a part of the error; None if the error is about something else.
    """
    refused = refusal_in("".join(traceback.format_exception(error)))
    return refused or (str(error) if isinstance(error, AutotuneError) else None)


def refusal_in(printed: str) -> str | None:
    """What autotune refused by the last exception in some text; None if that is another one."""
    lines = printed.splitlines()
    index, name = last_exception(lines), f"{ConfigError.__module__}.{ConfigError.__name__}: "
    if index is None or name not in lines[index]:
        return None
    # a DataLoader raises its worker's error with the traceback as its message, here one line
    return lines[index].rpartition(name)[2].removesuffix(r"\n")


_OF_RANK = re.compile(r"^(?:\[[\w:]+\]: ?)+")
"""What torch and its launchers write before each line of a rank's output."""
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:: |:?$)")
_TOLD_ALONE = re.compile(
    r"(?:(?:\w+\.)*[A-Z]\w*(?:Error|Exception)|\S+: error|\S*python[\d.]*): \S"
)
"""An exception, and how argparse and Python itself tell a mistake in the command."""
_OF_LAUNCHER = re.compile(
    r"(?:\w+\.)*(?:ChildFailedError|CalledProcessError|ProcessExitedException)\b"
)
