"""Runs of several configurations in turns, one at a time, each in a fresh process: how confirmation, comparison and scaling measure.

The runs of a round share a seed and follow each other directly, so that disturbances of the machine affect them alike. Which run comes
next may depend on the results of earlier runs.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.execution.cluster import ClusterSize
from autotune.execution.confirmation import run_score
from autotune.execution.task_run import TrialTask
from autotune.measurement import Evaluation, TrialResult
from autotune.objective import Objective
from autotune.outcome import Outcome
from autotune.tracking.tracker import TrackedTrial

if TYPE_CHECKING:
    from autotune.execution.background_tracker import BackgroundTracker
    from autotune.execution.fork_server import ForkServer


@dataclass(frozen=True, kw_only=True)
class PairedRun:
    """A run to make: one arm in one round."""

    arm: int
    """Identifier of the arm that the run belongs to: a trial's number in confirmation, a side's index in a comparison."""
    number: int
    """Number of the round."""
    task: TrialTask
    tracked: TrackedTrial
    on_start: Callable[[], None]
    """Called when the run's process begins to train."""
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None


def run_in_turns(
    runs: Iterable[PairedRun],
    *,
    size: ClusterSize,
    tracker: "BackgroundTracker",
    objective: Objective,
    interrupt: threading.Event,
    max_retakes: int,
    check_ray: Callable[[], None],
    fork_server: "ForkServer | None" = None,
    on_end: Callable[[PairedRun, TrialResult], None],
) -> None:
    """Make runs one after another until there are no more, or ``interrupt`` is set.

    Args:
        runs: the next run is taken from it only after ``on_end`` has returned for the previous one.
        tracker: receives each run once all runs are over or a minute has passed: writing would take CPUs from runs that are timed.
        max_retakes: how often a run is repeated if its times were spoilt by something else on the machine.
        check_ray: raises if Ray is gone; called before the death of a worker is held against its run.
        fork_server: the driver's own fork server; given only if Ray has no machine but this one.
        on_end: called with each run and its result, before the tracker receives the result.

    Raises:
        ClusterError: a process did not start, or had trained before.
    """
    from autotune.execution.fresh import FreshProcesses, FreshRun  # noqa: PLC0415  # imports ray

    with tracker.held(), FreshProcesses(fit=size.holds, interrupt=interrupt, max_retakes=max_retakes, fork_server=fork_server) as processes:
        for run in runs:
            tracked = run.tracked

            def on_start(run: PairedRun = run) -> None:
                nonlocal tracked
                run.on_start()
                tracked = replace(tracked, started_at=time.time())
                tracker.start(tracked)

            result = processes.train(
                FreshRun(
                    task=run.task,
                    trial=tracked.trial,
                    values=tracked.values,
                    overrides=tracked.overrides,
                    on_start=on_start,
                    on_evaluation=run.on_evaluation,
                )
            )
            if result is None:
                return
            if result.outcome in (Outcome.ERRORED, Outcome.LOST):
                check_ray()
            on_end(run, result)
            scored = run_score(result, objective)
            tracker.finish(tracked, result, scored.score if scored.reached else None)
