"""What a training function of the user's sees of the trial that it runs in: ``autotune.report`` and
its neighbours.

Outside a trial they do nothing, so that the same code runs by hand. A process runs one training at
a time, and all that it reports goes through its one ``Session``. A script that runs as a command
(``autotune.command``) finds its trial by an environment variable, and reports to the process that
started it.
"""

import contextlib
import difflib
import json
import math
import multiprocessing
import os
import pkgutil
import socket
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from autotune.errors import ConfigError, DivergedError, one_line


class Clock:
    """The ``clock`` of a training function, which marks the parts of its time that are not
    training.

    Args:
        within: makes a context whose time counts as a phase, ``build`` or ``evaluate``.
    """

    def __init__(self, within: Callable[[str], contextlib.AbstractContextManager[None]]) -> None:
        self.within = within

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Context for work that a process pays once, such as loading data or compiling."""
        return self.within("build")

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Context for scoring the validation data."""
        return self.within("evaluate")


class Checkpoint:
    """The state that a training continues from after a pause: ``load`` it before the first step,
    ``save`` it before each report.

    This class is what code outside a trial gets: nothing was saved, and nothing is kept.

    Examples:
        >>> state = checkpoint.load({"model": model, "optimizer": optimizer})
        >>> for epoch in range(state.get("epoch", 0), num_epochs):
        ...     train_one_epoch(model, optimizer)
        ...     checkpoint.save({"model": model, "optimizer": optimizer, "epoch": epoch + 1})
        ...     report(accuracy(model))
    """

    def load(self, objects: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Restore a paused training, its random numbers included; time counts again from here.

        Args:
            objects: objects with ``load_state_dict``, by the names that they were saved by; each
                gets its own state back.

        Returns:
            The saved values by name, without those of ``objects``; empty if the training begins.
        """
        return {}

    def save(
        self,
        state: Mapping[str, Any] | None,
        *,
        weights: Mapping[str, Any] | None = None,
        write_files: Callable[[Path], object] | None = None,
    ) -> None:
        """Say what the training could continue from.

        It is copied only if the next report pauses the training, so this costs no time.

        Args:
            state: values by name: objects with ``state_dict``, or tensors, arrays, numbers, text
                and None, nested in any way. None in place of the mapping says that the training
                cannot continue from here: only its weights are kept.
            weights: named tensors to export if this training becomes the best; those of the first
                ``torch.nn.Module`` in ``state`` if None.
            write_files: writes files of any kind into a folder, for a library that has a checkpoint
                format of its own.
        """

    @property
    def files(self) -> Path | None:
        """Folder with the files that ``write_files`` wrote before the pause.

        None if there are none.
        """
        return None

    @property
    def is_loaded(self) -> bool:
        """Whether a training that was paused has loaded its state; True where none was paused."""
        return True

    @property
    def is_fresh(self) -> bool:
        """Whether ``save`` was called since the last report, so that the training can be paused
        now.
        """
        return False

    @property
    def is_sharded(self) -> bool:
        """Whether each of several processes holds a part of what was saved."""
        return False


@dataclass(frozen=True, kw_only=True)
class Session:
    """The trial that this process trains, with its one reporter."""

    report: Callable[..., None]
    mean: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: values
    """Turns what this process reports into the mean over all processes that train together."""
    clock: Clock
    make_checkpoint: Callable[[], Checkpoint]
    """Returns the one checkpoint of this process."""
    seed: int
    num_processes: int = 1
    """Number of processes that train together."""
    thread: int = field(default_factory=threading.get_ident)
    """Identifier of the thread that trains, the only one that may report."""
    trainers: list[object] = field(default_factory=list)
    """Trainers of Lightning or Hugging Face that began a training, in order; a pause within a
    later training than the first is not possible, because the first would take its checkpoint."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint of this process, which a script makes at its first use."""
        return self.make_checkpoint()

    def report_trainer(
        self,
        trainer: object,
        metrics: Mapping[str, Any],
        monitor: str,
        *,
        step: int,
        epoch: float | None,
        state: Mapping[str, Any] | None,
        weights: Mapping[str, Any] | None,
        write_files: Callable[[Path], object],
    ) -> None:
        """Report what a trainer of Lightning or Hugging Face measured.

        Args:
            metrics: all that was measured, by name.
            monitor: name of the target's metric among them.
            state: as of ``Checkpoint.save``, as are ``weights`` and ``write_files``.

        Raises:
            ConfigError: the metric was not measured.
        """
        if monitor not in metrics:
            raise ConfigError(
                f"autotune: monitor={monitor!r} was not measured; measured were"
                f" {', '.join(metrics) or 'none yet'}"
            )
        self.checkpoint.save(
            state if self.trainers == [trainer] else None, weights=weights, write_files=write_files
        )
        further = numbers({name: value for name, value in metrics.items() if name != monitor})
        self.report(further | {"metric": metrics[monitor], "step": step, "epoch": epoch or 0.0})

    def check_size(self, size: int, made_by: str) -> None:
        """Check that a trainer is made for the processes of the trial.

        Args:
            size: number of processes that the trainer is made for.
            made_by: what says so, for the message.

        Raises:
            ConfigError: it is not.
        """
        if size != self.num_processes:
            raise ConfigError(
                f"autotune: found {made_by}, for {size} device{'s' * (size != 1)}, in a trial of"
                f" {self.num_processes}; tune it with devices={size}, or make it for those of the"
                " trial"
            )


_active: Session | None = None


@contextlib.contextmanager
def in_session(session: Session) -> Iterator[None]:
    """Context in which ``session`` is the trial that user code sees."""
    global _active  # noqa: PLW0603  # a process runs one training at a time
    _active = session
    try:
        with _environment({PROCESS: str(os.getpid())}):
            yield
    finally:
        if _active is session:
            _active = None


def is_pausable(can_keep: Callable[..., bool] = lambda **_: True) -> bool:
    """Whether the training function has saved a state since its last report, and all processes that
    train together can write it, so that it can be paused now.
    """
    if _active is None or not _active.checkpoint.is_fresh:
        return False
    return can_keep(is_sharded=_active.checkpoint.is_sharded)


def current() -> Session | None:
    """The trial that this process trains; None outside a trial.

    Raises:
        ConfigError: the process is one that the training has started, and no rank of it: it trains
            nothing by itself.
    """
    global _active  # noqa: PLW0603  # a process runs one training at a time
    trains, address = os.environ.get(PROCESS), os.environ.get(ADDRESS)
    is_rank = address is not None and rank_of(os.environ) > 0
    # such as a worker of a DataLoader, in a command whose own process has not called this before
    is_daemon = address is not None and multiprocessing.current_process().daemon
    if is_daemon or (trains not in (None, str(os.getpid())) and not is_rank):
        raise ConfigError(
            f"autotune: was called in process {os.getpid()}, which the training in process"
            f" {trains or os.getppid()} has started; call it in the process that trains. To train"
            " with several processes, tune(..., devices=N) calls the function once in each: it"
            " needs no mp.spawn"
        )
    if _active is None and address is not None:
        client = _Client(address, rank_of(os.environ))
        _active = Session(
            report=client.report,
            mean=client.mean,
            clock=Clock(client.within),
            make_checkpoint=client.checkpoint,
            seed=int(os.environ.get(SEED, "0")),
            num_processes=int(os.environ.get(NUM_DEVICES, "1")),
        )
        os.environ[PROCESS] = str(os.getpid())
    return _active


RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "LOCAL_RANK")
WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def rank_of(environment: Mapping[str, str]) -> int:
    """Number of a process among those that a launcher has started; 0 if none has.

    Lightning, which starts the others itself, gives them a ``LOCAL_RANK`` alone.
    """
    return next((int(environment[name]) for name in RANKS if environment.get(name)), 0)


def world_size(environment: Mapping[str, str]) -> int:
    """Number of processes that train together, as launchers say it in the environment."""
    return next((int(environment[name]) for name in WORLD_SIZES if environment.get(name)), 1)


def environment_of(process: int) -> Mapping[str, str]:
    """The environment variables that a process was started with; none if it has ended."""
    # only processes that start others need it
    import psutil  # noqa: PLC0415

    with contextlib.suppress(psutil.Error):
        return psutil.Process(process).environ()
    return {}


@dataclass(frozen=True, kw_only=True)
class TrialInfo:
    """Which trial some code runs in; see ``trial``."""

    number: int | None
    """Number of the trial in its study; a confirmation run has that of the trial whose
    configuration it trains. None outside a study."""
    name: str | None
    """Name of the run, unique in its study, such as ``trial-7`` or ``confirm-7-1``; None outside
    a study."""
    folder: Path
    """Folder for what the run writes, such as logs and checkpoints; no other run has it. Outside
    a study the working folder."""
    seed: int


OUTPUT_FILE, CONFIG_FILES = "output.txt", ("config.yaml", "config.json")
"""Names of the files that autotune writes into a trial's folder."""


def own_files() -> list[Path]:
    """What the code of this trial has written into its folder; nothing outside a trial."""
    if os.environ.get(TRIAL_FOLDER) is None:
        return []
    return [
        path for path in trial().folder.rglob("*") if path.name not in (OUTPUT_FILE, *CONFIG_FILES)
    ]


def trial() -> TrialInfo:
    """The trial that this code runs in, in a process that a training has started, too.

    Examples:
        >>> logger = CSVLogger(autotune.trial().folder)
    """
    folder, number = os.environ.get(TRIAL_FOLDER), os.environ.get(TRIAL_NUMBER)
    return TrialInfo(
        number=int(number) if number else None,
        name=None if folder is None else Path(folder).name,
        folder=Path.cwd() if folder is None else Path(folder),
        seed=int(os.environ.get(SEED, "0")) if _active is None else _active.seed,
    )


@contextlib.contextmanager
def in_trial(trial: TrialInfo) -> Iterator[None]:
    """Context in which ``trial`` is the one that this process, and all that it starts, runs in."""
    number = "" if trial.number is None else str(trial.number)
    with _environment(
        {TRIAL_FOLDER: str(trial.folder), TRIAL_NUMBER: number, SEED: str(trial.seed)}
    ):
        yield


def refuse_within_training(command: str = "tune") -> None:
    """Refuse a command that starts processes of its own in a process that trains, or that is one of
    several which a launcher has started.

    A batch script's own shell, which knows the job's number of tasks, is none of them. The first
    task of a SLURM step is let through with one task a node, since Ray has such a step, and the
    driver may be started within it (``ray symmetric-run``); and in a shell of ``srun --pty``.

    Raises:
        ConfigError: this is such a process.
    """
    if PROCESS in os.environ or ADDRESS in os.environ:
        raise ConfigError(
            f"{command}: was called within a trial; in a script that is trained, or starts"
            " processes, it belongs beneath if __name__ == '__main__'"
        )
    *launchers, slurm = WORLD_SIZES
    if (size := os.environ.get(slurm) or "1") != "1":
        task, nodes = (os.environ.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_NODES"))
        if task != "0" or (nodes != size and "SLURM_PTY_PORT" not in os.environ):
            raise ConfigError(
                f"{command}: was called in task {task} of {size} that srun has started ({slurm});"
                " start it once, with srun --ntasks=1 or by the batch script itself: a study starts"
                " its own processes"
            )
        launchers = ["WORLD_SIZE"]  # srun sets those of MPI for its own tasks
    for name in launchers:
        if (size := os.environ.get(name) or "1") != "1":
            raise ConfigError(
                f"{command}: was called in one of {size} processes ({name}); start it without"
                " torchrun, accelerate launch or mpirun: a study starts its own processes"
            )


def reserved_port() -> socket.socket:
    """A socket that keeps a port for a program: the system gives it to nobody else as a free one,
    and whoever is told its number may listen there.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("", 0))
    return kept


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Context with other environment variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


ADDRESS = "AUTOTUNE_SESSION"
"""Environment variable with the path of the socket that a script reports to."""
PROCESS = "AUTOTUNE_PROCESS"
"""Environment variable with the id of the process that trains, for those that it starts."""
SEED = "AUTOTUNE_SEED"
"""Environment variable with the seed of a trial."""
NUM_DEVICES = "AUTOTUNE_DEVICES"
"""Environment variable with the number of a script's devices."""
STATE = "AUTOTUNE_STATE"
"""Environment variable with the folder of the state that a script continues from."""
TRIAL_FOLDER, TRIAL_NUMBER = "AUTOTUNE_TRIAL_FOLDER", "AUTOTUNE_TRIAL_NUMBER"
"""Environment variables with the folder and the number of a trial."""


class _Client:
    """The trial of a script, seen from within one of its processes: each message is a datagram of
    JSON.

    A report is answered with "go on", or first with a folder to write the training's state into.
    """

    def __init__(self, address: str, rank: int) -> None:
        self._rank = rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"{address}.{os.getpid()}")
        self._socket.connect(address)
        self._checkpoint: Any = None
        """The checkpoint of this process; None before its code has asked for it."""

    def checkpoint(self) -> Checkpoint:
        if self._checkpoint is None:  # importing torch takes seconds, and not all scripts need it
            make = pkgutil.resolve_name("autotune.training.checkpoint:script_checkpoint")
            folder = os.environ.get(STATE)
            on_load = partial(self._send, "loaded", self._rank)
            self._checkpoint = make(folder and Path(folder), self._rank, on_load)
        return cast("Checkpoint", self._checkpoint)

    def report(self, *metric: Any, **values: Any) -> None:
        numbers = {
            name: as_number(name, value) for name, value in as_reported(metric, values).items()
        }
        saved = self._checkpoint
        self._send("report", numbers, is_fresh=saved is not None and saved.is_fresh)
        while (folder := self._answer()) is not None:
            self._send("kept", "" if saved is None else saved.fault_of_writing(Path(folder)))
        if saved is not None:
            saved.expire()

    def mean(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        raise ConfigError(
            "autotune.report: reduce='mean' needs tune(function, devices=N); a command's processes"
            " reduce what they report themselves"
        )

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        self._send("enter", phase)
        try:
            yield
        finally:
            self._send("leave", phase)

    def _send(self, verb: str, value: Any, **more: Any) -> None:
        message = {verb: value, "process": os.getpid(), "rank": self._rank, **more}
        try:
            self._socket.send(json.dumps(message).encode())
        except OSError:  # the trial is over
            raise SystemExit(0) from None

    def _answer(self) -> str | None:
        try:
            folder: str | None = json.loads(self._socket.recv(2**16))
        except (OSError, ValueError):  # the trial is over
            raise SystemExit(0) from None
        return folder


def report(*metric: Any, reduce: str | None = None, **values: Any) -> None:
    """Report an evaluation of the trial that this code runs in; outside a trial this does nothing.

    ``report(0.93, epoch=2)``, ``report(accuracy=0.93, epoch=2)`` and ``report({"accuracy": 0.93,
    "epoch": 2})`` say the same.

    The call returns when the training is to continue. Where it is to end, it raises an exception
    that is no ``Exception``. Of several processes that train together the first one's values
    count; the others may call this, too, as often, and then go on or end as the first one does.

    Args:
        metric: value of the target's metric, a number or a tensor of one element; or all values in
            a mapping.
        values: the target's metric by its own name, any of ``loss``, ``step``, ``epoch`` and
            ``samples``, counted since the training began, and further metrics by name, which are
            tracked, and decide nothing that ``target.constraints`` does not ask of them.
        reduce: ``"mean"`` for the mean of what all processes report, each of which must call this.

    Raises:
        ConfigError: another thread than the one that trains called this, or more than the metric
            was given by position.
    """
    if reduce not in (None, "mean"):
        raise ConfigError(f"autotune.report: found reduce={reduce!r}; give 'mean', or leave it out")
    reported = as_reported(metric, values)
    session = current()
    if session is None:
        return
    if threading.get_ident() != session.thread:
        raise ConfigError(
            f"autotune.report: was called in the thread {threading.current_thread().name!r}; call"
            " it in the thread that trains, which stands still while its report is decided upon"
        )
    session.report(**(session.mean(reported) if reduce else reported))


REPORTED = frozenset({"metric", "loss", "step", "epoch", "samples"})
"""Names of reported values that are no further metrics."""


def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a trainer's or a script's values that are numbers; warns once of each other."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = as_number(name, value)
        except ConfigError:
            warnings.warn(
                f"autotune: {name} is not tracked: {type(value).__name__} is no number",
                stacklevel=2,
            )
    return found


def meant_by(names: Iterable[str], metric: str) -> str:
    """A remark on the one of the reported names that the target's metric was probably meant by.

    Empty if none is close.
    """
    # of acc and accuracy, which are 0.54 alike
    close = difflib.get_close_matches(metric, names, n=1, cutoff=0.5)
    return f" (did you mean it by {close[0]}?)" if close else ""


def as_number(name: str, value: Any) -> float:
    """A reported value as a number.

    Raises:
        ConfigError: it is text, a truth value or anything else that is no number.
    """
    is_truth = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    try:
        if is_truth or isinstance(value, str | bytes):
            raise TypeError(f"found {str(value)[:40]!r}")
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(
            f"reported {name} as {type(value).__name__}, which is not a number ({one_line(error)})"
        ) from error


def check_finite(reported: Mapping[str, Any], metric: str, rank: int) -> None:
    """Check what another rank than the first reports, of which nothing else counts.

    Args:
        metric: name of the target's metric.

    Raises:
        DivergedError: the metric or the loss is not finite.
    """
    for name in ("metric", "loss", metric):
        if not math.isfinite(value := reported.get(name, 0.0)):
            shown = metric if name == "metric" else name
            raise DivergedError(f"rank {rank} reported {shown}={value}")


def as_reported(metric: Sequence[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a ``report`` by name; the value given by position is ``metric``.

    Raises:
        ConfigError: more than one argument is given by position.
    """
    if len(metric) > 1:
        found = ", ".join(str(value)[:40] for value in metric)
        raise ConfigError(
            f"autotune.report: found {len(metric)} arguments by position ({found}); give the metric"
            " alone by position, and the others by name, such as step=100"
        )
    if metric and isinstance(metric[0], Mapping):
        return {**{str(name): value for name, value in metric[0].items()}, **values}
    return {"metric": metric[0], **values} if metric else dict(values)


def building() -> contextlib.AbstractContextManager[None]:
    """Context for work that a process pays once, such as loading data or compiling: its time is
    not training.
    """
    return contextlib.nullcontext() if (session := current()) is None else session.clock.building()


def evaluating() -> contextlib.AbstractContextManager[None]:
    """Context for scoring the validation data: its time is not training."""
    return (
        contextlib.nullcontext() if (session := current()) is None else session.clock.evaluating()
    )


def checkpoint() -> Checkpoint:
    """The checkpoint of the trial that this code runs in.

    Outside a trial one that keeps nothing.
    """
    return Checkpoint() if (session := current()) is None else session.checkpoint
