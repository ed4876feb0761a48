"""Training what others start from: the experiments that a configuration's techniques name as their source, once each.

It is done by the driver, before any device is taken, in a process of its own, and never counted into a trial's time.
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
from autotune.config.compose import Composer
from autotune.config.sources import Source
from autotune.errors import ConfigError, ExecutionError

_WEIGHTS = "weights.safetensors"


def train_missing_sources(composer: Composer, say: Callable[[str], None]) -> None:
    """Train every source that a configuration composed so far starts from and whose checkpoint is not there yet.

    To be called once by an entry point, after it has composed all that it will run and before any of it is made.

    Args:
        composer: what composed the configurations.
        say: told a line when a training begins and when it has ended.

    Raises:
        ConfigError: a source cannot be trained, or does not reach its own target.
        ExecutionError: its training failed.
    """
    for source in composer.missing_sources:
        with _sole_trainer(source.path):
            if not source.path.is_file():  # another process may have just made it
                _train(source, say)


def _train(source: Source, say: Callable[[str], None]) -> None:
    say(f"technique.source: training {source.experiment} first, once")
    began = time.monotonic()
    folder = source.path.with_name(f".{source.path.stem}")  # an interrupted training goes on from what is there
    command = [sys.executable, "-m", "autotune.train", *source.arguments, f"checkpoint.folder={_quoted(folder)}"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603  # our own command
    if ended.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        raise _failure(source, ended)
    (folder / _WEIGHTS).replace(source.path)
    shutil.rmtree(folder, ignore_errors=True)
    say(f"technique.source: trained {source.experiment} in {time.monotonic() - began:.1f} s, in no trial's time: {source.path}")


def _failure(source: Source, ended: "subprocess.CompletedProcess[str]") -> Exception:
    where = f"technique.source: experiment {source.experiment}"
    last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if ended.returncode == EXIT_BAD_INPUT:
        return ConfigError(f"{where}: {last.removeprefix('autotune: ')}")
    if ended.returncode == EXIT_NOT_REACHED:
        outcome = next((line for line in ended.stdout.splitlines() if line.startswith("outcome ")), "it missed its target")
        return ConfigError(f"{where} is no source, since it does not reach its own target: {outcome}")
    return ExecutionError(f"{where}: its training failed: {last}")


@contextmanager
def _sole_trainer(path: Path) -> Iterator[None]:
    """Wait until no other process trains this source, and let none while the context lasts.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_name(f".{path.stem}.lock").open("w")
    except OSError as error:
        raise ConfigError(f"study.folder: {path.parent}: cannot be written: {error.strerror}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _quoted(folder: Path) -> str:
    """A path as a value of Hydra's grammar."""
    return "'" + str(folder).replace("\\", "\\\\").replace("'", "\\'") + "'"
