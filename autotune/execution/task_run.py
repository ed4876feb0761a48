"""One training inside a worker process: what it is given, and what it reports.

How a trial ends is reported as data. Nothing here needs Ray, so that a fresh process has little to import.
"""

import contextlib
import logging
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from autotune.config.schema import TrialConfig
from autotune.contention import Contention
from autotune.errors import AutotuneError, DataError
from autotune.execution.watch import Watch
from autotune.measurement import Evaluation
from autotune.outcome import Outcome
from autotune.remote.cache import say_what_is_fetched
from autotune.remote.clock_pause import paused_while_waiting

if TYPE_CHECKING:
    from autotune.training.parallel.rendezvous import Failure, Rendezvous  # imports torch

logger = logging.getLogger(__name__)

ACCELERATOR = "accelerator_type:"
"""Begins the name of the resource that Ray gives a machine for its kind of GPU."""


@dataclass(frozen=True, kw_only=True)
class TrialTask:
    """What a worker needs to run one training."""

    name: str
    """Of the run, such as ``trial-7``."""
    config: TrialConfig
    cap_seconds: float
    num_threads: int
    deadline_seconds: float
    """Wall seconds after which the process ends itself: a hung trial cannot be asked to stop."""
    code_folders: tuple[str, ...]
    """Where modules of the user's own may lie."""
    working_folder: str
    """Of the driver: relative paths in a configuration start there, where this machine has it too."""
    hang_folder: str
    """Where a hung process leaves what it was doing, where this machine has it too."""
    num_cpus: int
    """Over all workers."""
    num_gpus: int
    """Over all workers."""
    score_test: bool = False
    weights_path: str | None = None
    """Where the weights are left at the end, where this machine has the folder; a training of the user's own leaves none."""
    state_folder: str | None = None
    """Where the state is kept while the trial is paused; None for one that is never paused."""
    is_paused: bool = False
    """The state is there: the training goes on from it."""
    placement: str = "PACK"
    """How several workers are laid out over machines, in Ray's words."""
    accelerator_type: str | None = None
    """Of the GPUs of each worker's machine, in Ray's words; None for any machine."""
    fork_server: str | None = None
    """Address of the driver's own, which forks trials their processes; None where the worker itself trains them."""
    niceness: int = field(default_factory=lambda: os.getpriority(os.PRIO_PROCESS, 0))
    """Of the driver, which workers take where they may: those of a cluster that was joined have that of its Ray, usually 15."""

    driver: tuple[str, int] = field(default_factory=lambda: (platform.node(), os.getpid()))
    """Host and process: what that has started is the study's own, and no contention."""

    @property
    def num_workers(self) -> int:
        """Processes that train together."""
        return int(self.config.parallelism["num_workers"])


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """What a worker says after each step."""

    evaluation: Evaluation | None
    outcome: Outcome | None
    """Set once, when the training ended."""
    error: str | None = None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """Once, with the first report."""
    test_metric: float | None = None
    is_first_in_process: bool = True
    can_pause: bool = False
    """The training can be kept where it stands, to go on later."""
    contention: Contention | None = None
    """What else wanted the machine so far, as the training's first worker knows; None where it has not looked yet."""
    is_data_missing: bool = False
    """The error is that this machine cannot read the data set, which no other configuration would mend."""


HANG_FILES = "hang-*.txt"
"""What watchdogs write to, by the name of the run; gone once the run ends."""

_num_trainings = 0
"""Trainings that this process began."""


class TaskRun:
    """One training in this process, asked for one report at a time.

    Args:
        meet: sets the other workers of the task to work, and says where this process, the first one, meets them; None where there are none.
    """

    def __init__(self, task: TrialTask, meet: Callable[[TrialTask], "Rendezvous | None"] = lambda task: None) -> None:
        global _num_trainings  # noqa: PLW0603  # counts what this process did
        _num_trainings += 1
        self._is_first = _num_trainings == 1
        self._task = task
        self._watch = Watch(deadline_seconds=task.deadline_seconds, driver=task.driver, hang_file=self._open_hang_file)
        self._training: Generator[Evaluation, Path | None, float | None] | None = None
        self._fingerprint: Mapping[str, Any] = {}
        self._last: Evaluation | None = None
        self._hang_file: TextIO | None = None
        self._meet = meet
        self._rendezvous = contextlib.ExitStack()

    @property
    def num_workers(self) -> int:
        """Processes that train together."""
        return self._task.num_workers

    def next_report(self) -> WorkerReport:
        """Train to the next evaluation, or to the training's end; kills the process at the trial's deadline."""
        with self._watch.on(), paused_while_waiting(self._watch.off):
            report = self._advance()
        found = self._watch.contention(is_last=report.outcome is not None)
        evaluation = report.evaluation and replace(report.evaluation, contention=found)
        return replace(report, evaluation=evaluation, contention=found)

    def keep(self) -> None:
        """Write the training's state to the task's folder, for another process to go on from.

        Raises:
            DataError: it cannot be written.
        """
        assert self._training is not None, "nothing was trained yet"
        assert self._task.state_folder is not None, "this trial is never paused"
        folder = Path(self._task.state_folder)
        folder.mkdir(exist_ok=True)
        self._training.send(folder)

    @property
    def _can_pause(self) -> bool:
        folder = self._task.state_folder
        is_able = self._task.config.training is None and self._task.num_workers == 1
        return folder is not None and is_able and Path(folder).parent.is_dir()

    def close(self) -> None:
        """End the training where it stands and free what it holds."""
        if self._training is not None:
            self._training.close()
            self._training = None
        self._rendezvous.close()
        self._watch.close()
        if self._hang_file is not None:
            self._hang_file.close()
            Path(self._hang_file.name).unlink(missing_ok=True)
            self._hang_file = None

    def _advance(self) -> WorkerReport:
        from autotune.training.device import is_out_of_memory  # noqa: PLC0415  # torch is imported by the first training

        try:
            if self._training is None:
                self._training = self._start()
            evaluation = next(self._training)
        except StopIteration as ended:
            outcome = (self._last.outcome if self._last else None) or Outcome.MISSED
            return WorkerReport(evaluation=None, outcome=outcome, test_metric=ended.value)
        except AutotuneError as error:
            return WorkerReport(evaluation=None, outcome=Outcome.INVALID, error=str(error), is_data_missing=isinstance(error, DataError))
        except Exception as error:  # noqa: BLE001  # any fault of the trained code is an outcome, told with its traceback
            outcome = Outcome.OUT_OF_MEMORY if is_out_of_memory(error) else Outcome.ERRORED
            return WorkerReport(evaluation=None, outcome=outcome, error=traceback.format_exc())
        self._last = evaluation
        report = self._test_report(evaluation) if self._task.score_test and evaluation.outcome is not None else None
        fingerprint = self._take_fingerprint()
        return WorkerReport(
            evaluation=evaluation,
            outcome=evaluation.outcome,
            fingerprint=fingerprint,
            test_metric=report,
            is_first_in_process=self._is_first,
            can_pause=self._can_pause,
        )

    def _start(self) -> Generator[Evaluation, Path | None, float | None]:
        task = self._task
        if task.weights_path is not None and not Path(task.weights_path).parent.is_dir():
            task = replace(task, weights_path=None)
        say_what_is_fetched()  # to the worker's own log
        take_niceness(task)
        go_to_code(task)
        from autotune.training.run import start_training  # noqa: PLC0415  # torch is imported by the first training

        kept: dict[str, Any] = {}
        if task.is_paused and task.state_folder is not None:
            kept["paused_folder"] = Path(task.state_folder)
        if (rendezvous := self._meet(task)) is not None:
            from autotune.training.parallel.rendezvous import attended  # noqa: PLC0415  # likewise

            kept["ranks"] = self._rendezvous.enter_context(attended(rendezvous, task.config))
        return start_training(task.config, **_settings(task), **kept)

    def _test_report(self, evaluation: Evaluation) -> float | None:
        """The test split's metric: what the training returns once it goes on past its last evaluation."""
        assert self._training is not None
        try:
            next(self._training)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]  # the generator's return type
        except DataError as error:  # the weights could not be written; what was measured holds
            logger.warning("%s", error)
            return None
        raise AssertionError(f"training went on after {evaluation.outcome}")

    def _take_fingerprint(self) -> Mapping[str, Any]:
        if self._fingerprint:
            return {}
        from autotune.training.run import fingerprint  # noqa: PLC0415  # torch is imported by the first training

        self._fingerprint = fingerprint(self._task.config, self._task.num_threads)
        return self._fingerprint

    def _open_hang_file(self) -> TextIO:
        if self._hang_file is None:
            path = _hang_path(self._task)
            self._hang_file = (path if path.parent.is_dir() else Path(tempfile.gettempdir()) / path.name).open("w", encoding="utf-8")
        return self._hang_file


def follow_task(task: TrialTask, rendezvous: "Rendezvous") -> "Failure | None":
    """Train a task along with its first worker, until that one ends; what went wrong here, None where nothing did."""
    take_niceness(task)
    go_to_code(task)
    from autotune.training.parallel.rendezvous import follow  # noqa: PLC0415  # torch is imported by the first training

    return follow(task.config, rendezvous, **_settings(task))


def go_to_code(task: TrialTask) -> None:
    """Make the driver's working folder and the user's own modules this process's, where this machine has them."""
    if Path(task.working_folder).is_dir():
        os.chdir(task.working_folder)
    sys.path.extend(folder for folder in task.code_folders if folder not in sys.path)


def take_niceness(task: TrialTask) -> None:
    """Give this thread, and those that it will start, the driver's niceness, where that is permitted."""
    with contextlib.suppress(OSError):  # only root may be less nice than it was; the fingerprint has what it is
        os.setpriority(os.PRIO_PROCESS, 0, task.niceness)


def say_niceness(task: TrialTask, report: WorkerReport) -> None:
    """Log once where a worker could not take the driver's niceness."""
    _say_niceness(report.fingerprint.get("niceness", task.niceness), task.niceness)


@cache
def _say_niceness(found: int, wanted: int) -> None:
    if found > wanted:
        logger.warning("workers run at niceness %d, not at the driver's %d: what else runs on their machines comes first", found, wanted)


def _settings(task: TrialTask) -> dict[str, Any]:
    """What all workers of a task call ``start_training`` with."""
    settings: dict[str, Any] = {"cap_seconds": task.cap_seconds, "num_threads": task.num_threads, "score_test": task.score_test}
    if task.weights_path is not None:
        origin = {"study": Path(task.hang_folder).name, "run": task.name}
        settings |= {"weights_path": Path(task.weights_path), "origin": origin}
    return settings


def how_it_died(task: TrialTask, *, seconds: float, reason: str) -> tuple[Outcome, str]:
    """Outcome and error of a training whose process was gone, ``seconds`` after it began, before it said how it ended."""
    doing = ""
    with contextlib.suppress(OSError):  # the watchdog of another machine could not leave it here
        doing = _hang_path(task).read_text(encoding="utf-8")
        _hang_path(task).unlink()
    if seconds >= task.deadline_seconds:
        return Outcome.TIMED_OUT, f"not ended after {task.deadline_seconds:.0f} s; the worker was ended\n{doing}".rstrip()
    if is_lost(reason):
        return Outcome.LOST, reason
    if any(words in reason for words in ("OutOfMemory", "OUT_OF_MEMORY", "low on memory")):  # Ray's, of a worker that it ended
        return Outcome.OUT_OF_MEMORY, reason
    return Outcome.ERRORED, reason


def is_lost(reason: str) -> bool:
    """Whether a worker went with its machine, by what Ray says of it."""
    return any(words in reason for words in ("node has died", "preempted", "temporarily unavailable"))


def _hang_path(task: TrialTask) -> Path:
    return Path(task.hang_folder) / HANG_FILES.replace("*", task.name)


def import_training() -> None:
    """Import all that a training needs, so that the first one finds it there."""
    import autotune.training.run  # noqa: F401, PLC0415
