"""Single trainings in fresh processes, for confirmation and comparisons: no earlier training in the
process can influence a run.

A fresh process, one that has never trained, need not import torch anew: the launcher of its machine
forks it (``execution/launcher.py``). On this machine that is the driver's own launcher; on a
cluster each run has a Ray actor with a launcher of its own.
"""

import contextlib
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.config.command_line import Interrupt
from autotune.contention import MAX_RETAKES
from autotune.execution.launcher import Launcher
from autotune.execution.live_run import LiveRun
from autotune.execution.process_group import ProcessGroup
from autotune.execution.task import TrialTask, WorkerReport
from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.tracking.tracker import TrackedTrial

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

_MAX_LOST = 3
"""Maximum number of times in a row that a run is continued whose process was lost or killed from
outside, without progress."""


class FreshProcesses:
    """Trains runs one after another, each in fresh processes.

    Args:
        interrupt: when set, ends the current run, and after its notice as soon as that is saved; no
            further run begins.
        max_retakes: how often a run is repeated if its times were spoilt by something else on the
            machine. Once that did not help, runs are not repeated until one comes out unspoilt: the
            machine is always that busy.
        launcher: the driver's own launcher; None on a cluster.
        devices: ids of the launcher's GPUs that the runs share; None for the first ones.
        shortage: see ``fresh_worker``; for a cluster.
    """

    def __init__(
        self,
        *,
        interrupt: Interrupt,
        max_retakes: int = MAX_RETAKES,
        launcher: Launcher | None = None,
        devices: Sequence[str] | None = None,
        shortage: Callable[[TrialTask], str | None] = lambda task: None,
    ) -> None:
        self._interrupt, self._shortage = interrupt, shortage
        self._max_retakes = max_retakes
        self._launcher, self._devices = launcher, devices
        self._is_always_busy = False

    def train(
        self,
        task: TrialTask,
        tracked: TrackedTrial,
        on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
    ) -> TrialResult | None:
        """Train a run to its end, from its last state if an earlier process has begun it.

        It continues if its process was killed from outside, which says nothing of a configuration,
        or too little, and is repeated if its times were spoilt.

        Returns:
            The result of the last repeat; None if it was interrupted.

        Raises:
            ClusterError: a process did not start.
        """
        max_retakes = 0 if self._is_always_busy else self._max_retakes
        num_retakes = num_lost = 0
        run = LiveRun(task=replace(task, is_resumed=True), tracked=tracked)
        while not self._interrupt.notice.is_set():
            last = self._trained_once(run, on_evaluation)
            if last is None or last.outcome is None:
                return None
            is_lost = last.outcome is Outcome.LOST
            if num_lost < (_MAX_LOST if is_lost else int(last.is_tried_twice)):
                logger.info("%s: %s; it continues from its last state", task.name, last.error)
                num_lost = 0 if is_lost and run.has_progressed else num_lost + 1
                run.lost_worker()
                run.task = replace(task, is_resumed=True)
                continue
            result = run.result(last.outcome, last.failure, last.test_metric)
            if task.state_folder is not None:
                shutil.rmtree(task.state_folder, ignore_errors=True)
            if result.contention is None:
                self._is_always_busy = False
                return result
            is_kept = num_retakes == max_retakes or not result.is_worth_retaking
            again = "it is kept, and marked" if is_kept else "it is taken again"
            logger.info("%s: %s; %s", task.name, result.contention, again)
            if is_kept:
                self._is_always_busy |= num_retakes > 0  # repeating did not help
                return result
            num_retakes += 1
            run = LiveRun(task=task, tracked=tracked)
        return None

    def _trained_once(
        self, run: LiveRun, on_evaluation: Callable[[Evaluation], None]
    ) -> WorkerReport | None:
        """Train a run in fresh processes; its last report, None if it was interrupted."""
        report = None
        run.begun()
        with contextlib.ExitStack() as stack:
            if self._launcher is not None:
                group = ProcessGroup(launcher=self._launcher.address, devices=self._devices)
                stack.callback(group.close)
                train = group.train
            else:
                # imports ray
                from autotune.execution.ray_ranks import fresh_worker  # noqa: PLC0415

                worker = fresh_worker(run.task, self._interrupt.is_set, self._shortage)
                train = stack.enter_context(worker)
            reports = stack.enter_context(
                contextlib.closing(train(run.task, self._interrupt.is_set))
            )
            for report in reports:
                run.reported(report)
                if report.evaluation is not None:
                    run.curve.add(report.evaluation)
                    on_evaluation(report.evaluation)
                if self._interrupt.notice.is_set() and run.is_saved_by(report):
                    return None
        return report
