"""Trains sources: the experiments whose checkpoints a configuration's techniques start from, once
each.

The driver trains them before any device is taken, each in a separate process. A trial's time never
includes them.
"""

import fcntl
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.config.command_line import EXIT_BAD_INPUT, EXIT_NOT_REACHED
from autotune.config.compose import Composer, Source
from autotune.errors import ConfigError, ExecutionError, FileError
from autotune.files import WEIGHTS_FILE, appending, make_folder
from autotune.space import override_text


def train_missing_sources(composer: Composer, say: Callable[[str], None]) -> None:
    """Train every source that the configurations composed so far need and whose checkpoint does not
    exist yet.

    An entry point calls this once, after it has composed all configurations that it will run and
    before it makes any component.

    Args:
        composer: the composer of the configurations.
        say: receives one line when a training begins and one when it has ended.

    Raises:
        ConfigError: a source cannot be trained, or does not reach its own target.
        ExecutionError: the training of a source failed.
    """
    for source in composer.missing_sources:
        with _sole_trainer(source.path):
            if not source.path.is_file():  # another process may have just trained it
                _train(source, say)


def _train(source: Source, say: Callable[[str], None]) -> None:
    say(f"technique.source: training {source.experiment} first, once")
    began = time.monotonic()
    # an interrupted training resumes from this folder
    folder = source.path.with_name(f".{source.path.stem}")
    command = [
        sys.executable,
        "-m",
        "autotune",
        "train",
        *source.arguments,
        f"checkpoint.folder={override_text(str(folder))}",
    ]
    # our own command
    process = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    try:
        if process.returncode != 0:
            raise _failure(source, process)
        (folder / WEIGHTS_FILE).replace(source.path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(
        f"technique.source: trained {source.experiment} in {time.monotonic() - began:.1f} s, in no"
        f" trial's time: {source.path}"
    )


def _failure(source: Source, process: "subprocess.CompletedProcess[str]") -> Exception:
    where = f"technique.source: experiment {source.experiment}"
    last_line = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if process.returncode == EXIT_BAD_INPUT:
        return ConfigError(f"{where}: {last_line.removeprefix('autotune: ')}")
    if process.returncode == EXIT_NOT_REACHED:
        outcome = next(
            (line for line in process.stdout.splitlines() if line.startswith("outcome ")),
            "it missed its target",
        )
        return ConfigError(
            f"{where} is no source, since it does not reach its own target: {outcome}"
        )
    return ExecutionError(f"{where}: its training failed: {last_line}")


@contextmanager
def _sole_trainer(path: Path) -> Iterator[None]:
    """Context in which no other process trains the same source; it waits for a process that does.

    Raises:
        ConfigError: the folder of the source's checkpoint cannot be written.
    """
    try:
        file = appending(make_folder(path.parent) / f".{path.stem}.lock")
    except FileError as error:
        raise ConfigError(f"study.folder: {error}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
