"""A training that is a command: each trial is a process, which reports by ``autotune.report`` or by lines of JSON on its stdout.

A script without any knowledge of autotune prints ``{"accuracy": 0.93, "epoch": 3}`` after each evaluation; the value under the target's
metric counts, all other lines are ignored. The process stands still (``SIGSTOP``) while its report is decided upon, and is ended where the
trial ends. What it prints goes to this process's stdout, too.

Up to its first report the start of a Python script and its imports count as building, as those of a training function do: a hook that the
script's Python imports by itself (``sitecustomize``) notes them. All its other time is training, unless it calls ``autotune.building`` and
``autotune.evaluating``.
"""

import contextlib
import inspect
import json
import math
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
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError, last_exception
from autotune.files import replace_file
from autotune.session import ADDRESS, PROCESS, SEED, meant_by, trial

if TYPE_CHECKING:
    from autotune.training.user_training import TrainingClock  # imports torch

_NUM_LINES = 20
"""Lines of a failed script's output that its error tells, up to the one that tells why it failed."""
_NUM_KEPT_LINES = 400
"""Lines of a script's output in which the reason is looked for: launchers print a page after it."""
_MAX_LINE_BYTES = 2**16
"""Bytes of output that are taken for a line at most: progress bars never end theirs."""
_END_SECONDS = 5.0
"""Seconds that a script may take to end after SIGTERM, and that are waited for what processes print that it left behind."""
_OWN_FIELDS = ("trial_folder", "trial_number")
"""Names in braces that are no keys of the space: the folder and the number of the trial."""


class Command:
    """A training function that runs a command, with the command's fields as its arguments; made by ``command``."""

    is_command = True
    """Each trial is a process of its own, so the process that starts it may start others."""

    def __init__(self, template: str) -> None:
        self._template = template
        self.__name__ = Path(shlex.split(template)[-1 if len(shlex.split(template)) == 1 else 1]).stem
        names = ["report", "clock", "config", *_keys(template)]
        self.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])

    def __call__(self, **arguments: Any) -> None:
        """Run the command; see ``run``."""
        run(self._template, **arguments)


def command(template: str) -> Command:
    """Make a training function of a command: ``autotune.command("python train.py --lr {lr} --out {trial_folder}")``.

    The space's keys are the names in braces; ``{trial_folder}`` and ``{trial_number}`` are the trial's own. Braces that the command itself
    has are doubled: ``--config '{{"lr": {lr}}}'``. A leading ``python`` is this process's own interpreter.

    Raises:
        ConfigError: the template has no name in braces, cannot be split as a shell would, or starts several processes that train together.
    """
    _check_template(template)
    if not _keys(template):
        raise ConfigError(f"command: found {template!r}, accepted is a command with names in braces, such as 'python train.py --lr {{lr}}'")
    return Command(template)


def check(command: str, **values: Any) -> None:
    """Check the arguments of ``run`` before it is called.

    Raises:
        ConfigError: the command cannot be split as a shell would, what is in braces is no name or has no value, or several processes are to
            train together.
    """
    _check_template(command)
    if missing := [key for key in _keys(command) if key not in values]:
        raise ConfigError(f"training.command: {missing[0]} has no value; accepted in braces are {', '.join([*values, *_OWN_FIELDS])}")


def _check_template(command: str) -> None:
    try:
        parts = shlex.split(command)
        names = _fields(command)
    except ValueError as error:
        raise ConfigError(f"command: {command!r}: {error}{_BRACES}") from error
    if not parts or not all(name.isidentifier() for name in names):
        raise ConfigError(
            f"command: found {command!r}, accepted is a command with names in braces, such as 'python train.py --lr {{lr}}'{_BRACES}"
        )
    _refuse_several_processes(parts)


_BRACES = """; braces of the command's own are doubled, such as --config '{{"lr": {lr}}}'"""


def _refuse_several_processes(parts: Sequence[str]) -> None:
    launcher = ""
    for part, following in zip(parts, [*parts[1:], ""], strict=True):
        option, is_assigned, value = part.partition("=")
        if Path(part).name in _LAUNCHERS:
            launcher = Path(part).name
        elif part.endswith(".py") or (launcher and part in ("-m", "--module")):
            return  # what follows is the script's
        elif launcher and option.replace("_", "-") in _NUMBERS_OF_PROCESSES:
            number = value if is_assigned else following
            if number != "1" and "{" not in number:
                raise ConfigError(
                    f"command: found {launcher} {option}={number}, accepted is 1: processes that train together are not supported yet"
                )


_LAUNCHERS = frozenset(
    {"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch", "deepspeed"}
    | {"horovodrun", "mpirun", "mpiexec", "srun"}
)
_NUMBERS_OF_PROCESSES = frozenset(
    {"--nproc-per-node", "--nnodes", "--num-processes", "--num-machines", "--num-gpus", "--num-nodes", "-n", "-np", "--np", "--ntasks"}
)


def run(command: str, report: Callable[..., None], clock: "TrainingClock", config: TrialConfig, **values: Any) -> None:
    """Run a command as one training, from a configuration file: ``training: {_target_: autotune.script.run, command: ..., lr: 0.01}``.

    Args:
        command: the command, with names in braces for the values; it is run without a shell.

    Raises:
        RuntimeError: the command ended with another exit code than 0; the message says why, as far as its output does.
        ConfigError: the command cannot be started, or reports what is refused.
    """
    own = {"trial_folder": trial().folder, "trial_number": trial().number or 0}
    parts = [part.format(**{**own, **values}) for part in shlex.split(command)]
    _refuse_several_processes(parts)
    if parts[0] in ("python", "python3"):
        parts[0] = sys.executable
    scratch = tempfile.TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True)
    with scratch as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "session")
        listener.bind(address)
        listener.listen()
        replace_file(Path(folder) / "sitecustomize.py", _NOTE_IMPORTS)
        environment = {
            **{name: value for name, value in os.environ.items() if name != PROCESS},
            ADDRESS: address,
            SEED: str(config.seed),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
            "AUTOTUNE_IMPORTS": str(Path(folder) / "imports"),
        }
        phases = _Phases(clock, Path(folder) / "imports")
        try:
            process = subprocess.Popen(  # noqa: S603  # the user's own command
                parts, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
            )
        except OSError as error:
            raise ConfigError(f"training: {parts[0]}: cannot be started: {error.strerror}") from error
        messages = _Messages(process, listener, config.target.metric)
        try:
            with contextlib.closing(phases):
                for message, answer in messages:
                    _take(message, process, report, phases)
                    answer()
            exit_code = process.wait()
        finally:
            _end(process)
            messages.finish()
    if exit_code == -signal.SIGKILL:
        raise RuntimeError(f"{parts[0]} was ended by SIGKILL: {shlex.join(parts)}")
    if exit_code != 0:
        raise RuntimeError(_failure(f"{shlex.join(parts)} ended with exit code {exit_code}", messages.output))
    messages.check_reported()


def _take(message: Mapping[str, Any], process: "subprocess.Popen[bytes]", report: Callable[..., None], phases: "_Phases") -> None:
    """Carry out a script's message: it enters or leaves a phase, or reports."""
    if "leave" in message:
        phases.leave()
    elif "enter" in message:
        phases.enter(message["enter"])
    else:
        running = _running(process)  # noted now: what a process that ends meanwhile has started would stay stopped for ever
        _send(running, signal.SIGSTOP)
        try:
            phases.count_start()
            report(**message["report"])
        except BaseException:
            _send(running, signal.SIGTERM)
            raise
        finally:
            _send(running, signal.SIGCONT)


class _Phases:
    """The phases that a script says it is in, and what of its time up to its first report counts as building.

    Args:
        clock: the trial's.
        imports: file in which the script's Python notes when it was importing: two times of the monotonic clock a line.
    """

    def __init__(self, clock: "TrainingClock", imports: Path) -> None:
        self._clock, self._imports = clock, imports
        self._began = time.monotonic()
        self._entered: list[tuple[float, contextlib.ExitStack]] = []
        self._said: list[tuple[float, float]] = []
        """Begin and end of each phase that the script has said."""
        self._is_started = False

    def enter(self, phase: str) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(self._clock.building() if phase == "build" else self._clock.evaluating())
        self._entered.append((time.monotonic(), stack))

    def leave(self) -> None:
        if not self._entered:
            return
        began, stack = self._entered.pop()
        stack.close()
        self._said.append((began, time.monotonic()))

    def close(self) -> None:
        """Leave all phases."""
        while self._entered:
            self.leave()

    def count_start(self) -> None:
        """At the first report, count as building what the script took to start and to import, unless it has said another phase."""
        if self._is_started:
            return
        self._is_started = True
        said = [*self._said, *((began, time.monotonic()) for began, _ in self._entered)]
        noted = []
        with contextlib.suppress(OSError, ValueError):  # no Python, or one that imports no sitecustomize
            for line in self._imports.read_text(encoding="ascii").splitlines():
                begin, end = map(float, line.split())
                noted.append((max(begin, self._began), end))
        self._clock.count_as_build(_length([*said, *noted]) - _length(said))


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    """How long at least one of the intervals lasts, which may overlap."""
    length, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, until))
        until = max(until, end)
    return length


_NOTE_IMPORTS = """
import _frozen_importlib, _thread, os, sys, time


def note_imports():
    real, inner = _frozen_importlib._find_and_load, []
    process, thread = os.getpid(), _thread.get_ident()
    file = os.open(os.environ["AUTOTUNE_IMPORTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(began):
        os.write(file, b"%f %f\\n" % (began, time.monotonic()))

    def timed(name, import_):
        if inner or _thread.get_ident() != thread or os.getpid() != process:
            return real(name, import_)
        inner.append(name)
        began = time.monotonic()
        try:
            return real(name, import_)
        finally:
            inner.clear()
            note(began)

    note(time.monotonic() - time.process_time())  # the start of Python, as far as it computed
    _frozen_importlib._find_and_load = timed


sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # that of the Python that this is
except ImportError as error:
    if error.name != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = this
is_helper = any("multiprocessing" in argument for argument in getattr(sys, "orig_argv", ()))  # while it starts, another may train
if "AUTOTUNE_IMPORTS" in os.environ and not is_helper:
    note_imports()
"""
"""Module that a script's Python imports as it starts: notes when the main thread was importing."""


class _Messages:
    """Messages of a script, by its connections and its stdout, each with what answers it.

    They end when its stdout is closed, or when the script has ended and nothing has come for some seconds.

    Args:
        metric: name of the target's metric, which a line of JSON has that is an evaluation.

    Raises:
        ConfigError: several processes train together, or report.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", listener: socket.socket, metric: str) -> None:
        self._process, self._listener, self._metric = process, listener, metric
        self._lines: queue.SimpleQueue[tuple[bytes, socket.socket | None]] = queue.SimpleQueue()
        self._reporters: list[socket.socket | None] = []
        """The connection by which the script reports, None for its stdout; empty before its first report."""
        self._names: dict[str, None] = {}
        """Names in lines of JSON that were no evaluations."""
        self._is_over = False
        self.output: deque[str] = deque(maxlen=_NUM_KEPT_LINES)

    def __iter__(self) -> Iterator[tuple[Mapping[str, Any], Callable[[], object]]]:
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout, None), daemon=True).start()
        threading.Thread(target=self._accept, daemon=True).start()
        is_first = True
        while True:
            try:
                line, connection = self._lines.get(timeout=_END_SECONDS)
            except queue.Empty:
                if self._process.poll() is None:
                    continue
                line, connection = b"", None  # a process that the script left behind keeps its stdout open
            if connection is None and not line:
                self._is_over = True
                return
            message = json.loads(line) if connection is not None else self._printed(line)
            if message is None:
                continue
            if is_first:
                is_first = False
                _refuse_ranks(self._process)
            if "report" in message:
                self._check_reporter(connection)
            yield message, (lambda: None) if connection is None else partial(_answer, connection)

    def finish(self) -> None:
        """Take the output that a script which was ended had printed before, unless something that it left behind keeps it open."""
        with contextlib.suppress(queue.Empty):
            while not self._is_over:
                line, connection = self._lines.get(timeout=_END_SECONDS)
                self._is_over = connection is None and not line
                if connection is None:
                    self._printed(line)

    def check_reported(self) -> None:
        """Check that the script, which has ended, has not printed another metric in place of the target's.

        Raises:
            ConfigError: it has.
        """
        if self._names and not self._reporters:
            raise ConfigError(
                f"training: the command printed lines of JSON with {', '.join([*self._names][:20])}, accepted is one with "
                f"{self._metric}{meant_by(self._names, self._metric)}"
            )

    def _read(self, file: IO[bytes], connection: socket.socket | None) -> None:
        for line in iter(partial(file.readline, _MAX_LINE_BYTES), b""):
            self._lines.put((line, connection))
        file.close()
        if connection is None:
            self._lines.put((b"", None))
        else:
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the script has ended
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._read, args=(connection.makefile("rb"), connection), daemon=True).start()

    def _printed(self, line: bytes) -> dict[str, Any] | None:
        """Take a line of output; return its report if it is a line of JSON that has the target's metric."""
        self.output.append(line.decode(errors="replace"))
        with contextlib.suppress(OSError):
            os.write(1, line)
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and self._metric in found:
                numbers = {name: value for name, value in found.items() if isinstance(value, int | float) and not isinstance(value, bool)}
                return {
                    "report": {**{name: number for name, number in numbers.items() if name != self._metric}, "metric": found[self._metric]}
                }
            self._names |= dict.fromkeys(found if isinstance(found, dict) else ())
        return None

    def _check_reporter(self, connection: socket.socket | None) -> None:
        reporter = next(iter(self._reporters), connection)
        if reporter is not connection and (reporter is None or connection is None):
            raise ConfigError("training: the command reports by autotune.report and by lines of JSON, accepted is one of both")
        if reporter is not connection and reporter is not None and reporter.fileno() >= 0:  # otherwise its process has ended
            raise ConfigError(
                "training: two processes of the command report, accepted is one: processes that train together are not supported yet"
            )
        self._reporters = [connection]


def _answer(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # its process has ended
        connection.sendall(b"{}\n")


def _refuse_ranks(process: "subprocess.Popen[bytes]") -> None:
    """Refuse a script whose processes train together, as launchers tell them by environment variables.

    Raises:
        ConfigError: they do.
    """
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                environment = child.environ()
                for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
                    if environment.get(name) not in (None, "1", os.environ.get(name)):
                        raise ConfigError(
                            f"training: the command started {environment[name]} processes that train together ({name} of process "
                            f"{child.pid}), accepted is 1: several are not supported yet"
                        )


def _failure(ended: str, output: Sequence[str]) -> str:
    """What is told of a command that failed: why, as far as its output says, and the lines up to there."""
    lines = "".join(output).splitlines()
    if (index := last_exception(lines)) is not None:
        return "\n".join([ended, *lines[max(0, index + 1 - _NUM_LINES) : index + 1]])
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return "\n".join([f"{last} ({ended})" if last else ended, *lines[-_NUM_LINES:]])


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a script that still runs, and the processes that it started."""
    if process.poll() is None:
        running = _running(process)
        _send(running, signal.SIGTERM)
        _send(running, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    if process.poll() is None:
        _send(_running(process), signal.SIGKILL)
        process.wait()


def _running(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """A process and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    return []


def _send(processes: Sequence[psutil.Process], number: int) -> None:
    """Send a signal to those of the processes that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _fields(template: str) -> list[str]:
    return list(dict.fromkeys(name for _, name, _, _ in string.Formatter().parse(template) if name is not None))


def _keys(template: str) -> list[str]:
    return [name for name in _fields(template) if name not in _OWN_FIELDS]


run.autotune_check = check  # type: ignore[attr-defined]  # called before the first trial
