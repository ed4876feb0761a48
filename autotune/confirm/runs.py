"""Runs of several configurations, each in a fresh process: how confirmation, comparison and scaling
measure.

The runs of a round share a seed and follow each other directly, in turns, so that disturbances of
the machine affect them alike. Where each has a GPU of its own, rounds go side by side, in lanes;
runs that are compared as a pair share a lane and so its GPU. Trainings on the CPU always go one at
a time. Which runs come next may depend on the results of earlier runs, but not on which lane was
faster.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed, wait
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.execution.cluster import ClusterSize, call, num_side_by_side
from autotune.execution.task import TrialTask
from autotune.files import make_folder
from autotune.measurement import Evaluation, TrialResult
from autotune.objective import Objective
from autotune.outcome import Outcome
from autotune.reporting.scores import run_score
from autotune.tracking.tracker import TrackedTrial
from autotune.tracking.writer import TrackerWriter
from autotune.training.capabilities import Capabilities

if TYPE_CHECKING:
    from autotune.execution.fresh import FreshProcesses  # imports ray
    from autotune.execution.launcher import Launcher


@dataclass(frozen=True, kw_only=True)
class PairedRun:
    """A run to make: one arm in one round."""

    arm: int
    """Identifier of the arm that the run belongs to: a trial's number in confirmation, a side's
    index in a comparison."""
    number: int
    """Number of the round."""
    task: TrialTask
    tracked: TrackedTrial
    on_start: Callable[[], None] = lambda: None
    """Called when the run's process begins to train."""
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """How many trainings go side by side, each on GPUs of its own."""

    number: int = 1
    task: TrialTask | None = None
    """The task whose resources each lane has; None if there is one lane."""
    are_alike: bool = True
    """Whether times in different lanes compare: all GPUs are of one kind."""

    @classmethod
    def of(cls, tasks: Sequence[TrialTask], capabilities: Capabilities) -> "Lanes":
        """The lanes for any of the given tasks: one if some train on the CPU, else as many as
        hold the largest.
        """
        largest = max(tasks, key=attrgetter("num_gpus"))
        number = num_side_by_side(largest) if all(task.num_gpus for task in tasks) else 1
        if number == 1:
            return cls()
        are_alike = largest.accelerator_type is not None or len(capabilities.gpu_kinds) < 2
        return cls(number=number, task=largest, are_alike=are_alike)


def run_in_turns(
    batches: Iterable[Sequence[Sequence[PairedRun]]],
    *,
    lanes: Lanes,
    size: ClusterSize,
    tracker: TrackerWriter,
    objective: Objective,
    interrupt: threading.Event,
    max_retakes: int,
    check_ray: Callable[[], None],
    launcher: "Launcher | None" = None,
    on_end: Callable[[PairedRun, TrialResult], None],
) -> None:
    """Make runs until there are no more, or ``interrupt`` is set: the runs of a unit in turns, in a
    lane that is free.

    Args:
        batches: units of runs that may go side by side. The next batch is taken only after
            ``on_end`` has returned for all of the last one.
        tracker: receives each run; it waits while runs go on CPUs that writing would take from
            them.
        interrupt: is also set here where an error ends the runs of other lanes.
        max_retakes: how often a run is repeated if its times were spoilt by something else on the
            machine.
        check_ray: raises if Ray is gone; called before the death of a worker is held against its
            run.
        launcher: the driver's own launcher; given only if Ray has no machine but this one.
        on_end: called with each run and its result, before the tracker receives the result. It is
            never called by two threads at once; nor are the functions of ``PairedRun`` then.

    Raises:
        ClusterError: a process did not start, or had trained before.
    """
    from autotune.execution.fresh import FreshProcesses  # noqa: PLC0415  # imports ray

    telling = threading.Lock()

    def train(processes: "FreshProcesses", run: PairedRun) -> bool:
        """Make a run; return False if it was interrupted."""
        if not run.task.num_gpus:
            tracker.pause()
        made = _train(processes, replace(run, task=anew(run.task)), tracker, telling)
        if made is None:
            return False
        with telling:
            if made[1].outcome in (Outcome.ERRORED, Outcome.LOST):
                check_ray()
            on_end(run, made[1])
            score = run_score(made[1], objective)
            tracker.finish(*made, score.score if score.reached else None)
        return True

    def work_off(units: Iterator[Sequence[PairedRun]], processes: "FreshProcesses") -> None:
        while not interrupt.is_set():
            with telling:
                unit = next(units, None)
            if unit is None or not all(train(processes, run) for run in unit):
                return

    at_work: list[Future[None]] = []
    with compiled_anew() as anew, contextlib.ExitStack() as stack:
        stack.callback(tracker.go_on)
        processes = [
            stack.enter_context(
                FreshProcesses(
                    fit=size.holds,
                    interrupt=interrupt,
                    max_retakes=max_retakes,
                    launcher=launcher,
                    reserved=lanes.task,
                    lane=lane,
                )
            )
            for lane in range(lanes.number)
        ]
        try:
            for batch in batches:
                units = iter(batch)
                at_work = [Future() for _ in batch[: lanes.number]]
                for lane, done in enumerate(at_work):
                    work = partial(work_off, units, processes[lane])
                    threading.Thread(
                        target=call, args=(work, done), name=f"lane-{lane}", daemon=True
                    ).start()
                for done in as_completed(at_work):
                    done.result()
                if interrupt.is_set():
                    return
        except BaseException:
            interrupt.set()
            raise
        finally:
            wait(at_work)


def _train(
    processes: "FreshProcesses",
    run: PairedRun,
    tracker: TrackerWriter,
    telling: threading.Lock,
) -> tuple[TrackedTrial, TrialResult] | None:
    """Make a run, and return it as the tracker knows it with its result; None if interrupted."""
    from autotune.execution.fresh import FreshRun  # noqa: PLC0415  # imports ray

    tracked = run.tracked

    def on_start() -> None:
        nonlocal tracked
        with telling:
            run.on_start()
            tracked = replace(tracked, started_at=time.time())
            tracker.start(tracked)

    def on_evaluation(evaluation: Evaluation) -> None:
        with telling:
            run.on_evaluation(evaluation)

    fresh = FreshRun(
        task=run.task,
        trial=tracked.trial,
        values=tracked.values,
        overrides=tracked.overrides,
        on_start=on_start,
        on_evaluation=on_evaluation,
    )
    result = processes.train(fresh)
    return None if result is None else (tracked, result)


@contextlib.contextmanager
def compiled_anew() -> Iterator[Callable[[TrialTask], TrialTask]]:
    """Context of runs that use no code compiled before.

    It yields what gives a task the folder for compiled code.

    The folder is in that of the study or comparison, and gone afterwards. The first run of each
    graph compiles it, in a fresh process; later runs are charged what that took.
    """
    folders: set[Path] = set()

    def anew(task: TrialTask) -> TrialTask:
        if task.config.training is not None or task.config.runtime.compile is None:
            return task
        folder = Path(task.hang_folder) / "compiled"
        if folder not in folders:
            shutil.rmtree(folder, ignore_errors=True)  # that of a driver that was killed
            folders.add(make_folder(folder))
            folder.chmod(0o700)  # what is in it is run
        return replace(task, compiled_folder=str(folder))

    try:
        yield anew
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
