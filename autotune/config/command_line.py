"""The command line that all commands share: Hydra's ``key=value`` overrides, and a few of Hydra's
flags.

Hydra composes configurations, but its own ``main`` is not used: it would print an error over
several lines, exit with code 1, and run callbacks that a configuration names.
"""

import argparse
import atexit
import gc
import importlib.metadata
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from autotune.errors import AutotuneError, ConfigError, FileError, WorkerError
from autotune.remote import user_path

if TYPE_CHECKING:
    from autotune.config.compose import Composer

EXIT_WORKER_ERROR = 1
EXIT_BAD_INPUT = 2
EXIT_NOT_REACHED = 3
EXIT_AGAIN = 75
"""Exit code of a study that a notice has ended (SIGTERM, SIGUSR1, SIGUSR2): the same command
continues it. It is EX_TEMPFAIL of sysexits.h."""
EXIT_INTERRUPTED = 130

_AGAIN_SECONDS = 0.05
"""From an interrupt that Python dropped to the next, so that what dropped it is over."""
_SAME_SECONDS = 1.0
"""Seconds within which signals count as one: ``timeout`` sends one to the process and one to its
group; a closed terminal may, too."""

_SAVE_SECONDS = 10.0
"""Most seconds that trainings are given to be saved after Ctrl-C."""

COMMANDS = {
    "tune": ("autotune.tune_study", "find the fastest configuration; the word may be left out"),
    "train": ("autotune.train", "train one configuration"),
    "compare": ("autotune.compare", "compare configurations, also on more workers"),
    "profile": ("autotune.profile", "say where a step's time goes"),
    "diagnose": ("autotune.diagnose", "say what this machine is, gives and cannot run"),
    "export": ("autotune.export", "write what a study found as an experiment"),
    "report": ("autotune.export", "write the HTML report of a study"),
}
"""Module and purpose of each command, by name; the module's function ``NAME_command`` takes the
arguments and returns the exit code."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A parsed command line."""

    overrides: list[str]
    config_dirs: list[str]
    cfg: str | None
    """``job`` prints the configuration instead of running the command; None runs it."""
    resolve: bool
    """Whether interpolations are resolved in the printed configuration."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help shows what is accepted")


def parse_command_line(
    program: str,
    purpose: str,
    epilog: str,
    arguments: Sequence[str],
    *,
    takes: str = "experiment=NAME",
) -> CommandLine:
    """Parse flags and overrides, and report fetched files on stderr from then on.

    ``--help`` and ``--version`` print and exit.

    Raises:
        ConfigError: a flag is unknown or has a wrong value.
    """
    parser = _Parser(
        prog=program,
        usage=f"{program} [flags] {takes} [key=value ...]",
        description=purpose,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="any key of the configuration, in Hydra's grammar",
    )
    parser.add_argument(
        "--config-dir",
        "-cd",
        dest="config_dirs",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of your own config groups, searched too",
    )
    parser.add_argument(
        "--cfg",
        "-c",
        choices=("job",),
        help="print the composed configuration and run nothing",
    )
    parser.add_argument(
        "--resolve", action="store_true", help="with --cfg: interpolations resolved"
    )
    parser.add_argument("--version", action="version", version=f"autotune {_version()}")
    return CommandLine(**vars(parser.parse_intermixed_args(list(arguments))))


def composer_of(line: CommandLine, overrides: Sequence[str]) -> "Composer":
    """Make the composer of a command's configuration, and make modules beside its folders
    importable.

    Args:
        line: the command line, for its ``config_dirs``.
        overrides: the overrides of ``line`` without the command's own keys.

    Raises:
        ConfigError: a folder does not exist, or an override does not parse.
    """
    from autotune.config.compose import Composer  # noqa: PLC0415  # after --help; imports Hydra

    import_user_code_from(line.config_dirs, overrides)
    return Composer(overrides, line.config_dirs)


def print_config(line: CommandLine, composer: "Composer") -> bool:
    """Print the configuration if ``--cfg`` asks for it; return whether it was printed."""
    if line.cfg:
        print(composer.config_yaml(resolve=line.resolve), end="")
    return line.cfg is not None


def commands_help() -> str:
    """List all commands with their purposes, as indented lines of a help text."""
    return "\n".join(f"  autotune {name:<9} {purpose}" for name, (_, purpose) in COMMANDS.items())


def import_user_code_from(config_dirs: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Make the user's own modules importable if ``overrides`` let any in, and return the folders
    that may contain them.

    These are the working folder, the folders of ``--config-dir`` and their parents. Without
    ``allowed_targets``, none of them is searched: a folder that came from someone else could hold a
    module of any name that a library imports if it is there.
    """
    if not any(re.match(r"\+*allowed_targets=", override) for override in overrides):
        return []
    from hydra.core.plugins import Plugins  # noqa: PLC0415  # after --help

    # before these folders are searched: Hydra imports every module of a package hydra_plugins
    Plugins.instance()
    folders = [str(Path.cwd())]
    for config_dir in config_dirs:
        folder = user_path(config_dir).resolve()
        folders += [str(folder), str(folder.parent)]
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    return folders


def run_main(command: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a command with the process's arguments, and end the process with the command's exit code.

    SIGTERM and SIGHUP end it as Ctrl-C does.
    """
    # Python would look for garbage among all that was imported, for a second or two
    atexit.register(gc.freeze)
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            is_notice = number in (signal.SIGUSR1, signal.SIGUSR2)
            raise _NoticeInterrupt if is_notice else KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)  # in a process that was forked
        signal.raise_signal(number)

    for number in ending_signals():
        if number is not signal.SIGINT:
            signal.signal(number, end)
    sys.unraisablehook = _interrupt_again
    exit_code = run_command(command, sys.argv[1:])
    for number in ending_signals():  # all is done, and the exit code says how
        signal.signal(number, signal.SIG_IGN)
    sys.exit(exit_code)


def _interrupt_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Interrupt again, a little later, where Python dropped a KeyboardInterrupt, as it does in
    ``__del__`` and in weak references.

    The signal is SIGTERM, whichever came: both handlers take it as they take Ctrl-C, which a
    background job may ignore.
    """
    if unraisable.exc_type is KeyboardInterrupt and not sys.is_finalizing():
        main_thread = threading.main_thread().ident or 0
        # ends a wait of that thread, too
        threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, [main_thread, signal.SIGTERM]).start()
    else:
        sys.__unraisablehook__(unraisable)


_NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which batch systems and clouds say that the machine is about to be taken away."""


def ending_signals() -> list[signal.Signals]:
    """The signals that end a command: SIGINT and, unless they are ignored, as ``nohup`` ignores
    SIGHUP, SIGHUP and the notices.
    """
    others = (signal.SIGHUP, *_NOTICES)
    is_heard = [number for number in others if signal.getsignal(number) is not signal.SIG_IGN]
    return [signal.SIGINT, *is_heard]


class _NoticeInterrupt(KeyboardInterrupt):
    """A notice came before or after anything was trained."""


class Interrupt(threading.Event):
    """Set where a command is to end: by a signal, once the trainings that run are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.notice = threading.Event()
        """Set by the first signal: no further training begins."""
        self.exit_code = EXIT_INTERRUPTED
        self._on_notice: Callable[[], object] | None = None
        self._seconds = 0.0

    def set(self) -> None:
        """End the command, whatever is not saved."""
        self.notice.set()
        super().set()

    @contextmanager
    def saving(self, seconds: float, on_notice: Callable[[], object]) -> Iterator[None]:
        """Context of trainings that can be saved: the first signal gives them time to be.

        Args:
            seconds: most seconds from a notice to the end; Ctrl-C takes at most ten.
            on_notice: called by the first signal.
        """
        self._seconds, self._on_notice = seconds, on_notice
        try:
            yield
        finally:
            self._on_notice = None
            if self.notice.is_set():
                self.set()

    def signalled(self, number: int) -> None:
        """Take the first signal."""
        is_notice = number in _NOTICES
        self.exit_code = EXIT_AGAIN if is_notice else EXIT_INTERRUPTED
        self.notice.set()
        if self._on_notice is None:
            self.set()
            return
        seconds = self._seconds if is_notice else min(self._seconds, _SAVE_SECONDS)
        with suppress(FileError):  # then nothing is saved
            self._on_notice()
        timer = threading.Timer(seconds, self.set)
        timer.daemon = True
        timer.start()


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Yield what the first Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 sets, once the trainings
    that run are saved.

    The second one raises KeyboardInterrupt.
    """
    interrupt, first_at = Interrupt(), 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        if not interrupt.notice.is_set():
            first_at = time.monotonic()
            interrupt.signalled(number)
        elif time.monotonic() - first_at > _SAME_SECONDS:
            interrupt.set()
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # only the main thread may handle signals
        return
    previous_handlers = {number: signal.signal(number, handle) for number in ending_signals()}
    try:
        yield interrupt
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def run_command(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run a command and return its exit code.

    An ``AutotuneError`` is printed as one line on stderr and gives exit code 2.

    A ``WorkerError``, for trained code that failed, is printed with its traceback and gives exit
    code 1; an interrupt gives 130.
    """
    try:
        return command(arguments)
    except WorkerError as error:
        print(f"autotune: {error}\n{error.traceback_text.rstrip()}", file=sys.stderr)
        return EXIT_WORKER_ERROR
    except AutotuneError as error:
        print(f"autotune: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt as error:
        print("autotune: interrupted", file=sys.stderr)
        return EXIT_AGAIN if isinstance(error, _NoticeInterrupt) else EXIT_INTERRUPTED


def _version() -> str:
    try:
        return importlib.metadata.version("autotune")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
