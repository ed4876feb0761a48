"""Single trainings in fresh processes, for confirmation and comparisons: no earlier training in the
process can influence a run.

A fresh process, one that has never trained, need not import torch anew: the launcher of its machine
forks it (``execution/launcher.py``). On this machine that is the driver's own launcher; on a
cluster a Ray actor for each size of task holds the resources and a launcher. Where trainings go
side by side, each has ``FreshProcesses`` of its own, with other GPUs.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autotune.contention import MAX_RETAKES
from autotune.errors import ClusterError
from autotune.execution.launcher import Launcher
from autotune.execution.process_group import POLL_SECONDS, ProcessGroup
from autotune.execution.ray_ranks import bundles, ray_process_group
from autotune.execution.task import (
    MOST_RETRIES,
    TrialTask,
    WorkerReport,
    report_of_end,
    warn_of_worker,
)
from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.training.capabilities import visible_devices

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

_MAX_LOST = 3
"""Maximum number of times that a run is made again whose process was lost or killed from
outside."""
_START_SECONDS = 300.0
"""Seconds that new processes may take to start before the cluster counts as broken."""


@dataclass(frozen=True, kw_only=True)
class FreshRun:
    """One training that is to run in a fresh process."""

    task: TrialTask
    trial: int
    values: Mapping[str, Any]
    overrides: tuple[str, ...]
    on_start: Callable[[], None]
    """Called when the run's process begins to train; only once, even if the run is repeated."""
    on_evaluation: Callable[[Evaluation], None]
    """Called with each evaluation when it arrives; the training does not wait for the call."""


class FreshProcesses(contextlib.AbstractContextManager["FreshProcesses"]):
    """Trains runs one after another, each in fresh processes.

    Args:
        fit: whether actors for the given tasks fit into the cluster side by side.
        interrupt: when set, ends the current run and lets no further run begin.
        max_retakes: how often a run is repeated if its times were spoilt by something else on the
            machine. Once that did not help, runs are not repeated until one comes out unspoilt: the
            machine is always that busy.
        launcher: the driver's own launcher, used instead of actors; None on a cluster.
        reserved: a task that takes as much as any other, where others train side by side with this
            one: its GPUs are kept for the runs here. None if nothing else is trained meanwhile.
        lane: number of this one among those side by side.
    """

    def __init__(
        self,
        *,
        fit: Callable[[Sequence[TrialTask]], bool],
        interrupt: threading.Event,
        max_retakes: int = MAX_RETAKES,
        launcher: Launcher | None = None,
        reserved: TrialTask | None = None,
        lane: int = 0,
    ) -> None:
        self._fit = fit
        self._interrupt = interrupt
        self._max_retakes = max_retakes
        self._is_always_busy = False
        self._reserved, self._lane = reserved, lane
        self._launcher = launcher
        self._actors: dict[tuple[Any, ...], _Actor] = {}
        """An actor for each size of task that is kept ready, the most recently used last."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for actor in self._actors.values():
            actor.end()

    def train(self, run: FreshRun) -> TrialResult | None:
        """Train a run to its end, and repeat it if its times were spoilt or its process was killed;
        the last repeat's result is kept.

        Returns:
            The result of the last repeat; None if it was interrupted.

        Raises:
            ClusterError: a process did not start.
        """
        max_retakes = 0 if self._is_always_busy else self._max_retakes
        for number in range(max_retakes + 1):
            result = self._train_unkilled(run, is_first=number == 0)
            if result is None or result.contention is None:
                self._is_always_busy = False
                break
            again = "it is taken again" if number < max_retakes else "it is kept, and marked"
            logger.info("%s: %s; %s", run.task.name, result.contention, again)
        else:
            self._is_always_busy = self._is_always_busy or max_retakes > 0  # repeating did not help
        return result

    def _train_unkilled(self, run: FreshRun, *, is_first: bool) -> TrialResult | None:
        """Train a run, and again if its process was killed from outside: that says nothing of a
        configuration, or too little.
        """
        for number in range(_MAX_LOST + 1):
            if self._interrupt.is_set():
                return None
            incoming = self._reports(run.task)
            if is_first and number == 0:
                run.on_start()
            result, num_retries = _train(run, incoming)
            if result is None or number >= min(num_retries, _MAX_LOST):
                break
            logger.info("%s: %s; it is made again", run.task.name, result.error)
        return result

    def _reports(self, task: TrialTask) -> Iterator[WorkerReport]:
        """The reports of a training that is about to begin, fewer once ``interrupt`` is set."""
        if self._launcher is None:
            return self._actor(task).reports(task, self._interrupt)
        devices = None
        if self._reserved is not None:
            each, lane = self._reserved.num_gpus, self._lane
            devices = visible_devices((lane + 1) * each)[lane * each :]
        group = ProcessGroup(launcher=self._launcher.address, devices=devices)
        return group.train(task, self._interrupt.is_set)

    def _actor(self, task: TrialTask) -> "_Actor":
        """The actor for runs of the task's size, once it has started.

        Raises:
            ClusterError: the actor did not start.
        """
        size = task.num_workers, task.num_cpus, task.num_gpus, task.accelerator_type, task.placement
        actor = self._actors.pop(size, None)
        # where others train side by side, a second actor would wait for the first one's GPUs
        while actor is None and self._actors:
            others = [other.task for other in self._actors.values()]
            if self._reserved is None and self._fit([*others, task]):
                break
            self._actors.pop(next(iter(self._actors))).end()
        self._actors[size] = actor = actor or _Actor(task)
        try:
            actor.wait_until_ready(self._interrupt)
        except ray.exceptions.RayError as error:
            raise ClusterError(f"no new worker came up: {str(error).splitlines()[0]}") from error
        return actor


class _Worker:
    """A Ray actor that runs trainings one after another, each in new processes."""

    def __init__(self) -> None:
        self._processes: ProcessGroup | None = None

    def ready(self) -> None:
        """Return once the actor has started."""

    def run(self, task: TrialTask) -> Iterator[WorkerReport]:
        """Yield all reports of a training."""
        self._processes = self._processes or ray_process_group(task)
        yield from self._processes.train(task)


class _Actor:
    """A ``_Worker`` and its resources, for tasks of one size."""

    def __init__(self, task: TrialTask) -> None:
        self.task = task
        self._group: PlacementGroup = placement_group(bundles(task), strategy=task.placement)
        bundle = bundles(task)[0]
        self._worker = (
            ray.remote(_Worker)
            .options(
                max_restarts=0,
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group,
                    placement_group_bundle_index=0,
                    placement_group_capture_child_tasks=True,
                ),
            )
            .remote()
        )

    def wait_until_ready(self, interrupt: threading.Event) -> None:
        """Wait until the actor has started, or ``interrupt`` is set.

        Raises:
            ray.exceptions.RayError: the actor ended, or is not ready in time.
        """
        ready, until = self._worker.ready.remote(), time.monotonic() + _START_SECONDS
        while not ray.wait([ready], timeout=POLL_SECONDS)[0]:
            if interrupt.is_set():
                return
            if time.monotonic() > until:
                break
        ray.get(ready, timeout=0)

    def reports(self, task: TrialTask, interrupt: threading.Event) -> Iterator[WorkerReport]:
        """Train a task and yield its reports; fewer once ``interrupt`` is set."""
        stream = self._worker.run.options(num_returns="streaming").remote(task)
        while True:
            while not ray.wait([stream], timeout=POLL_SECONDS)[0]:
                if interrupt.is_set():
                    return
            report: WorkerReport = ray.get(next(stream))
            yield report
            if report.outcome is not None:
                return

    def end(self) -> None:
        """End the actor and any training that it still runs, and free its resources."""
        ray.kill(self._worker)
        remove_placement_group(self._group)


def _train(run: FreshRun, incoming: Iterator[WorkerReport]) -> tuple[TrialResult | None, int]:
    """The result of a run, by its reports as they come, None if it was interrupted.

    Also returns how often the run is to be made again because of how its process ended.
    """
    task, started_at = run.task, time.time()
    reports: list[WorkerReport] = []
    try:
        for report in incoming:
            reports.append(report)
            warn_of_worker(task, report)
            if report.evaluation is not None:
                run.on_evaluation(report.evaluation)
    except ray.exceptions.RayActorError as error:
        seconds = time.time() - started_at
        reports.append(report_of_end(task, seconds=seconds, reason=str(error)))
    last = reports[-1] if reports else None
    if last is None or last.outcome is None:
        return None, 0
    result = TrialResult(
        trial=run.trial,
        values=run.values,
        overrides=run.overrides,
        seed=task.config.seed,
        outcome=last.outcome,
        evaluations=tuple(report.evaluation for report in reports if report.evaluation is not None),
        started_at=started_at,
        stopped_at=time.time(),
        fingerprint=next((report.fingerprint for report in reports if report.fingerprint), {}),
        error=last.error,
        test_metric=last.test_metric,
        contention=_contention(reports),
    )
    return result, MOST_RETRIES if result.outcome is Outcome.LOST else last.num_retries


def _contention(reports: Sequence[WorkerReport]) -> str | None:
    """Why the times of a training that has ended say little about its configuration.

    None if they are to be trusted.
    """
    contention = next(
        (report.contention for report in reversed(reports) if report.contention is not None), None
    )
    is_timed = reports[-1].outcome is not None and reports[-1].outcome.is_timed
    return contention.reason if contention is not None and is_timed else None
