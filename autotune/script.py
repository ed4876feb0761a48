"""A training that is a command: each trial is a process, which reports by ``autotune.report`` or by
lines of JSON on its stdout.

A script without any knowledge of autotune prints ``{"accuracy": 0.93, "epoch": 3}`` after each
evaluation; the value under the target's metric counts, all other lines are ignored. The process
stands still (``SIGSTOP``) while its report is decided upon, and is ended where the trial ends. What
it prints goes to this process's stdout, too. It is paused through ``autotune.checkpoint``, or by
SIGTERM if it handles that: it then saves what it needs into the trial's folder, and ends.

Imports of a Python script up to its first report count as building, as those of a training function
do: Python itself says how long each takes (``PYTHONPROFILEIMPORTTIME``). All its other time is
training, unless it calls ``autotune.building`` and ``autotune.evaluating``.
"""

import contextlib
import inspect
import io
import json
import math
import os
import re
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from autotune.command_template import OF_TRIAL, fields, filled
from autotune.config.schema import TrialConfig
from autotune.errors import (
    ConfigError,
    DataError,
    FileError,
    TimedOutError,
    last_exception,
)
from autotune.failure import FailureKind, ProcessFailedError, kind_of_exit, kind_of_text
from autotune.files import replace_file
from autotune.measurement import Evaluation
from autotune.session import (
    ADDRESS,
    NUM_DEVICES,
    PROCESS,
    RANKS,
    SEED,
    STATE,
    WORLD_SIZES,
    check_finite,
    environment_of,
    meant_by,
    numbers,
    own_files,
    rank_of,
    reserved_port,
    trial,
    world_size,
)
from autotune.training.main_thread import is_owner_gone

if TYPE_CHECKING:
    from autotune.training.checkpoint import TrainingCheckpoint  # imports torch
    from autotune.training.user_training import TrainingClock

_MAX_BYTES = 2**16
"""Longest piece of output that is read as one line: progress bars never end theirs. It is also the
longest message of a script."""
_END_SECONDS = 5.0
"""Seconds that a script may take to end after SIGTERM."""
_KILLED_RANK = re.compile(
    r"Root Cause[^=]*? rank +: (\d+)[^=]*?exitcode +: -9"
    r"|process rank (\d+) .* on signal 9|process (\d+) terminated with signal SIGKILL"
)
"""How torchrun, mpirun and torch's spawn tell which of their processes was killed first."""
_CRASHED_RANK = re.compile(r"Root Cause[^=]*? rank +: (\d+)[^=]*?Signal \d+ \((\w+)\) received")
"""How torchrun tells which of its processes a signal such as SIGSEGV ended first."""
_IMPORT_TIME = b"import time:"
"""Beginning of the lines by which Python says how long imports take."""
_KEEP_SECONDS = 3000.0
"""Seconds that a command may take to save and end after SIGTERM; less than the hour after which the
watchdog ends what saves."""
_ARRIVE_SECONDS = 5.0
"""Seconds within which the other ranks of a script make their report after the first one's."""
_NOT_PAUSABLE = ".ended_by_sigterm_without_a_state"
"""File beside the trials' folders once a command could not go on after it was ended by SIGTERM."""
_LIGHTNING = (b"lightning.pytorch", b"pytorch_lightning")
"""Modules that handle SIGTERM, and then save nothing."""
_POLL_SECONDS = 0.1
_CREDENTIALS = struct.Struct("3i")
"""What Linux says of who wrote into a socket: ids of the process, the user and the group."""


class Command:
    """A training function that runs a command; made by ``command``."""

    __signature__ = inspect.signature(lambda *, report, clock, config, checkpoint, **values: None)

    def __init__(self, template: str, keys: Sequence[str] | None) -> None:
        self.template = template
        self.command_keys = keys
        """The space's keys; None if they may have any name."""
        words = shlex.split(template)
        scripts = [word for word in words if word.endswith((".py", ".sh"))]
        self.__name__ = Path(next(iter(scripts), words[min(1, len(words) - 1)])).stem

    def __call__(self, **arguments: Any) -> None:
        """Run the command; see ``run``."""
        run(self.template, **arguments)


def command(template: str) -> Command:
    """Make a training function of a command: ``autotune.command("python train.py --lr {lr} --out
    {trial_folder}")``.

    The space's keys are the names in braces, ``{model.depth}`` one beneath another.
    ``{trial_folder}``, ``{trial_number}`` and ``{devices}`` are the trial's own, ``{config_file}``
    and ``{config_json}`` files with all values, as YAML and JSON. Braces that the command itself
    has are doubled: ``--config '{{"lr": {lr}}}'``. A leading ``python`` is this process's own
    interpreter.

    Raises:
        ConfigError: the template has no name in braces, or cannot be split as a shell would.
    """
    names = fields(template)
    keys = [name for name in names if name not in OF_TRIAL]
    if {"config_file", "config_json"} & set(names):
        return Command(template, None)
    if not keys:
        raise ConfigError(
            f"command: {template!r} needs names in braces, such as 'python train.py --lr {{lr}}'"
        )
    return Command(template, keys)


def check(command: str, **values: Any) -> None:
    """Check the arguments of ``run`` before it is called.

    Raises:
        ConfigError: the command cannot be split as a shell would, what is in braces is no name or
            has no value, or the Python script that it runs is not there.
    """
    accepted = [*values, *OF_TRIAL]
    if missing := [key for key in fields(command) if key.partition(".")[0] not in accepted]:
        raise ConfigError(
            f"training.command: {missing[0]} has no value; names in braces can be"
            f" {', '.join(accepted)}"
        )
    first, *words = shlex.split(command)
    script = next((word for word in words if word.endswith(".py") and "{" not in word), None)
    if first in ("python", "python3", "torchrun") and script and not Path(script).exists():
        raise ConfigError(f"training.command: {script}: there is no such file in {Path.cwd()}")


def run(
    command: str,
    report: Callable[..., None],
    clock: "TrainingClock",
    config: TrialConfig,
    checkpoint: "TrainingCheckpoint",
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
    of_trial: dict[str, Any] = {"number": trial().number or 0, "devices": config.num_workers}
    parts = filled(command, values, folder=trial().folder, **of_trial)
    if parts[0] in ("python", "python3"):
        parts[0] = sys.executable
    phases: list[contextlib.AbstractContextManager[None]] = []
    has_folder = "trial_folder" in fields(command)
    scratch = tempfile.TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True)
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with scratch as folder, channel, reserved_port() as port:
        channel.bind(f"{folder}/session")
        # torchrun's folder of logs goes with ours where it is killed
        own = {"MASTER_PORT": str(port.getsockname()[1]), "PET_LOG_DIR": folder}
        if checkpoint.files is not None:
            own[STATE] = str(checkpoint.files)
        script = _Script(parts, channel, config, own)
        try:
            for message in script.messages():
                match message:
                    case {"report": reported, "rank": 0}:
                        suspended = script.running()
                        _each(suspended, psutil.Process.suspend)
                        _check_goes_on(reported, checkpoint.ended_at)
                        checkpoint.ended_at = None
                        if message.get("is_fresh"):
                            checkpoint.save({}, write_files=script.keep)
                        elif (has_folder or own_files()) and script.handles_sigterm():
                            checkpoint.save({})
                            checkpoint.end = script.end_by_sigterm
                        report(**reported)
                        _each(suspended, psutil.Process.resume)
                        script.go_on()
                    case {"enter": phase, "rank": 0}:
                        phases.append(clock.within(phase))
                        phases[-1].__enter__()
                    case {"leave": _, "rank": 0}:
                        phases.pop().__exit__(None, None, None)
                    case {"loaded": 0}:
                        checkpoint.load()
                    case {"unreported": _} if not checkpoint.is_resumed:
                        script.check_in_time(clock.train_seconds)
                    case {"imported": seconds}:
                        build_seconds = 0.0 if checkpoint.is_resumed else seconds
                        clock.count(train=-seconds, build=build_seconds)
            script.check_exit_code(is_resumed=checkpoint.is_resumed)
        finally:
            script.end()


run.autotune_check = check  # type: ignore[attr-defined]  # called before the first trial


def _check_goes_on(reported: Mapping[str, Any], ended_at: Evaluation | None) -> None:
    """Check that a command goes on where it was ended by SIGTERM, or else is not paused again."""
    for name in ("epoch", "step"):
        if ended_at is not None and reported.get(name, math.inf) <= getattr(ended_at, name):
            _cannot_be_paused()


def _cannot_be_paused() -> None:
    """Note for all trials of the study that their command cannot be paused by SIGTERM."""
    with contextlib.suppress(FileError):
        replace_file(trial().folder.parent / _NOT_PAUSABLE, "")


class _Script:
    """The process of a command.

    Args:
        parts: the command.
        channel: bound socket that ``autotune.report`` of the script sends to.
        config: configuration of the training; a line of JSON with its target's metric is a report.
        environment: environment variables of this run.

    Raises:
        ConfigError: the command cannot be started.
    """

    def __init__(
        self,
        parts: list[str],
        channel: socket.socket,
        config: TrialConfig,
        environment: Mapping[str, str],
    ) -> None:
        self._parts, self._channel, self._metric = parts, channel, config.target.metric
        self._max_train_seconds = config.target.max_train_seconds
        self._num_devices = config.num_workers
        self._num_reports: Counter[int] = Counter()
        """Number of reports of each rank."""
        self._waiting: dict[int, int] = {}
        """The processes that wait for an answer to their report, with their ranks."""
        # this process may be a rank of SLURM's, or of another launcher's; the script is none yet
        outer = {PROCESS, *RANKS, *WORLD_SIZES}
        kept = {name: value for name, value in os.environ.items() if name not in outer}
        whole = {
            **kept,
            **environment,
            ADDRESS: channel.getsockname(),
            SEED: str(config.seed),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPROFILEIMPORTTIME": "1",
            "HYDRA_FULL_ERROR": "1",  # which names the mistake in a line of its own
            NUM_DEVICES: str(config.num_workers),
            "PATH": _search_path(),
            # trials side by side must not share the usual port, of torchrun or under mpirun
            "PET_STANDALONE": "1",
        }
        self._stdout = _Stdout(tells_writers=self._num_devices > 1)
        try:
            self._process = subprocess.Popen(  # noqa: S603  # the user's own command
                parts,
                stdin=subprocess.DEVNULL,
                stdout=self._stdout.theirs,
                stderr=subprocess.STDOUT,
                env=whole,
            )
        except OSError as error:
            raise ConfigError(
                f"training: {parts[0]}: cannot be started: {error.strerror}"
            ) from error
        os.close(self._stdout.theirs)
        self._reporter: tuple[str, int | None] | None = None
        """How the training was reported last, and by which process, None where that is not known;
        None before the first report."""
        self._has_own_handler = False
        """Whether the script imports Lightning, which handles SIGTERM, and then saves nothing."""
        self._other_names: dict[str, None] = {}
        """Names in lines of JSON that were no reports."""
        self._output: deque[str] = deque(maxlen=400)
        self._num_pythons = self._num_decided = 0
        self._texts: dict[int | None, bytes] = defaultdict(bytes)
        """The line that each process has begun to print."""
        self._has_spoken = self._is_over = False

    def messages(self) -> Iterator[Mapping[str, Any]]:
        """Yield what the script says by ``autotune.report`` and on its stdout, until that is
        closed.

        Raises:
            ConfigError: several processes train together, or report.
        """
        with contextlib.closing(self._stdout):
            while not self._is_over:
                yield from self._said(1.0)

    def _said(self, seconds: float) -> Iterator[Mapping[str, Any]]:
        """Yield what the script says next, if it says anything within so many seconds."""
        for message in self._received(seconds):
            if not {"imported", "unreported"} & message.keys() and not self._has_spoken:
                self._has_spoken = True
                _check_ranks(self.running(), self._num_devices)
            if "report" in message:
                self._note_report(message)
            yield message

    def _received(self, seconds: float) -> Iterator[Mapping[str, Any]]:
        sources: list[_Stdout | socket.socket] = [self._stdout, self._channel]
        ready, _, _ = select.select(sources, [], [], seconds)
        # before a report that follows it, and the last of both before the end
        writer, read = self._stdout.read() if self._stdout in ready else (None, b"")
        if read:
            *lines, text = (self._texts[writer] + read).split(b"\n")
            if len(text) >= _MAX_BYTES:
                lines, text = [*lines, text], b""
            self._texts[writer] = text
            for line in lines:
                yield from self._said_by(writer, line + b"\n")
        elif self._channel in ready:
            yield json.loads(self._channel.recv(_MAX_BYTES))
        # a process that the script left behind may keep its stdout open
        elif self._stdout in ready or self._process.poll() is not None:
            self._is_over = True
            for writer, text in self._texts.items():
                if text:
                    yield from self._said_by(writer, text)

    def _said_by(self, writer: int | None, line: bytes) -> Iterator[Mapping[str, Any]]:
        """Take a line of output, which is a message if it tells of an import, or is JSON with the
        target's metric.
        """
        if line.startswith(_IMPORT_TIME):
            # not all lines that begin so are Python's, or whole
            microseconds, _, rest = line.removeprefix(_IMPORT_TIME).partition(b"|")
            microseconds = microseconds.strip()
            if rest.rpartition(b"|")[2].strip() in _LIGHTNING:
                self._has_own_handler = True
            if not microseconds.isdigit():  # the heading, which each Python prints as it starts
                self._num_pythons += 1
            elif self._reporter is None:  # ranks import side by side, after their launcher
                num_side_by_side = 1 if self._num_pythons == 1 else self._num_devices
                yield {"imported": int(microseconds) / 1e6 / num_side_by_side}
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
            rank = self._stdout.rank(writer)
            reported = {**numbers(found), "metric": metric}
            yield {"report": reported, "rank": rank, "writer": writer}
        elif isinstance(found, dict):
            self._other_names |= dict.fromkeys(found)
            if self._reporter is None:
                yield {"unreported": found}

    def _note_report(self, message: Mapping[str, Any]) -> None:
        process, rank = message.get("process"), message["rank"]
        if process is not None:
            self._waiting[process] = rank
        self._num_reports[rank] += 1
        if rank > 0:
            if process is None and self._num_reports[rank] == 1:
                warnings.warn(
                    f"autotune: process {message['writer']}, whose RANK is {rank}, prints lines of"
                    " JSON, too; those of the one whose RANK is 0 are the evaluations",
                    stacklevel=2,
                )
            check_finite(message["report"], self._metric, rank)
            if self._num_reports[rank] <= self._num_decided:
                self._answer(process, None)
            return
        reporter = (
            ("by lines of JSON", message["writer"])
            if process is None
            else ("by autotune.report", process)
        )
        if self._reporter not in (None, reporter):
            (how, other), (how_now, now) = self._reporter, reporter
            if how != how_now or _is_alive(other):
                raise ConfigError(
                    f"training: the command reports twice, {how}{_in(other)} and {how_now}"
                    f"{_in(now)}; let one process report in one way, the one whose RANK is 0"
                )
        self._reporter = reporter

    def go_on(self) -> None:
        """Tell the processes that have reported as often as the first one that they go on."""
        self._num_decided += 1
        for process, rank in list(self._waiting.items()):
            if self._num_reports[rank] <= self._num_decided:
                self._answer(process, None)

    def keep(self, folder: Path) -> None:
        """Have the script's processes write the training's state, each its part.

        Raises:
            DataError: one could not.
        """
        _each(self.running(), psutil.Process.resume)
        until = time.monotonic() + _ARRIVE_SECONDS
        while len(self._waiting) < self._num_devices and time.monotonic() < until:
            list(self._said(_POLL_SECONDS))
        asked = set(self._waiting)
        for process in asked:
            self._answer(process, str(folder), is_last=False)
        while asked:  # up to the trial's deadline
            has_ended = not all(map(_is_alive, asked))
            said = list(self._said(_POLL_SECONDS))
            if not said and has_ended:
                raise DataError(f"{folder}: cannot be written: the script has ended")
            for message in said:
                if message.get("kept"):
                    raise DataError(message["kept"])
                if "kept" in message:
                    asked.discard(message["process"])

    def handles_sigterm(self) -> bool:
        """Whether the processes that train handle SIGTERM, in a trial that may be paused so."""
        if self._has_own_handler or trial().name is None:
            return False
        if (trial().folder.parent / _NOT_PAUSABLE).exists():
            return False
        trainers = _trainers(self.running())
        return bool(trainers) and all(map(_catches_sigterm, trainers))

    def end_by_sigterm(self) -> float:
        """Have the script save into the trial's folder, and end, by SIGTERM.

        Returns:
            The seconds that it trained until it had saved.

        Raises:
            DataError: it does not end, or has saved nothing; it is not paused again.
        """
        began, began_at = time.monotonic(), time.time()
        _each(_trainers(self.running()), psutil.Process.terminate)
        _each(self.running(), psutil.Process.resume)
        self.go_on()  # a handler may but note that the script is to end
        while self._process.poll() is None:
            if time.monotonic() > began + _KEEP_SECONDS:
                _cannot_be_paused()
                raise DataError(
                    f"training: the command was not ended by SIGTERM within {_KEEP_SECONDS:g} s"
                )
            if self._is_over:  # it has closed its stdout
                time.sleep(_POLL_SECONDS)
            list(self._said(_POLL_SECONDS))  # which is no evaluation
            self.go_on()
        if not (saved := own_files()):
            _cannot_be_paused()
            raise DataError(
                "training: the command handles SIGTERM, and saved nothing in its folder"
            )
        # it trains until it saves; processes, and launchers, take seconds to end
        saved_at = max(path.stat().st_mtime for path in saved)
        return min(max(saved_at - began_at, 0.0), time.monotonic() - began)

    def _answer(self, process: int | None, folder: str | None, *, is_last: bool = True) -> None:
        if process is None:  # it printed a line
            return
        with contextlib.suppress(OSError):  # it has ended
            self._channel.sendto(
                json.dumps(folder).encode(), f"{self._channel.getsockname()}.{process}"
            )
        if is_last:
            self._waiting.pop(process, None)

    def check_exit_code(self, *, is_resumed: bool) -> None:
        """Raise an error if the script, which has ended, has failed, or has not reported."""
        exit_code = self._process.wait()
        if exit_code != 0:
            output = "".join(self._output)
            lines = output.splitlines()
            last = last_exception(lines)
            if killed := _KILLED_RANK.search(output):
                rank = killed[killed.lastindex or 0]
                raise ProcessFailedError(
                    f"rank {rank} of the command was ended by SIGKILL", FailureKind.LOST
                )
            # Lightning kills the process that it began in, where another one has failed
            ended = exit_code if exit_code < 0 else 128 - exit_code  # by its shell
            if last is None and kind_of_exit(ended) is FailureKind.LOST:
                raise ProcessFailedError(
                    f"the command was ended by {signal.Signals(-ended).name}", FailureKind.LOST
                )
            if last is not None:  # launchers print a page after it
                lines = lines[: last + 1]
            reason = next(filter(None, map(str.strip, reversed(lines))), "it printed nothing")
            if "ChildFailedError" in reason and (crashed := _CRASHED_RANK.search(output)):
                reason = f"rank {crashed[1]} of the command was ended by {crashed[2]}"
            if "environment variable" in reason and "expected, but not set" in reason:
                reason += "; start it by torchrun --nproc_per_node={devices}"
            kind, is_consequence = kind_of_text(reason)
            if is_consequence:
                raise ProcessFailedError(
                    "a process of the command is gone: another one lost its connection to it (exit"
                    f" code {exit_code})",
                    kind,
                    is_consequence=True,
                )
            first = f"{reason} ({shlex.join(self._parts)} ended with exit code {exit_code})"
            raise ProcessFailedError("\n".join([first, *lines[-20:]]), kind)
        if not self._reporter and not is_resumed:
            raise ConfigError(f"training: {self._why_unreported()}")

    def check_in_time(self, train_seconds: float) -> None:
        """Check that a first evaluation would still be in time.

        Raises:
            TimedOutError: it would not; names what the script prints in its place.
        """
        if train_seconds > self._max_train_seconds:
            raise TimedOutError(f"no evaluation in time: {self._why_unreported()}")

    def _why_unreported(self) -> str:
        """What the script does in place of reporting, and how it would report."""
        names = [*self._other_names][:20]
        found = f"printed lines of JSON with {', '.join(names)}" if names else "reported nothing"
        return (
            f"the command {found}; print a line of JSON with {self._metric}"
            f"{meant_by(names, self._metric)}, or call autotune.report, or give the Trainer"
            " autotune's ReportCallback"
        )

    def end(self) -> None:
        """End a script that still runs, and the processes that it started: by SIGTERM, unless
        nobody is left to note what it would train until then, and save.
        """
        if self._process.poll() is None:
            alive = self.running()
            if not is_owner_gone():
                _each(alive, psutil.Process.terminate)
                _each(alive, psutil.Process.resume)
                _, alive = psutil.wait_procs(alive, _END_SECONDS)
            _each(alive, psutil.Process.kill)
            psutil.wait_procs(alive, _END_SECONDS)  # the next trial needs what they hold
            self._process.wait()

    def running(self) -> list[psutil.Process]:
        """The script's process and all that it started, those that still run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        return []


def _search_path() -> str:
    """Where programs are searched for: beside this interpreter, too, such as ``torchrun`` in an
    environment that was not activated.
    """
    own, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    return path if own in path.split(os.pathsep) else f"{own}{os.pathsep}{path}"


class _Stdout:
    """Where a command prints to.

    Args:
        tells_writers: whether it tells which process wrote: then it is a socket, which cannot be
            opened as ``/dev/stdout``, else a pipe.
    """

    def __init__(self, *, tells_writers: bool) -> None:
        self._source: socket.socket | io.FileIO
        if tells_writers:
            self._source, theirs = socket.socketpair()
            self._source.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self.theirs = theirs.detach()
        else:
            ours, self.theirs = os.pipe()
            self._source = io.FileIO(ours)
        self._ranks: dict[int | None, int] = {None: 0}
        """The ranks of the processes that have written."""

    def fileno(self) -> int:
        """The file descriptor that is read."""
        return self._source.fileno()

    def close(self) -> None:
        """Read no more."""
        self._source.close()

    def read(self) -> tuple[int | None, bytes]:
        """The next piece of output, and the process that wrote it, None where that is not known."""
        if isinstance(self._source, io.FileIO):
            return None, os.read(self.fileno(), _MAX_BYTES)
        read, told, *_ = self._source.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        writer = _CREDENTIALS.unpack(told[0][2])[0] if read and told else None
        if writer is not None and writer not in self._ranks:  # now, while it runs
            self._ranks[writer] = rank_of(environment_of(writer))
        return writer, read

    def rank(self, writer: int | None) -> int:
        """The rank of a process that wrote; 0 where it is not known."""
        return self._ranks.get(writer, 0)


def _trainers(running: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that train: those that a launcher gave a rank, or else the one that a
    chain of shells has started.
    """
    ranks = {each.pid: each for each in running if world_size(environment_of(each.pid)) > 1}
    if ranks:  # without the processes that load their data
        return [each for each in ranks.values() if each.ppid() not in ranks]
    while len(running) > 1 and not _catches_sigterm(running[0]):
        running = running[1:]
    return running[:1]


def _check_ranks(running: Sequence[psutil.Process], num_devices: int) -> None:
    """Check that as many processes train together as the trial has devices."""
    for child in running[1:]:
        size = world_size(environment_of(child.pid))
        if size not in (1, num_devices):
            raise ConfigError(
                f"training: the command started {size} processes that train together, in a"
                f" trial of {num_devices}; tune it with devices={size}, or let it start {{devices}}"
            )


def _in(process: int | None) -> str:
    return "" if process is None else f" in process {process}"


def _is_alive(process: int | None) -> bool:
    """Whether a process runs; True where it is not known which."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process is None or psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def _catches_sigterm(process: psutil.Process) -> bool:
    """Whether a process has a handler of SIGTERM, where Linux tells that."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def _each(processes: Sequence[psutil.Process], action: Callable[[psutil.Process], None]) -> None:
    """Do something to those of the processes that still exist."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            action(process)
