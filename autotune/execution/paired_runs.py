"""Runs of several configurations in turns, each in a fresh process, one at a time: what confirmation, comparisons and scaling measure by.

The runs of a round share their seed and are neighbours in time, so that what the machine does to one it does to the others. Which run
comes next may depend on what the ones before it came to.
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
from autotune.tracking.tracker import TrackedTrial

if TYPE_CHECKING:
    from autotune.execution.background_tracker import BackgroundTracker
    from autotune.execution.fork_server import ForkServer


@dataclass(frozen=True, kw_only=True)
class PairedRun:
    """A run that is to be made."""

    arm: int
    """Of the arms that take turns."""
    number: int
    """Of the round."""
    task: TrialTask
    tracked: TrackedTrial
    on_start: Callable[[], None]
    """Called when its process begins to train."""
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None


def run_in_turns(
    runs: Iterable[PairedRun],
    *,
    size: ClusterSize,
    tracker: "BackgroundTracker",
    objective: Objective,
    interrupt: threading.Event,
    max_retakes: int,
    fork_server: "ForkServer | None" = None,
    on_end: Callable[[PairedRun, TrialResult], None],
) -> None:
    """Make runs one after another until there are no more, or ``interrupt`` is set.

    Args:
        tracker: told of each run, once all are over or a minute has passed: writing would take CPUs from those that are timed.
        max_retakes: how often a run is made again whose times something else on the machine has spoilt.
        fork_server: the driver's own, where Ray holds this machine alone.
        runs: each is asked for once ``on_end`` has returned for the one before it.
        on_end: called with each run and what became of it, before the tracker hears of that.

    Raises:
        ClusterError: a process did not start, or was not a new one.
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
            on_end(run, result)
            scored = run_score(result, objective)
            tracker.finish(tracked, result, scored.score if scored.reached else None)
