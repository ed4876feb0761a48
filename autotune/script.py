"""A training that is a command: each trial is a process, which reports by ``autotune.report`` or by
lines of JSON on its stdout.

A script without any knowledge of autotune prints ``{"accuracy": 0.93, "epoch": 3}`` after each
evaluation; the value under the target's metric counts, all other lines are ignored. The process
stands still (``SIGSTOP``) while its report is decided upon, and is ended where the trial ends. What
it prints goes to this process's stdout, too.

Imports of a Python script up to its first report count as building, as those of a training function
do: Python itself says how long each takes (``PYTHONPROFILEIMPORTTIME``). All its other time is
training, unless it calls ``autotune.building`` and ``autotune.evaluating``.
"""

import contextlib
import inspect
import json
import os
import selectors
import shlex
import socket
import string
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError, last_exception
from autotune.session import ADDRESS, PROCESS, SEED, meant_by, numbers, trial

if TYPE_CHECKING:
    from autotune.training.user_training import TrainingClock  # imports torch

_MAX_BYTES = 2**16
"""Longest piece of output that is read as one line: progress bars never end theirs. It is also the
longest message of a script."""
_END_SECONDS = 5.0
"""Seconds that a script may take to end after SIGTERM."""
_OF_TRIAL = ("trial_folder", "trial_number")
"""Names in braces that are no keys of the space: the folder and the number of the trial."""
_IMPORT_TIME = b"import time:"
"""Beginning of the lines by which Python says how long imports take."""
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Environment variables by which launchers tell how many processes train together."""


class Command:
    """A training function that runs a command; made by ``command``."""

    __signature__ = inspect.signature(lambda *, report, clock, config, **values: None)

    def __init__(self, template: str, keys: Sequence[str]) -> None:
        self._template = template
        self.command_keys = keys
        words = shlex.split(template)
        self.__name__ = Path(words[min(1, len(words) - 1)]).stem

    def __call__(self, **arguments: Any) -> None:
        """Run the command; see ``run``."""
        run(self._template, **arguments)


def command(template: str) -> Command:
    """Make a training function of a command: ``autotune.command("python train.py --lr {lr} --out
    {trial_folder}")``.

    The space's keys are the names in braces; ``{trial_folder}`` and ``{trial_number}`` are the
    trial's own. Braces that the command itself has are doubled: ``--config '{{"lr": {lr}}}'``. A
    leading ``python`` is this process's own interpreter.

    Raises:
        ConfigError: the template has no name in braces, or cannot be split as a shell would.
    """
    keys = [name for name in _fields(template) if name not in _OF_TRIAL]
    if not keys:
        raise ConfigError(
            f"command: {template!r} needs names in braces, such as 'python train.py --lr {{lr}}'"
        )
    return Command(template, keys)


def check(command: str, **values: Any) -> None:
    """Check the arguments of ``run`` before it is called.

    Raises:
        ConfigError: the command cannot be split as a shell would, or what is in braces is no name
            or has no value.
    """
    accepted = [*values, *_OF_TRIAL]
    if missing := [key for key in _fields(command) if key not in accepted]:
        raise ConfigError(
            f"training.command: {missing[0]} has no value; names in braces can be"
            f" {', '.join(accepted)}"
        )


def _fields(template: str) -> list[str]:
    """The names in braces.

    Raises:
        ConfigError: the command cannot be split as a shell would, or what is in braces is no name.
    """
    reason = "names in braces look like --lr {lr}"
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        if shlex.split(template) and all(name.replace("-", "_").isidentifier() for name in names):
            return list(dict.fromkeys(names))
    except ValueError as error:
        reason = str(error)
    raise ConfigError(
        f"command: {template!r}: {reason}; double the command's own braces, such as"
        """ --config '{{"lr": {lr}}}'"""
    )


def run(
    command: str,
    report: Callable[..., None],
    clock: "TrainingClock",
    config: TrialConfig,
    **values: Any,
) -> None:
    """Run a command as one training, from a configuration file: ``training: {_target_:
    autotune.script.run, command: ..., lr: 0.01}``.

    Args:
        command: the command, with names in braces for the values; it is run without a shell.

    Raises:
        RuntimeError: the command ended with another exit code than 0; the message says why, as far
            as its output does.
        ConfigError: the command cannot be started, or reports what is refused.
    """
    values |= {"trial_folder": trial().folder, "trial_number": trial().number or 0}
    parts = [part.format(**values) for part in shlex.split(command)]
    if parts[0] in ("python", "python3"):
        parts[0] = sys.executable
    phases: list[contextlib.AbstractContextManager[None]] = []
    scratch = tempfile.TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True)
    with scratch as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(f"{folder}/session")
        script = _Script(parts, channel, config)
        try:
            for message in script.messages():
                match message:
                    case {"report": reported}:
                        suspended = script.running()
                        _each(suspended, psutil.Process.suspend)
                        report(**reported)
                        _each(suspended, psutil.Process.resume)
                    case {"enter": phase}:
                        phases.append(clock.building() if phase == "build" else clock.evaluating())
                        phases[-1].__enter__()
                    case {"leave": _}:
                        phases.pop().__exit__(None, None, None)
                    case {"imported": seconds}:
                        clock.count_as_build(seconds)
            script.check_exit_code()
        finally:
            script.end()


run.autotune_check = check  # type: ignore[attr-defined]  # called before the first trial


class _Script:
    """The process of a command.

    Args:
        parts: the command.
        channel: bound socket that ``autotune.report`` of the script sends to.
        config: configuration of the training; a line of JSON with its target's metric is a report.

    Raises:
        ConfigError: the command cannot be started.
    """

    def __init__(self, parts: list[str], channel: socket.socket, config: TrialConfig) -> None:
        self._parts, self._channel, self._metric = parts, channel, config.target.metric
        environment = {name: value for name, value in os.environ.items() if name != PROCESS}
        environment |= {
            ADDRESS: channel.getsockname(),
            SEED: str(config.seed),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPROFILEIMPORTTIME": "1",
        }
        try:
            self._process = subprocess.Popen(  # noqa: S603  # the user's own command
                parts,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        except OSError as error:
            raise ConfigError(
                f"training: {parts[0]}: cannot be started: {error.strerror}"
            ) from error
        self._reporter: list[int | None] = []
        """The process that reported last, None for lines of JSON; empty before the first report."""
        self._other_names: dict[str, None] = {}
        """Names in lines of JSON that were no reports."""
        self._output: deque[str] = deque(maxlen=400)
        self._num_pythons = 0

    def messages(self) -> Iterator[Mapping[str, Any]]:
        """Yield what the script says by ``autotune.report`` and on its stdout, until that is
        closed.

        Raises:
            ConfigError: several processes train together, or report.
        """
        is_first = True
        for message in self._received():
            if "imported" not in message and is_first:
                is_first = False
                self._refuse_ranks()
            if "report" in message:
                self._check_reporter(message.get("process"))
            yield message

    def _received(self) -> Iterator[Mapping[str, Any]]:
        assert self._process.stdout is not None
        with self._process.stdout as stdout, selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(self._channel, selectors.EVENT_READ)
            text = b""
            while True:
                ready = [key.fileobj for key, _ in selector.select(1.0)]
                # before a report that follows it, and the last of both before the end
                if stdout in ready and (read := os.read(stdout.fileno(), _MAX_BYTES)):
                    *lines, text = (text + read).split(b"\n")
                    if len(text) >= _MAX_BYTES:
                        lines, text = [*lines, text], b""
                    for line in lines:
                        yield from self._said_by(line + b"\n")
                elif self._channel in ready:
                    yield json.loads(self._channel.recv(_MAX_BYTES))
                # a process that the script left behind may keep its stdout open
                elif stdout in ready or self._process.poll() is not None:
                    if text:
                        yield from self._said_by(text)
                    return

    def _said_by(self, line: bytes) -> Iterator[Mapping[str, Any]]:
        """Take a line of output, which is a message if it tells of an import, or is JSON with the
        target's metric.
        """
        if line.startswith(_IMPORT_TIME):
            microseconds = line.removeprefix(_IMPORT_TIME).partition(b"|")[0].strip()
            if not microseconds.isdigit():  # the heading, which each Python prints as it starts
                self._num_pythons += 1
            elif self._num_pythons == 1 and not self._reporter:
                yield {"imported": int(microseconds) / 1e6}
            return
        self._output.append(line.decode(errors="replace"))
        with contextlib.suppress(OSError):
            os.write(1, line)
        try:
            found = json.loads(line)
        except ValueError:
            return
        if isinstance(found, dict) and self._metric in found:
            metric = found.pop(self._metric)
            yield {"report": {**numbers(found), "metric": metric}}
        elif isinstance(found, dict):
            self._other_names |= dict.fromkeys(found)

    def _check_reporter(self, process: int | None) -> None:
        if self._reporter and self._reporter != [process]:
            (other,) = self._reporter
            if process is None or other is None or psutil.pid_exists(other):
                raise ConfigError(
                    "training: the command reports from two processes, or by autotune.report and by"
                    " lines of JSON; use one"
                )
        self._reporter = [process]

    def _refuse_ranks(self) -> None:
        for child in self.running()[1:]:
            with contextlib.suppress(psutil.Error):
                environment = child.environ()
                for name in _WORLD_SIZES:
                    if environment.get(name) not in (None, "1", os.environ.get(name)):
                        raise ConfigError(
                            f"training: the command started {environment[name]} processes that"
                            f" train together ({name} of process {child.pid}); start one: several"
                            " are not supported yet"
                        )

    def check_exit_code(self) -> None:
        """Raise an error if the script, which has ended, has failed, or has printed another
        metric in place of the target's.
        """
        exit_code = self._process.wait()
        if exit_code != 0:
            lines = "".join(self._output).splitlines()
            last = last_exception(lines)
            if last is not None:  # launchers print a page after it
                lines = lines[: last + 1]
            reason = next(filter(None, map(str.strip, reversed(lines))), "it printed nothing")
            first = f"{reason} ({shlex.join(self._parts)} ended with exit code {exit_code})"
            raise RuntimeError("\n".join([first, *lines[-20:]]))
        if self._other_names and not self._reporter:
            names = [*self._other_names][:20]
            raise ConfigError(
                f"training: the command printed lines of JSON with {', '.join(names)}; print one"
                f" with {self._metric}{meant_by(names, self._metric)}"
            )

    def end(self) -> None:
        """End a script that still runs, and the processes that it started."""
        if self._process.poll() is None:
            running = self.running()
            _each(running, psutil.Process.terminate)
            _each(running, psutil.Process.resume)
            _, alive = psutil.wait_procs(running, _END_SECONDS)
            _each(alive, psutil.Process.kill)
            self._process.wait()

    def running(self) -> list[psutil.Process]:
        """The script's process and all that it started, those that still run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        return []


def _each(processes: Sequence[psutil.Process], action: Callable[[psutil.Process], None]) -> None:
    """Do something to those of the processes that still exist."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            action(process)
