"""Runs of several configurations in turns, each in a fresh process: how confirmation and comparison
measure.

The runs of a round share a seed and follow each other directly, in turns, so that disturbances of
the machine affect them alike. Where each has a GPU of its own, rounds go side by side, in lanes;
runs that are compared as a pair share a lane and so its GPU. Trainings on the CPU always go one at
a time. Which runs come next may depend on the results of earlier runs, but not on which lane was
faster.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from autotune.config.command_line import Interrupt
from autotune.execution.cluster import ClusterSize, RaySession, call
from autotune.execution.fresh import FreshProcesses
from autotune.execution.launcher import Launcher
from autotune.execution.plan import TrainingPlan
from autotune.execution.task import TrialTask
from autotune.files import make_folder
from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.reporting.runs_terminal import RunsDisplay
from autotune.reporting.scores import run_score
from autotune.tracking.tracker import TrackedTrial
from autotune.tracking.writer import TrackerWriter
from autotune.training.capabilities import Capabilities, visible_devices


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run to make: one configuration in one round."""

    configuration: int
    """Number of the configuration: its trial in confirmation, its index in a comparison."""
    number: int
    """Number of the round."""
    label: str
    """What the run is called on the terminal."""
    num_runs: int
    """Number of runs that will be made altogether, as far as it is known."""
    task: TrialTask
    tracked: TrackedTrial


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """How many trainings go side by side, each on GPUs of its own."""

    number: int = 1
    num_gpus: int = 0
    """Number of GPUs of each lane; 0 if there is one lane, which has all."""
    are_alike: bool = True
    """Whether times in different lanes compare: all GPUs are of one kind."""

    @classmethod
    def of(
        cls, tasks: Sequence[TrialTask], capabilities: Capabilities, size: ClusterSize
    ) -> "Lanes":
        """The lanes for any of the given tasks: one if some train on the CPU, else as many as
        hold the largest.
        """
        largest = max(tasks, key=attrgetter("num_gpus"))
        number = size.num_side_by_side(largest) if all(task.num_gpus for task in tasks) else 1
        if number == 1:
            return cls()
        are_alike = largest.accelerator_type is not None or len(capabilities.gpu_kinds) < 2
        return cls(number=number, num_gpus=largest.num_gpus, are_alike=are_alike)

    def devices(self, lane: int) -> list[str] | None:
        """Ids of the GPUs of a lane, on this machine; None if there is one lane."""
        first = lane * self.num_gpus
        return visible_devices(first + self.num_gpus)[first:] or None


@dataclass(frozen=True, kw_only=True)
class RunsInTurns:
    """Makes runs in turns, and tells tracker and display of them."""

    plan: TrainingPlan
    connection: RaySession
    tracker: TrackerWriter
    display: RunsDisplay
    interrupt: Interrupt
    """Ends the runs; it is also set here where an error ends the runs of other lanes."""
    launcher: Launcher | None = None
    """The driver's own launcher; given only if Ray has no machine but this one."""
    _telling: threading.Lock = field(default_factory=threading.Lock)

    def make(
        self,
        batches: Iterable[Sequence[Sequence[Run]]],
        *,
        lanes: Lanes,
        on_end: Callable[[Run, TrialResult], None],
    ) -> None:
        """Make runs until there are no more, or ``interrupt`` is set: the runs of a unit in turns,
        in a lane that is free.

        Args:
            batches: units of runs that may go side by side. The next batch is taken only after
                ``on_end`` has returned for all of the last one.
            on_end: called with each run and its result, never by two threads at once.

        Raises:
            ClusterError: a process did not start, or had trained before.
        """
        at_work: list[Future[None]] = []
        with compiled_anew(self.plan.folder) as anew:
            processes = [
                FreshProcesses(
                    interrupt=self.interrupt,
                    max_retakes=self.plan.config.search.max_retakes,
                    launcher=self.launcher,
                    devices=lanes.devices(lane),
                    shortage=self._shortage,
                )
                for lane in range(lanes.number)
            ]
            try:
                for batch in batches:
                    units = iter(batch)
                    at_work = [Future() for _ in batch[: lanes.number]]
                    for of_lane, done in zip(processes, at_work, strict=False):
                        work = partial(
                            self._work_off, units, partial(self._train, of_lane, anew), on_end
                        )
                        threading.Thread(target=call, args=(work, done), daemon=True).start()
                    for done in as_completed(at_work):
                        done.result()
                    if self.interrupt.notice.is_set():
                        return
            except BaseException:
                if not self.connection.is_lost:  # else run() sets it, once it knows of a signal
                    self.interrupt.set()
                raise
            finally:
                wait(at_work)
                self.tracker.may_write.set()

    def _shortage(self, task: TrialTask) -> str | None:
        """Tell that a run waits for machines; why it can never start, None if it can."""
        shortage = self.connection.size_now().shortage(*self.plan.placed(task.config))
        with self._telling:
            why = shortage or "those of the cluster are in use"
            self.display.note(f"{task.name} waits for machines: {why}")
        return None if self.plan.may_grow else shortage

    def _work_off(
        self,
        units: Iterator[Sequence[Run]],
        train: Callable[[Run], TrialResult | None],
        on_end: Callable[[Run, TrialResult], None],
    ) -> None:
        """Make the runs of one unit after the other, until none is left or one is interrupted."""
        while not self.interrupt.notice.is_set():
            with self._telling:
                unit = next(units, ())
            if not unit:
                return
            for run in unit:
                if (result := train(run)) is None:
                    return
                with self._telling:
                    if result.outcome in (Outcome.ERRORED, Outcome.LOST):
                        self.connection.check()  # its worker may have gone with Ray
                    score = run_score(result, self.plan.objective)
                    self.display.ended(run.label, run.num_runs, result, score)
                    on_end(run, result)
                    tracked = replace(run.tracked, started_at=result.started_at)
                    self.tracker.finish(tracked, result, score.score if score.reached else None)

    def _train(
        self,
        processes: FreshProcesses,
        anew: Callable[[TrialTask], TrialTask],
        run: Run,
    ) -> TrialResult | None:
        """Make a run; None if it was interrupted."""

        def on_evaluation(evaluation: Evaluation) -> None:
            with self._telling:
                self.display.evaluated(run.label, evaluation)

        if not run.task.num_gpus and run.task.num_cpus >= self.plan.capabilities.num_cpus:
            self.tracker.may_write.clear()
        with self._telling:
            self.display.started(run.label)
            self.tracker.start(replace(run.tracked, started_at=time.time()))
        return processes.train(anew(run.task), run.tracked, on_evaluation)


@contextmanager
def compiled_anew(study_folder: Path) -> Iterator[Callable[[TrialTask], TrialTask]]:
    """Context of runs that use no code compiled before; yields what lets a task compile anew.

    The folder for compiled code is in that of the study or comparison, and gone afterwards. The
    first run of each graph compiles it, in a fresh process; later runs are charged what that took.
    """
    folder = study_folder / "compiled"
    shutil.rmtree(folder, ignore_errors=True)  # that of a driver that was killed

    def anew(task: TrialTask) -> TrialTask:
        if task.config.training is not None or task.config.runtime.compile is None:
            return task
        make_folder(folder).chmod(0o700)  # what is in it is run
        return replace(task, compiled_folder=str(folder))

    try:
        yield anew
    finally:
        shutil.rmtree(folder, ignore_errors=True)
