"""One training inside a worker process: its task, its run and its reports.

How a trial ends is reported as data, not raised. Nothing here needs Ray, so that a fresh process
has little to import.
"""

import contextlib
import logging
import math
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from autotune.config.schema import TrialConfig
from autotune.contention import Contention
from autotune.errors import AutotuneError, ConfigError, DataError, StateError, last_exception
from autotune.execution.process_end import (
    LOW_ON_MEMORY,
    Death,
    death_of,
    hang_path,
    is_killed,
    num_killed_for_memory,
)
from autotune.execution.trial_folder import OUTPUT_FILE, has_printed, last_printed, trial_folder
from autotune.execution.watch import Watch, descendants
from autotune.files import appending, make_folder
from autotune.measurement import OUTPUT_AT, Evaluation
from autotune.mlflow_logs import keep_logs
from autotune.outcome import Outcome
from autotune.remote import paused_while_waiting
from autotune.session import is_pausable

logger = logging.getLogger(__name__)

ACCELERATOR = "accelerator_type:"
"""Prefix of the name of the custom resource that Ray gives a machine for its kind of GPU."""


@dataclass(frozen=True, kw_only=True)
class TrialTask:
    """Everything that a worker needs to run one training."""

    name: str
    """Name of the run, such as ``trial-7``."""
    number: int | None = None
    """Number of the trial whose configuration is trained; None outside a study."""
    config: TrialConfig
    cap_seconds: float
    num_threads: int
    deadline_seconds: float
    """Wall seconds after which the process ends itself: a hung trial cannot be asked to stop."""
    code_folders: tuple[str, ...]
    """Folders that may hold Python modules of the user's own."""
    working_folder: str
    """The driver's working folder: relative paths in a configuration start there if the worker's
    machine has that folder."""
    hang_folder: str
    """Folder where a hung process leaves its stack traces, if the worker's machine has that
    folder."""
    num_cpus: int
    """Number of CPUs of all workers together."""
    num_gpus: int
    """Number of GPUs of all workers together."""
    logs_folder: str | None = None
    """Folder whose folder of the run's name gets what the training's own code logs to MLflow;
    None if it logs where it says."""
    compiled_folder: str | None = None
    """Folder for compiled code in place of the machine's own, if the worker's machine has it."""
    score_test: bool = False
    weights_path: str | None = None
    """File for the weights at the end, if the worker's machine has its folder; a training
    function of the user's writes those it saved."""
    state_folder: str | None = None
    """Folder for the training state while the trial is paused; None for a trial that is never
    paused."""
    is_paused: bool = False
    """Whether the trial has been paused: its training then continues from the state in
    ``state_folder``."""
    placement: str = "PACK"
    """Ray's placement strategy for the workers: how they are distributed over machines."""
    accelerator_type: str | None = None
    """Ray's accelerator type of the GPUs that each worker's machine must have; None for any
    machine."""
    launcher: str | None = None
    """Address of the driver's launcher, if all trainings run on its machine."""
    niceness: int = field(default_factory=lambda: os.getpriority(os.PRIO_PROCESS, 0))
    """The driver's niceness, which workers take if permitted; on a cluster that was joined they
    start with Ray's, usually 15."""
    driver: tuple[str, int] = field(default_factory=lambda: (platform.node(), os.getpid()))
    """Host and process id of the driver: processes that the driver has started belong to the
    study and are no contention."""

    @property
    def num_workers(self) -> int:
        """Number of processes that train together."""
        return int(self.config.num_workers)


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """A worker's report: an evaluation, the end of the training, or both."""

    evaluation: Evaluation | None
    outcome: Outcome | None
    """How the training ended; None in every report before the last."""
    error: str | None = None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """What the numbers depend on, such as versions and device; empty except in the first report
    with an evaluation."""
    test_metric: float | None = None
    can_pause: bool = False
    """Whether the training's state can be kept now, to continue later."""
    contention: Contention | None = None
    """What else used the machine so far, as the training's first worker measured it; None before
    its first measurement."""
    is_data_missing: bool = False
    """Whether the error is that this machine cannot read the data set: then every other
    configuration would fail as well."""
    is_consequence: bool = False
    """Whether a rank only lost its connection to another one, whose error is the real one."""
    num_retries: int = 0
    """Number of times that the point is tried again before the outcome holds, after a process
    was killed from outside."""


class TaskRun:
    """One training in this process, asked for one report at a time.

    Args:
        host: this machine's address, at which the other ranks meet this process, the first one.
    """

    def __init__(self, task: TrialTask, host: str) -> None:
        self._task = task
        self._host = host
        self._store: Any = None
        """Where the ranks meet, open as long as this object; None if there is one rank."""
        if task.num_workers > 1:
            from autotune.training.parallel.ranks import open_store  # noqa: PLC0415  # imports torch

            self._store = open_store(host)
        self._watch = Watch(
            deadline_seconds=task.deadline_seconds,
            driver=task.driver,
            hang_file=self._open_hang_file,
        )
        self._num_killed = num_killed_for_memory()
        self._training: Generator[Evaluation, Path | None, float | None] | None = None
        self._fingerprint: Mapping[str, Any] = {}
        self._last: Evaluation | None = None
        self._hang_file: TextIO | None = None
        self._entered = contextlib.ExitStack()
        self._folder: Path | None = None

    @property
    def port(self) -> int | None:
        """Port at which the other ranks meet this process; None if there are no others."""
        return None if self._store is None else int(self._store.port)

    def next_report(self) -> WorkerReport:
        """Train to the next evaluation, or to the training's end.

        At the trial's deadline this process is killed.
        """
        with self._watch.on(), paused_while_waiting(self._watch.off):
            report = self._advance()
        contention = self._watch.contention(is_last=report.outcome is not None)
        if contention is not None and self._store is not None:
            from autotune.training.parallel.rendezvous import stopped_seconds  # noqa: PLC0415

            # all others waited for one that was stopped
            stopped = stopped_seconds(self._store, self._task.num_workers)
            contention = replace(
                contention, stopped_seconds=max(contention.stopped_seconds, stopped)
            )
        evaluation = report.evaluation and replace(report.evaluation, contention=contention)
        return replace(report, evaluation=evaluation, contention=contention)

    def keep(self) -> None:
        """Write the training's state to the task's state folder, for another process to continue
        from.

        Raises:
            DataError: the state cannot be written.
        """
        assert self._training is not None, "nothing was trained yet"
        assert self._task.state_folder is not None, "this trial is never paused"
        folder = Path(self._task.state_folder)
        make_folder(folder)
        self._training.send(folder)

    @property
    def _can_pause(self) -> bool:
        folder = self._task.state_folder
        is_able = self._task.num_workers == 1 and (
            self._task.config.training is None or is_pausable()
        )
        return folder is not None and is_able and Path(folder).parent.is_dir()

    def close(self) -> None:
        """End the training where it stands and free its resources."""
        if self._training is not None:
            self._training.close()
            self._training = None
        self._entered.close()
        self._watch.close()
        if self._hang_file is not None:
            self._hang_file.close()
            self._hang_path.unlink(missing_ok=True)
            self._hang_file = None

    def _advance(self) -> WorkerReport:
        # torch is imported by the first training
        from autotune.training.device import is_out_of_memory  # noqa: PLC0415

        try:
            if self._training is None:
                self._training = self._start()
            evaluation = next(self._training)
        except StopIteration as ended:
            outcome = (self._last.outcome if self._last else None) or Outcome.MISSED
            return WorkerReport(evaluation=None, outcome=outcome, test_metric=ended.value)
        except StateError as error:  # of a paused trial, whose point is trained anew
            return WorkerReport(evaluation=None, outcome=Outcome.LOST, error=str(error))
        except AutotuneError as error:
            return WorkerReport(
                evaluation=None,
                outcome=Outcome.INVALID,
                error=str(error),
                is_data_missing=isinstance(error, DataError),
            )
        # any error of the trained code is an outcome, reported with its traceback
        except Exception as error:  # noqa: BLE001
            if is_killed(error):
                return report_of_death(
                    self._task, seconds=0.0, reason=f"{_killed_reason(error)}{self._memory_note()}"
                )
            text = traceback.format_exc()
            refusal = _refusal_in(text)
            outcome = (
                Outcome.INVALID
                if refusal
                else Outcome.OUT_OF_MEMORY
                if is_out_of_memory(error)
                else Outcome.ERRORED
            )
            return WorkerReport(
                evaluation=None, outcome=outcome, error=refusal or f"{text}{self._output_note()}"
            )
        is_first, self._last = self._last is None, evaluation
        test_metric = (
            self._test_metric(evaluation)
            if self._task.score_test and evaluation.outcome is not None
            else None
        )
        return WorkerReport(
            evaluation=evaluation,
            outcome=evaluation.outcome,
            error=(
                _START_UP.format(evaluation)
                if is_first and self._folder and evaluation.outcome is Outcome.TIMED_OUT
                else None
            ),
            fingerprint=self._take_fingerprint(),
            test_metric=test_metric,
            can_pause=self._can_pause,
        )

    def _output_note(self) -> str:
        return (
            f"{OUTPUT_AT}{self._folder / OUTPUT_FILE}\n"
            if self._folder is not None and has_printed(self._folder)
            else ""
        )

    def _memory_note(self) -> str:
        return LOW_ON_MEMORY if num_killed_for_memory() > self._num_killed else ""

    def _start(self) -> Generator[Evaluation, Path | None, float | None]:
        task = self._task
        if task.weights_path is not None and not Path(task.weights_path).parent.is_dir():
            task = replace(task, weights_path=None)
        take_niceness(task)
        enter_code_folders(task)
        use_compiled_folder(task)
        if task.config.training is not None:
            run = trial_folder(
                Path(task.hang_folder),
                task.name,
                number=task.number,
                seed=task.config.seed,
                is_resumed=task.is_paused,
            )
            self._folder = self._entered.enter_context(run)
        if task.logs_folder is not None and Path(task.logs_folder).parent.is_dir():
            keep_logs(Path(task.logs_folder, task.name), is_resumed=task.is_paused)
        # torch is imported by the first training
        from autotune.training.run import start_training  # noqa: PLC0415

        kept: dict[str, Any] = {}
        if task.is_paused and task.state_folder is not None:
            kept["paused_folder"] = Path(task.state_folder)
        if self._store is not None:
            # imports torch
            from autotune.training.parallel.rendezvous import joined_at  # noqa: PLC0415

            rendezvous = _rendezvous(task, self._host, self._store.port, rank=0)
            kept["ranks"] = self._entered.enter_context(joined_at(rendezvous, task.config))
        return start_training(task.config, **_settings(task), **kept)

    def _test_metric(self, evaluation: Evaluation) -> float | None:
        """The metric on the test split, which the training's generator returns when it is
        resumed after its last evaluation.
        """
        assert self._training is not None
        try:
            next(self._training)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]  # the generator's return type
        # the weights could not be written; the measurements are still valid
        except DataError as error:
            logger.warning("%s", error)
            return None
        raise AssertionError(f"training went on after {evaluation.outcome}")

    def _take_fingerprint(self) -> Mapping[str, Any]:
        if self._fingerprint:
            return {}
        # torch is imported by the first training
        from autotune.training.run import fingerprint  # noqa: PLC0415

        self._fingerprint = fingerprint(
            self._task.config, self._task.num_threads, [*descendants(os.getpid())]
        )
        return self._fingerprint

    def _open_hang_file(self) -> TextIO:
        if self._hang_file is None:
            self._hang_file = appending(self._hang_path)
        return self._hang_file

    @property
    def _hang_path(self) -> Path:
        path = hang_path(self._task.name, self._task.hang_folder)
        return path if path.parent.is_dir() else Path(tempfile.gettempdir()) / path.name


def _rendezvous(task: TrialTask, host: str, port: int, rank: int) -> Any:
    from autotune.training.parallel.rendezvous import Rendezvous  # noqa: PLC0415  # imports torch

    return Rendezvous(host=host, port=port, rank=rank, size=task.num_workers)


def follow_task(task: TrialTask, *, host: str, port: int, rank: int) -> WorkerReport | None:
    """Train a task as another rank than the first, until that ends.

    Returns this rank's failure, None if there was none.
    """
    take_niceness(task)
    enter_code_folders(task)
    use_compiled_folder(task)
    # torch is imported by the first training
    from autotune.training.parallel.rendezvous import StopNotes, follow  # noqa: PLC0415

    rendezvous = _rendezvous(task, host, port, rank)
    with tempfile.TemporaryFile("w") as nowhere:  # the first worker ends what hangs
        watch = Watch(
            deadline_seconds=math.inf,
            driver=task.driver,
            hang_file=lambda: nowhere,
            on_stopped=StopNotes(rendezvous).note_stopped_seconds,
        )
        try:
            with watch.on(), paused_while_waiting(watch.off):
                failure = follow(task.config, rendezvous, **_settings(task))
        finally:
            watch.close()
    if failure is None:
        return None
    return WorkerReport(
        evaluation=None,
        outcome=failure.outcome,
        error=failure.error,
        is_consequence=failure.is_lost_connection,
    )


def enter_code_folders(task: TrialTask) -> None:
    """Change to the driver's working folder, if this machine has it, and make the user's own
    modules importable.
    """
    if Path(task.working_folder).is_dir():
        os.chdir(task.working_folder)
    sys.path.extend(folder for folder in task.code_folders if folder not in sys.path)


def use_compiled_folder(task: TrialTask) -> None:
    """Let torch's compiler keep its files in the task's folder for compiled code, if there is
    one here.
    """
    if task.compiled_folder is not None and Path(task.compiled_folder).is_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = task.compiled_folder


def take_niceness(task: TrialTask) -> None:
    """Give this thread, and the threads that it will start, the driver's niceness, if that is
    permitted.
    """
    # only root may lower a niceness; the fingerprint has the actual one
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, task.niceness)


def warn_of_worker(task: TrialTask, report: WorkerReport) -> None:
    """Log, once each, if a worker could not take the driver's niceness, and what cannot be told
    of disturbances of its GPU.
    """
    found = report.fingerprint.get("niceness", task.niceness)
    if found > task.niceness:
        _warn_once(
            f"workers run at niceness {found}, not at the driver's {task.niceness}: what else runs"
            " on their machines comes first"
        )
    for line in report.fingerprint.get("untold", ()):
        _warn_once(line)


@cache
def _warn_once(line: str) -> None:
    logger.warning("%s", line)


def _settings(task: TrialTask) -> dict[str, Any]:
    """Keyword arguments that all workers of a task pass to ``start_training``."""
    settings: dict[str, Any] = {
        "cap_seconds": task.cap_seconds,
        "num_threads": task.num_threads,
        "score_test": task.score_test,
    }
    if task.weights_path is not None:
        origin = {"study": Path(task.hang_folder).name, "run": task.name}
        settings |= {"weights_path": Path(task.weights_path), "origin": origin}
    return settings


def outcome_of_death(task: TrialTask, *, seconds: float, reason: str) -> Death:
    """What it says that a training's process died without reporting an outcome, ``seconds``
    after the training began.
    """
    death = death_of(
        task.name,
        task.hang_folder,
        is_past_deadline=seconds >= task.deadline_seconds,
        reason=reason,
    )
    printed = (
        "" if task.config.training is None else last_printed(Path(task.hang_folder), task.name)
    )
    line, *others = death.error.split("\n", 1)
    return death._replace(error="\n".join([f"{line}; {printed}" if printed else line, *others]))


def report_of_death(task: TrialTask, *, seconds: float, reason: str) -> WorkerReport:
    """The report in place of the one that a training's process did not make before it died."""
    death = outcome_of_death(task, seconds=seconds, reason=reason)
    return WorkerReport(
        evaluation=None, outcome=death.outcome, error=death.error, num_retries=death.num_retries
    )


def _refusal_in(traceback_text: str) -> str | None:
    """What autotune refused in a process that the training had started.

    None if that is not what its traceback is about.
    """
    lines = traceback_text.splitlines()
    index = last_exception(lines)
    found = (
        ""
        if index is None
        else lines[index].partition(f"{ConfigError.__module__}.{ConfigError.__name__}: ")[2]
    )
    return found or None


_START_UP = (
    "its first evaluation came after {0.train_seconds:.1f} s of training, and {0.build_seconds:.1f}"
    " s of building before; what is no training, such as reading data, belongs in: with"
    " autotune.building()"
)
"""What is told of a training that took all of its time to its first evaluation."""


def _killed_reason(error: Exception) -> str:
    return f"a process of the training was ended by SIGKILL: {str(error).splitlines()[0]}"
