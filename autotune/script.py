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
import queue
import shlex
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError, last_exception
from autotune.session import ADDRESS, PROCESS, SEED, meant_by, trial

if TYPE_CHECKING:
    from autotune.training.user_training import TrainingClock  # imports torch

_MAX_LINE_BYTES = 2**16
"""Longest piece of output that is read as one line: progress bars never end theirs."""
_END_SECONDS = 5.0
"""Seconds that a script may take to end after SIGTERM, and that its output is awaited after its
end."""
_OWN_FIELDS = ("trial_folder", "trial_number")
"""Names in braces that are no keys of the space: the folder and the number of the trial."""
_IMPORT_TIME = b"import time:"
"""Beginning of the lines by which Python says how long imports take."""


class Command:
    """A training function that runs a command, with the command's fields as its arguments.

    Made by ``command``.
    """

    is_command = True
    """Each trial is a process of its own, so the process that starts it may start others."""

    def __init__(self, template: str) -> None:
        self._template = template
        self.__name__ = Path(
            shlex.split(template)[-1 if len(shlex.split(template)) == 1 else 1]
        ).stem
        names = ["report", "clock", "config", *_keys(template)]
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )

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
    _check_template(template)
    if not _keys(template):
        raise ConfigError(
            f"command: {template!r} needs names in braces, such as 'python train.py --lr {{lr}}'"
        )
    return Command(template)


def check(command: str, **values: Any) -> None:
    """Check the arguments of ``run`` before it is called.

    Raises:
        ConfigError: the command cannot be split as a shell would, or what is in braces is no name
            or has no value.
    """
    _check_template(command)
    if missing := [key for key in _keys(command) if key not in values]:
        raise ConfigError(
            f"training.command: {missing[0]} has no value; names in braces can be"
            f" {', '.join([*values, *_OWN_FIELDS])}"
        )


def _check_template(command: str) -> None:
    try:
        is_valid = bool(shlex.split(command)) and all(
            name.isidentifier() for name in _fields(command)
        )
        reason = "names in braces look like --lr {lr}"
    except ValueError as error:
        is_valid, reason = False, str(error)
    if not is_valid:
        raise ConfigError(
            f"command: {command!r}: {reason}; double the command's own braces, such as"
            """ --config '{{"lr": {lr}}}'"""
        )


def _fields(template: str) -> list[str]:
    return list(
        dict.fromkeys(
            name for _, name, _, _ in string.Formatter().parse(template) if name is not None
        )
    )


def _keys(template: str) -> list[str]:
    return [name for name in _fields(template) if name not in _OWN_FIELDS]


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
    own = {"trial_folder": trial().folder, "trial_number": trial().number or 0}
    parts = [part.format(**{**own, **values}) for part in shlex.split(command)]
    if parts[0] in ("python", "python3"):
        parts[0] = sys.executable
    scratch = tempfile.TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True)
    with scratch as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "session")
        listener.bind(address)
        listener.listen()
        environment = {name: value for name, value in os.environ.items() if name != PROCESS}
        environment |= {
            ADDRESS: address,
            SEED: str(config.seed),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPROFILEIMPORTTIME": "1",
        }
        script = _Script(parts, environment, listener, config.target.metric)
        phases = _Phases(clock)
        try:
            for message, answer in script.messages():
                if "report" in message:
                    phases.count_imports(script.import_seconds)
                    with script.suspended():
                        report(**message["report"])
                elif "enter" in message:
                    phases.enter(message["enter"])
                else:
                    phases.leave()
                answer()
            script.check_exit_code()
        finally:
            script.end()


class _Phases:
    """The phases that a script says it is in, and the imports that count as building."""

    def __init__(self, clock: "TrainingClock") -> None:
        self._clock = clock
        self._entered: list[tuple[str, float, contextlib.ExitStack]] = []
        self._build_seconds = 0.0
        self._has_reported = False

    def enter(self, phase: str) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(
            self._clock.building() if phase == "build" else self._clock.evaluating()
        )
        self._entered.append((phase, time.monotonic(), stack))

    def leave(self) -> None:
        phase, began, stack = self._entered.pop()
        stack.close()
        if phase == "build":
            self._build_seconds += time.monotonic() - began

    def count_imports(self, seconds: float) -> None:
        """Count imports before the first report as building, less what the script itself called
        building, which may contain them.
        """
        if not self._has_reported:
            self._has_reported = True
            self._clock.count_as_build(max(0.0, seconds - self._build_seconds))


class _Script:
    """The process of a command.

    Args:
        parts: the command.
        environment: its environment variables.
        listener: socket at which it may report.
        metric: name of the target's metric, by which a line of JSON is a report.

    Raises:
        ConfigError: the command cannot be started.
    """

    def __init__(
        self, parts: list[str], environment: Mapping[str, str], listener: socket.socket, metric: str
    ) -> None:
        self._parts, self._metric = parts, metric
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
        assert self._process.stdout is not None
        self._lines: queue.SimpleQueue[tuple[bytes, socket.socket | None]] = queue.SimpleQueue()
        self._reporter: list[socket.socket | None] = []
        """The connection by which the script reported first, None for its stdout; empty before."""
        self._other_names: dict[str, None] = {}
        """Names in lines of JSON that were no reports."""
        self._output: deque[str] = deque(maxlen=400)
        self._num_pythons = 0
        self.import_seconds = 0.0
        """Seconds that imports of the first Python took until another one started."""
        threading.Thread(target=self._read, args=(self._process.stdout, None), daemon=True).start()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def messages(self) -> Iterator[tuple[Mapping[str, Any], Callable[[], object]]]:
        """Yield what the script says by its connections and its stdout, each with what answers it,
        until its stdout is closed.

        Raises:
            ConfigError: several processes train together, or report.
        """
        is_first = True
        while True:
            try:
                line, connection = self._lines.get(timeout=_END_SECONDS)
            except queue.Empty:
                if self._process.poll() is None:
                    continue
                return  # a process that the script left behind keeps its stdout open
            if connection is None and not line:
                return
            message = json.loads(line) if connection is not None else self._printed(line)
            if message is None:
                continue
            if is_first:
                is_first = False
                self._refuse_ranks()
            if "report" in message:
                self._check_reporter(connection)
            yield message, partial(_answer, connection)

    def _read(self, file: IO[bytes], connection: socket.socket | None) -> None:
        for line in iter(partial(file.readline, _MAX_LINE_BYTES), b""):
            self._lines.put((line, connection))
        file.close()
        if connection is None:
            self._lines.put((b"", None))
        else:
            connection.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the script has ended
            while True:
                connection, _ = listener.accept()
                threading.Thread(
                    target=self._read, args=(connection.makefile("rb"), connection), daemon=True
                ).start()

    def _printed(self, line: bytes) -> dict[str, Any] | None:
        """Take a line of output.

        Return its report if it is a line of JSON that has the target's metric.
        """
        if line.startswith(_IMPORT_TIME):
            self._count_import(line)
            return None
        self._output.append(line.decode(errors="replace"))
        with contextlib.suppress(OSError):
            os.write(1, line)
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and self._metric in found:
                numbers = {
                    name: value
                    for name, value in found.items()
                    if isinstance(value, int | float) and not isinstance(value, bool)
                }
                numbers.pop(self._metric, None)
                return {"report": {**numbers, "metric": found[self._metric]}}
            self._other_names |= dict.fromkeys(found if isinstance(found, dict) else ())
        return None

    def _count_import(self, line: bytes) -> None:
        own_microseconds = line.removeprefix(_IMPORT_TIME).partition(b"|")[0].strip()
        if not own_microseconds.isdigit():  # the heading, which each Python prints as it starts
            self._num_pythons += 1
        elif self._num_pythons == 1:
            self.import_seconds += int(own_microseconds) / 1e6

    def _check_reporter(self, connection: socket.socket | None) -> None:
        (reporter,) = self._reporter = self._reporter or [connection]
        if reporter is not connection and (
            reporter is None or connection is None or reporter.fileno() >= 0
        ):
            raise ConfigError(
                "training: the command reports from two processes, or by autotune.report and by"
                " lines of JSON; use one"
            )
        self._reporter = [connection]  # the process of an earlier one has ended

    def _refuse_ranks(self) -> None:
        for child in self._running()[1:]:
            with contextlib.suppress(psutil.Error):
                environment = child.environ()
                for name in (
                    "WORLD_SIZE",
                    "OMPI_COMM_WORLD_SIZE",
                    "PMI_SIZE",
                    "SLURM_STEP_NUM_TASKS",
                ):
                    if environment.get(name) not in (None, "1", os.environ.get(name)):
                        raise ConfigError(
                            f"training: the command started {environment[name]} processes that"
                            f" train together ({name} of process {child.pid}); start one: several"
                            " are not supported yet"
                        )

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context in which the script and the processes that it started stand still.

        They are ended if it raises an error.
        """
        # noted now: what a process that ends meanwhile has started would stay suspended
        running = self._running()
        _each(running, psutil.Process.suspend)
        try:
            yield
        except BaseException:
            _each(running, psutil.Process.terminate)
            raise
        finally:
            _each(running, psutil.Process.resume)

    def check_exit_code(self) -> None:
        """Raise an error if the script, which has ended, has failed, or has printed another
        metric in place of the target's.
        """
        exit_code = self._process.wait()
        if exit_code != 0:
            lines = "".join(self._output).splitlines()
            last = last_exception(lines)
            # launchers print a page after it
            lines = lines[: len(lines) if last is None else last + 1]
            reason = next(
                (line.strip() for line in reversed(lines) if line.strip()), "it printed nothing"
            )
            raise RuntimeError(
                "\n".join(
                    [
                        f"{reason} ({shlex.join(self._parts)} ended with exit code {exit_code})",
                        *lines[-20:],
                    ]
                )
            )
        if self._other_names and not self._reporter:
            names = [*self._other_names][:20]
            raise ConfigError(
                f"training: the command printed lines of JSON with {', '.join(names)}; print one"
                f" with {self._metric}{meant_by(names, self._metric)}"
            )

    def end(self) -> None:
        """End a script that still runs, and the processes that it started."""
        if self._process.poll() is None:
            running = self._running()
            _each(running, psutil.Process.terminate)
            _each(running, psutil.Process.resume)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        if self._process.poll() is None:
            _each(self._running(), psutil.Process.kill)
            self._process.wait()

    def _running(self) -> list[psutil.Process]:
        """The script's process and all that it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        return []


def _answer(connection: socket.socket | None) -> None:
    with contextlib.suppress(OSError):  # its process has ended
        if connection is not None:
            connection.sendall(b"{}\n")


def _each(processes: Sequence[psutil.Process], action: Callable[[psutil.Process], None]) -> None:
    """Do something to those of the processes that still exist."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            action(process)


run.autotune_check = check  # type: ignore[attr-defined]  # called before the first trial
