"""A training that is a command: each trial is a process, which reports by ``autotune.report`` or by lines of JSON on its stdout.

A script without any knowledge of autotune prints ``{"accuracy": 0.93, "epoch": 3}`` after each evaluation; the value under the target's
metric counts, all other lines are ignored. The process stands still (``SIGSTOP``) while its report is decided upon, and is ended where the
trial ends. All its time counts as training, also that of starting, unless it calls ``autotune.building`` and ``autotune.evaluating``.
"""

import contextlib
import inspect
import json
import os
import queue
import shlex
import signal
import socket
import string
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.session import ADDRESS, SEED, Clock, misspelt

_NUM_LINES = 20
"""Lines of a failed script's output that its error tells."""
_END_SECONDS = 5.0
"""Seconds that a script may take to end after SIGTERM."""


class Command:
    """A training function that runs a command, with the command's fields as its arguments; made by ``command``."""

    is_command = True
    """Each trial is a process of its own, so the process that starts it may start others."""

    def __init__(self, template: str) -> None:
        self._template = template
        self.__name__ = Path(shlex.split(template)[-1 if len(shlex.split(template)) == 1 else 1]).stem
        fields = _fields(template)
        names = ["report", "clock", "config", *fields]
        self.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])

    def __call__(self, **arguments: Any) -> None:
        """Run the command; see ``run``."""
        run(self._template, **arguments)


def command(template: str) -> Command:
    """Make a training function of a command: ``autotune.command("python train.py --lr {lr} --batch-size {batch_size}")``.

    The space's keys are the names in braces. A leading ``python`` is this process's own interpreter.

    Raises:
        ConfigError: the template has no name in braces, or cannot be split as a shell would.
    """
    try:
        parts = shlex.split(template)
        fields = _fields(template)
    except ValueError as error:
        raise ConfigError(f"command: {template!r}: {error}") from error
    if not parts or not fields or not all(field.isidentifier() for field in fields):
        raise ConfigError(f"command: found {template!r}, accepted is a command with names in braces, such as 'python train.py --lr {{lr}}'")
    return Command(template)


def run(command: str, report: Callable[..., None], clock: Clock, config: TrialConfig, **values: Any) -> None:
    """Run a command as one training, from a configuration file: ``training: {_target_: autotune.script.run, command: ..., lr: 0.01}``.

    Args:
        command: the command, with names in braces for the values; it is run without a shell.

    Raises:
        RuntimeError: the command ended with another exit code than 0; the message has the end of its output.
        ConfigError: the command cannot be started.
    """
    parts = [part.format(**values) for part in shlex.split(command)]
    if parts[0] in ("python", "python3"):
        parts[0] = sys.executable
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "session")
        listener.bind(address)
        listener.listen()
        environment = {**os.environ, ADDRESS: address, SEED: str(config.seed), "PYTHONUNBUFFERED": "1"}
        try:
            process = subprocess.Popen(  # noqa: S603  # the user's own command
                parts, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
            )
        except OSError as error:
            raise ConfigError(f"training: {parts[0]}: cannot be started: {error.strerror}") from error
        output: deque[str] = deque(maxlen=_NUM_LINES)
        try:
            with contextlib.ExitStack() as phases:
                for message, answer in _messages(process, listener, config.target.metric, output):
                    _take(message, process, report, clock, phases)
                    answer()
            exit_code = process.wait()
        finally:
            _end(process)
    if exit_code == -signal.SIGKILL:
        raise RuntimeError(f"{parts[0]} was ended by SIGKILL: {shlex.join(parts)}")
    if exit_code != 0:
        raise RuntimeError(f"{shlex.join(parts)} ended with exit code {exit_code}\n" + "".join(output))


def _take(
    message: Mapping[str, Any], process: "subprocess.Popen[bytes]", report: Callable[..., None], clock: Clock, phases: contextlib.ExitStack
) -> None:
    """Carry out a script's message: it enters or leaves a phase, or reports."""
    if "leave" in message:
        phases.close()
    elif "enter" in message:
        phases.enter_context(clock.building() if message["enter"] == "build" else clock.evaluating())
    else:
        _signal(process, signal.SIGSTOP)
        report(**message)
        _signal(process, signal.SIGCONT)


def _messages(
    process: "subprocess.Popen[bytes]", listener: socket.socket, metric: str, output: "deque[str]"
) -> Iterator[tuple[Mapping[str, Any], Callable[[], object]]]:
    """Messages of a script, by its connections and its stdout, each with what answers it, until its stdout is closed."""
    lines: queue.SimpleQueue[tuple[bytes, socket.socket | None]] = queue.SimpleQueue()

    def read(file: Iterable[bytes], connection: socket.socket | None) -> None:
        for line in file:
            lines.put((line, connection))
        if connection is None:
            lines.put((b"", None))

    def accept() -> None:
        with contextlib.suppress(OSError):  # the script has ended
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=read, args=(connection.makefile("rb"), connection), daemon=True).start()

    assert process.stdout is not None
    threading.Thread(target=read, args=(process.stdout, None), daemon=True).start()
    threading.Thread(target=accept, daemon=True).start()
    while True:
        line, connection = lines.get()
        if connection is not None:
            yield json.loads(line), partial(connection.sendall, b"{}\n")
        elif not line:
            return
        else:
            output.append(line.decode(errors="replace"))
            if (message := _reported(line, metric)) is not None:
                yield message, lambda: None


def _reported(line: bytes, metric: str) -> dict[str, Any] | None:
    """The values of a line of JSON that has the target's metric; None for any other line."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict) and metric in found:
            numbers = {name: value for name, value in found.items() if isinstance(value, int | float) and not isinstance(value, bool)}
            return {**{name: value for name, value in numbers.items() if name != metric and not misspelt(name)}, "metric": found[metric]}
    return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a script that still runs, and the processes that it started."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        _signal(process, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    if process.poll() is None:
        _signal(process, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to a process and to all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for running in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                running.send_signal(number)


def _fields(template: str) -> list[str]:
    return list(dict.fromkeys(name for _, name, _, _ in string.Formatter().parse(template) if name is not None))
