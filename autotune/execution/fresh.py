"""Single trainings in fresh processes, for confirmation and comparisons: no earlier training in the
process can influence a run.

A fresh process, one that has never trained, need not import torch anew: the launcher of its machine
forks it (``execution/launcher.py``). On this machine that is the driver's own launcher; on a
cluster each run has a Ray actor with a launcher of its own.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from autotune.contention import MAX_RETAKES
from autotune.execution.launcher import Launcher
from autotune.execution.process_group import ProcessGroup
from autotune.execution.task import TrialTask, WorkerReport, warn_of_worker
from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.tracking.tracker import TrackedTrial

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

_MAX_LOST = 3
"""Maximum number of times that a run is made again whose process was lost or killed from
outside."""


class FreshProcesses:
    """Trains runs one after another, each in fresh processes.

    Args:
        interrupt: when set, ends the current run and lets no further run begin.
        max_retakes: how often a run is repeated if its times were spoilt by something else on the
            machine. Once that did not help, runs are not repeated until one comes out unspoilt: the
            machine is always that busy.
        launcher: the driver's own launcher; None on a cluster.
        devices: ids of the launcher's GPUs that the runs share; None for the first ones.
    """

    def __init__(
        self,
        *,
        interrupt: threading.Event,
        max_retakes: int = MAX_RETAKES,
        launcher: Launcher | None = None,
        devices: Sequence[str] | None = None,
    ) -> None:
        self._interrupt = interrupt
        self._max_retakes = max_retakes
        self._launcher, self._devices = launcher, devices
        self._is_always_busy = False

    def train(
        self,
        task: TrialTask,
        tracked: TrackedTrial,
        on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
    ) -> TrialResult | None:
        """Train a run to its end, and repeat it if its times were spoilt or its process was killed
        from outside, which says nothing of a configuration, or too little.

        Returns:
            The result of the last repeat; None if it was interrupted.

        Raises:
            ClusterError: a process did not start.
        """
        max_retakes = 0 if self._is_always_busy else self._max_retakes
        num_retakes = num_lost = 0
        while not self._interrupt.is_set():
            result, is_tried_twice = self._train_once(task, tracked, on_evaluation)
            if result is None:
                return None
            if num_lost < (_MAX_LOST if result.outcome is Outcome.LOST else int(is_tried_twice)):
                logger.info("%s: %s; it is made again", task.name, result.error)
                num_lost += 1
                continue
            if result.contention is None:
                self._is_always_busy = False
                return result
            again = "it is taken again" if num_retakes < max_retakes else "it is kept, and marked"
            logger.info("%s: %s; %s", task.name, result.contention, again)
            if num_retakes == max_retakes:
                self._is_always_busy |= max_retakes > 0  # repeating did not help
                return result
            num_retakes += 1
        return None

    def _train_once(
        self,
        task: TrialTask,
        tracked: TrackedTrial,
        on_evaluation: Callable[[Evaluation], None],
    ) -> tuple[TrialResult | None, bool]:
        """The result of a run, None if it was interrupted, and ``WorkerReport.is_tried_twice``."""
        reports: list[WorkerReport] = []
        with contextlib.ExitStack() as stack:
            if self._launcher is not None:
                group = ProcessGroup(launcher=self._launcher.address, devices=self._devices)
                train = group.train
            else:
                # imports ray
                from autotune.execution.ray_ranks import fresh_worker  # noqa: PLC0415

                train = stack.enter_context(fresh_worker(task, self._interrupt.is_set))
            started_at = time.time()
            for report in train(task, self._interrupt.is_set):
                reports.append(report)
                warn_of_worker(report)
                if report.evaluation is not None:
                    on_evaluation(report.evaluation)
        last = reports[-1] if reports else None
        if last is None or last.outcome is None:
            return None, False
        measured = [report.contention for report in reports if report.contention is not None]
        result = TrialResult(
            trial=tracked.trial,
            values=tracked.values,
            overrides=tracked.overrides,
            seed=task.config.seed,
            outcome=last.outcome,
            evaluations=tuple(each.evaluation for each in reports if each.evaluation is not None),
            started_at=started_at,
            stopped_at=time.time(),
            fingerprint=next((each.fingerprint for each in reports if each.fingerprint), {}),
            error=last.error,
            test_metric=last.test_metric,
            contention=measured[-1].reason if measured and last.outcome.is_timed else None,
        )
        return result, last.is_tried_twice
