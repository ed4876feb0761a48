"""One training inside a process that a launcher has started.

How a trial ends is reported as data, not raised. Nothing here needs Ray, so that a fresh process
has little to import.
"""

import contextlib
import logging
import math
import os
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import psutil

from autotune.contention import Contention
from autotune.errors import AutotuneError, DataError, StateError, refusal_in
from autotune.execution.task import (
    LOW_ON_MEMORY,
    RankPlace,
    TrialTask,
    WorkerReport,
    hang_path,
    num_killed_for_memory,
    report_of_end,
)
from autotune.execution.trial_folder import (
    bound_output,
    end_of_output,
    folder_of,
    has_printed,
    trial_folder,
)
from autotune.execution.watchdog import Watchdog, descendants
from autotune.failure import Failure, FailureKind
from autotune.files import appending
from autotune.measurement import OUTPUT_AT, Evaluation
from autotune.mlflow_logs import keep_logs
from autotune.outcome import Outcome
from autotune.remote import paused_while_waiting
from autotune.session import OUTPUT_FILE, environment_of, is_pausable, reserved_port, world_size
from autotune.training.capabilities import visible_devices_environment
from autotune.training.device import memory_held_by_others, share_memory
from autotune.training.failures import failure_of
from autotune.training.parallel.ranks import open_store
from autotune.training.parallel.rendezvous import (
    ContentionNotes,
    Rendezvous,
    follow,
    joined_at,
    noted_contention,
    tell_ranks,
    told_folder,
    torchrun_environment,
)
from autotune.training.parallel.reports import LeadingRank
from autotune.training.run import fingerprint, start_training
from autotune.training.states import TrainingStates

logger = logging.getLogger(__name__)


class TaskRun:
    """One training in this process, asked for one report at a time.

    Args:
        host: this machine's address, at which the other ranks meet this process, the first one.
        place: where this rank is among those on its machine; None for alone.
    """

    def __init__(
        self, task: TrialTask, host: str = "127.0.0.1", place: RankPlace | None = None
    ) -> None:
        self._task, self._place = task, place or RankPlace()
        self._host = host
        self._store: Any = None
        """Where the ranks meet, open as long as this object; None if there is one rank, alone."""
        if task.num_workers > 1 or task.config.has_rendezvous:
            self._store = open_store(host)
        self._entered = contextlib.ExitStack()
        """What this object closes."""
        self._leader: LeadingRank | None = None
        """Speaks to the other ranks of a user's function."""
        self._watchdog = Watchdog(
            deadline_seconds=task.deadline_seconds,
            is_deadline_fixed=task.is_deadline_fixed,
            budget_seconds=task.budget_seconds,
            driver=task.driver,
            hang_file=self._open_hang_file,
            starts_training=task.config.is_command,
        )
        self._entered.callback(self._watchdog.close)
        self._num_killed = num_killed_for_memory()
        self._training: Generator[Evaluation | None, bool | None, float | None] | None = None
        self._states = TrainingStates(
            None if task.state_folder is None else Path(task.state_folder),
            task.checkpoint_seconds,
            task.hosts,
        )
        self._states.saving = self._watchdog.saving
        self._has_reported = False
        self._fingerprint: dict[str, Any] = {}
        self._last: Evaluation | None = None
        self._hang_file: TextIO | None = None
        self._folder: Path | None = None

    @property
    def port(self) -> int | None:
        """Port at which the other ranks meet this process; None if there are no others."""
        return None if self._store is None else int(self._store.port)

    def next_report(self) -> WorkerReport:
        """Train to the next evaluation, or to the training's end.

        At the trial's deadline this process is killed.
        """
        with self._watchdog.on(), paused_while_waiting(self._watchdog.off):
            try:
                self._training = self._training or self._start()
                report = self._report_of(next(self._training))
            except StopIteration as ended:
                outcome = (self._last.outcome if self._last else None) or Outcome.MISSED
                report = WorkerReport(evaluation=None, outcome=outcome, test_metric=ended.value)
            # any error of the trained code is an outcome
            except Exception as error:  # noqa: BLE001
                report = self._report_of_error(error)
        if self._folder is not None:
            bound_output(self._folder)
        contention = self._watchdog.contention(is_last=report.outcome is not None)
        if contention is not None and self._store is not None:
            others = noted_contention(self._store, self._task.num_workers)
            contention = Contention.of_ranks([contention, *others])
        report = replace(report, contention=contention, checkpoint_seconds=self._states.seconds)
        # a process that failed may not have come to the state that it was to continue from
        if self._has_reported or (report.failure is not None and report.evaluation is None):
            return report
        self._has_reported, own = True, self._states.curve.num_evaluations - 1
        numbered = dict(self._states.curve.numbered)
        if report.evaluation is not None:
            numbered.pop(own)
        return replace(report, earlier=numbered)

    def keep(self) -> str | None:
        """Save the training in the task's state folder, for another process to continue.

        Returns:
            Why it could not be saved, in which case it may continue here; None if it was.

        Raises:
            DataError: it could not, and cannot continue: a command ended without saving.
        """
        assert self._training is not None, "nothing was trained yet"
        with self._watchdog.on():
            self._training.send(True)
        return self._states.fault

    def close(self) -> None:
        """End the training where it stands and free its resources."""
        self._entered.close()

    def _report_of(self, evaluation: Evaluation | None) -> WorkerReport:
        if evaluation is None:
            return WorkerReport(evaluation=None, outcome=None, is_saved=True)
        is_first, self._last = self._last is None, evaluation
        is_last = evaluation.outcome is not None
        is_late = is_first and self._folder and evaluation.outcome is Outcome.TIMED_OUT
        return WorkerReport(
            evaluation=evaluation,
            outcome=evaluation.outcome,
            failure=Failure(kind=FailureKind.TIMED_OUT, message=_START_UP.format(evaluation))
            if is_late
            else None,
            fingerprint=self._take_fingerprint(),
            test_metric=self._test_metric(evaluation) if is_last else None,
            can_pause=not is_last
            and self._states.is_kept
            and (self._leader is None or is_pausable(self._leader.can_keep)),
            is_saved=self._states.is_saved,
        )

    def _report_of_error(self, error: Exception) -> WorkerReport:
        failure = failure_of(error)
        if failure.kind is FailureKind.LOST and not isinstance(error, StateError):
            reason, kind = failure.message, FailureKind(failure.kind)
            if not failure.is_consequence and num_killed_for_memory() > self._num_killed:
                reason, kind = f"{reason}{LOW_ON_MEMORY}", FailureKind.MEMORY
            report = report_of_end(self._task, seconds=0.0, reason=reason, kind=kind)
            return report.with_failure(is_consequence=failure.is_consequence)
        if isinstance(error, AutotuneError) and self._folder is not None:
            # a process that the training had started may have printed the reason
            refusal = refusal_in(end_of_output(self._folder)) or failure.message
            failure = replace(failure, message=refusal)
        if isinstance(error, StateError) and failure.kind is FailureKind.LOST:
            self._states.drop_newest()  # the training continues from the state before
        failure = _with_memory(failure, self._task)
        is_data_missing = failure.kind is FailureKind.CONFIGURATION and isinstance(error, DataError)
        return WorkerReport.of(_with_output(failure, self._folder), is_data_missing=is_data_missing)

    def _start(self) -> Generator[Evaluation | None, bool | None, float | None]:
        task = self._task
        if not task.is_resumed:
            self._states.clear()
        if task.weights_path is not None and not Path(task.weights_path).parent.is_dir():
            task = replace(task, weights_path=None)
        _prepare_process(task)
        if task.config.training is not None:
            run = trial_folder(
                folder_of(Path(task.hang_folder), task.name),
                number=task.number,
                seed=task.config.seed,
                is_first=True,
                is_resumed=task.is_resumed,
            )
            self._folder = self._entered.enter_context(run)
            if task.config.has_rendezvous:
                port = self._entered.enter_context(reserved_port())
                tell_ranks(self._store, port, self._folder)
        if task.logs_folder is not None and Path(task.logs_folder).parent.is_dir():
            keep_logs(Path(task.logs_folder, task.name), is_resumed=task.is_resumed)
        kept: dict[str, Any] = {"states": self._states}
        rendezvous = Rendezvous(host=self._host, port=self.port or 0, rank=0, size=task.num_workers)
        if task.config.training is not None:
            self._leader = kept["leader"] = LeadingRank(self._store, task.num_workers)
            enter_rank(task, rendezvous, self._place)
        elif self._store is not None:
            kept["ranks"] = self._entered.enter_context(joined_at(rendezvous, task.config))
        training = start_training(task.config, **_settings(task), **kept)
        return self._entered.enter_context(contextlib.closing(training))

    def _test_metric(self, evaluation: Evaluation) -> float | None:
        """The metric on the test split, which the training's generator returns when it is
        resumed after its last evaluation; None if it is not asked for.
        """
        assert self._training is not None
        if not self._task.score_test:
            return None
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
        started = [*descendants(os.getpid())]
        facts = fingerprint(self._task.config, self._task.num_threads, started)
        told = [*facts.get("warnings", ()), *_idle_devices(self._task, started)]
        self._fingerprint = {**facts, "warnings": told} if told else {**facts}
        if self._task.trials_per_gpu > 1:
            self._fingerprint["trials_per_gpu"] = self._task.trials_per_gpu
        return self._fingerprint

    def _open_hang_file(self) -> TextIO:
        if self._hang_file is None:
            path = hang_path(self._task.name, self._task.hang_folder)
            if not path.parent.is_dir():
                path = Path(tempfile.gettempdir(), path.name)
            self._entered.callback(path.unlink, missing_ok=True)
            self._hang_file = self._entered.enter_context(appending(path))
        return self._hang_file


def _with_output(failure: Failure, folder: Path | None) -> Failure:
    """A failure with the file of all that was printed in a run's folder, if anything was."""
    if folder is None or not failure.has_traceback or not has_printed(folder):
        return failure
    output = str(folder / OUTPUT_FILE)
    return replace(failure, message=f"{failure.message}{OUTPUT_AT}{output}\n", output_path=output)


def _with_memory(failure: Failure, task: TrialTask) -> Failure:
    """A failure with what other programs held of the memory that was too little, if they did: it
    may suffice on another device. Trials that share a GPU have a fixed share each.
    """
    if failure.kind is not FailureKind.MEMORY or task.trials_per_gpu > 1 or not task.num_gpus:
        return failure
    num_gpus = task.num_gpus // task.num_workers
    held = memory_held_by_others(num_gpus, [*descendants(os.getpid())])
    if not held:
        return failure
    said = f"other programs held {held / 2**30:.1f} GiB of the GPU's memory"
    return replace(
        failure,
        message=f"{failure.message.rstrip()} ({said})\n",
        memory_held_by_others_bytes=held,
        is_tried_twice=True,
    )


def _idle_devices(task: TrialTask, started: Sequence[int]) -> list[str]:
    """What is told of a command that has not started a process for each device.

    Args:
        started: ids of the processes that it has started, and its own.
    """
    num_devices = task.config.num_workers
    if not task.config.is_command or num_devices == 1:
        return []
    for process in started:
        with contextlib.suppress(psutil.Error):
            is_spawned = "multiprocessing.spawn" in " ".join(psutil.Process(process).cmdline())
            if is_spawned or world_size(environment_of(process)) > 1:
                return []
    return [
        f"a trial has {num_devices} devices, and its command trains in one process: torchrun"
        " --nproc_per_node={devices} starts one on each"
    ]


def enter_rank(task: TrialTask, rendezvous: Rendezvous, place: RankPlace) -> None:
    """Let a user's function, and libraries that it calls, find the other ranks."""
    if place.devices:
        os.environ.update(visible_devices_environment(place.devices))
    if task.num_workers > 1 and not task.num_gpus:
        os.environ.setdefault(_ON_CPUS, "true")
    if task.config.has_rendezvous:
        os.environ.update(
            torchrun_environment(
                rendezvous,
                local_rank=place.local_rank,
                local_size=place.local_size,
                machine=place.machine,
                run=task.name,
            )
        )


def follow_task(
    task: TrialTask, host: str, port: int, rank: int, place: RankPlace
) -> WorkerReport | None:
    """Train a task as another rank than the first, until that ends.

    Returns this rank's failure, None if there was none.
    """
    _prepare_process(task)
    rendezvous = Rendezvous(host=host, port=port, rank=rank, size=task.num_workers)
    entered, run_folder = contextlib.ExitStack(), None
    if task.config.training is not None:
        run = trial_folder(
            told_folder(rendezvous), number=task.number, seed=task.config.seed, is_first=False
        )
        run_folder = entered.enter_context(run)
        if task.logs_folder is not None:  # those of the first rank are the trial's
            unread = entered.enter_context(tempfile.TemporaryDirectory(prefix="autotune-"))
            keep_logs(Path(unread), is_resumed=False)
        enter_rank(task, rendezvous, place)
    watchdog = Watchdog(
        deadline_seconds=math.inf,  # the first rank's watchdog ends what hangs
        driver=task.driver,
        on_contention=ContentionNotes(rendezvous).note,
    )
    try:
        with entered, watchdog.on(), paused_while_waiting(watchdog.off):
            failure = follow(
                task.config,
                rendezvous,
                state_folder=None if task.state_folder is None else Path(task.state_folder),
                **_settings(task),
            )
            if failure is None:
                return None
            return WorkerReport.of(_with_output(_with_memory(failure, task), run_folder))
    finally:
        watchdog.close()


def _prepare_process(task: TrialTask) -> None:
    """Take the driver's niceness and working folder, make the user's own modules importable, and
    have torch's compiler use the task's folder, as far as this machine permits and has them.
    """
    # only root may lower a niceness; the fingerprint has the actual one
    with contextlib.suppress(OSError):
        # of the main thread, which trains
        os.setpriority(os.PRIO_PROCESS, os.getpid(), task.niceness)
    if Path(task.working_folder).is_dir():
        os.chdir(task.working_folder)
    sys.path.extend(folder for folder in task.code_folders if folder not in sys.path)
    if task.compiled_folder is not None and Path(task.compiled_folder).is_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = task.compiled_folder
    # a command trains in a process of its own, whose memory this one cannot limit
    if task.trials_per_gpu > 1 and not task.config.is_command:
        share_memory(task.trials_per_gpu)


def _settings(task: TrialTask) -> dict[str, Any]:
    """Keyword arguments that all workers of a task pass to ``start_training``."""
    return {
        "cap_seconds": task.cap_seconds,
        "num_threads": task.num_threads,
        "score_test": task.score_test,
        "weights_path": None if task.weights_path is None else Path(task.weights_path),
        "origin": {"study": Path(task.hang_folder).name, "run": task.name},
    }


_ON_CPUS = "ACCELERATE_USE_CPU"
"""Environment variable of Accelerate's by which Hugging Face's Trainer uses several processes on
CPUs without its ``use_cpu``."""
_START_UP = (
    "its first evaluation came after {0.train_seconds:.1f} s of training, and {0.build_seconds:.1f}"
    " s of building before; what is no training, such as reading data, belongs in: with"
    " autotune.building()"
)
"""What is told of a training that took all of its time to its first evaluation."""
