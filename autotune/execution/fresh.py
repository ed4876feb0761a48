"""Single trainings in fresh processes, for confirmation and comparisons: no earlier training in the
process can influence a run.

A fresh process, one that has never trained, need not import torch anew: for each size of task a Ray
actor holds the resources, and its fork server (``execution/fork_server.py``) forks a process for
each run. A training of several workers consists of Ray's own processes, so it starts in new actors
each time; so does every training if the fork server cannot fork.

Where trainings go side by side, each has ``FreshProcesses`` of its own, with GPUs that Ray reserves
for them.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autotune.contention import MAX_RETAKES
from autotune.errors import ClusterError
from autotune.execution.cluster import take_assigned_devices
from autotune.execution.death import MOST_RETRIES
from autotune.execution.fork_server import CAN_FORK, POLL_SECONDS, Died, ForkServer
from autotune.execution.task_run import (
    TaskRun,
    TrialTask,
    WorkerReport,
    import_training,
    report_of_death,
    warn_of_worker,
)
from autotune.execution.worker_group import WorkerGroup, bundles
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


class FreshProcesses(AbstractContextManager["FreshProcesses"]):
    """Trains runs one after another, each in a fresh process.

    The actor for a size of task, with its fork server, stays until another size needs its resources
    or the context ends; all runs of one size are made on the same machine. A run of several workers
    gets new actors, which import torch anew: workers find each other through Ray, and forked
    processes are not Ray's. For the same reason code that is trained here cannot call Ray.

    Args:
        fit: whether actors for the given tasks fit into the cluster side by side.
        interrupt: when set, ends the current run and lets no further run begin.
        max_retakes: how often a run is repeated if its times were spoilt by something else on the
            machine. Once that did not help, runs are not repeated until one comes out unspoilt: the
            machine is always that busy.
        can_fork: whether to fork processes; otherwise every run gets new actors.
        fork_server: the driver's own fork server, used instead of actors; given only if Ray has no
            machine but this one.
        reserved: a task that takes as much as any other. Its resources are reserved from the first
            run on, and all runs are on its GPUs; None if nothing else is trained meanwhile.
    """

    def __init__(
        self,
        *,
        fit: Callable[[Sequence[TrialTask]], bool],
        interrupt: threading.Event,
        max_retakes: int = MAX_RETAKES,
        can_fork: bool = CAN_FORK,
        fork_server: ForkServer | None = None,
        reserved: TrialTask | None = None,
    ) -> None:
        self._fork_server = fork_server
        # a second actor would wait for the first one's GPUs
        self._fit = fit if reserved is None else lambda tasks: len(tasks) == 1
        self._reserved = reserved
        self._reservation: PlacementGroup | None = None
        self._interrupt = interrupt
        self._workers: dict[_Size, _Worker | _DriverWorker] = {}
        """A worker for each size of task that is kept ready, the most recently used last."""
        self._max_retakes = max_retakes
        self._is_always_busy = False
        self._can_fork = can_fork

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for size in list(self._workers):
            self._end(size)
        if self._reservation is not None:
            remove_placement_group(self._reservation)

    def train(self, run: FreshRun) -> TrialResult | None:
        """Train a run to its end, and repeat it if its times were spoilt or its process was killed;
        the last repeat's result is kept.

        Returns:
            The result of the last repeat; None if it was interrupted.

        Raises:
            ClusterError: a process did not start, or had trained before.
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
            result, num_retries = self._train_once(run, is_first=is_first and number == 0)
            if result is None or number >= min(num_retries, _MAX_LOST):
                break
            logger.info("%s: %s; it is made again", run.task.name, result.error)
        return result

    def _train_once(self, run: FreshRun, *, is_first: bool) -> tuple[TrialResult | None, int]:
        """Train a run.

        Also returns how often it is to be made again because of how its process died.
        """
        worker = None if self._interrupt.is_set() else self._ready_worker(run.task)
        if worker is None:
            return None, 0
        if is_first:
            run.on_start()
        is_reusable = False
        try:
            result, num_retries, is_reusable = _train(
                run, worker.reports(run.task, self._interrupt)
            )
        finally:
            if not (is_reusable and worker.forks):
                self._end(_Size.of(run.task))
        return result, num_retries

    def _ready_worker(self, task: TrialTask) -> "_Worker | _DriverWorker | None":
        """The worker for runs of the task's size, once it has imported all that a training needs.

        None if interrupted meanwhile.
        """
        size = _Size.of(task)
        worker = self._workers.pop(size, None)
        if worker is not None:
            self._workers[size] = worker
            return worker
        while self._workers and not self._fit(
            [*(other.task for other in self._workers.values()), task]
        ):
            self._end(next(iter(self._workers)))
        worker = self._workers[size] = self._new_worker(task)
        try:
            fault = worker.fault(self._interrupt)
        except ray.exceptions.RayError as error:
            raise ClusterError(f"no new worker came up: {str(error).splitlines()[0]}") from error
        if self._interrupt.is_set():
            return None
        if fault is None:
            return worker
        logger.warning(
            "each fresh process imports torch anew, since the one that was to fork them cannot: %s",
            fault,
        )
        self._can_fork = False
        self._end(size)
        return self._ready_worker(task)

    def _new_worker(self, task: TrialTask) -> "_Worker | _DriverWorker":
        if self._reserved is not None and self._reservation is None:
            self._reservation = _placement_group(self._reserved)
        if task.num_workers > 1 or not self._can_fork:
            return _Worker(task, forks=False, reservation=self._reservation)
        if (
            self._fork_server is not None
            and self._fork_server.fault(self._interrupt.is_set) is not None
        ):
            self._fork_server = None
        if self._fork_server is None:
            return _Worker(task, forks=True, reservation=self._reservation)
        return _DriverWorker(task, self._fork_server, self._reservation)

    def _end(self, size: "_Size") -> None:
        worker = self._workers.pop(size, None)
        if worker is not None:
            worker.end()


@dataclass(frozen=True, kw_only=True)
class _Size:
    """Resources that a task takes: tasks of equal size can share an actor."""

    num_workers: int
    num_cpus: int
    num_gpus: int
    accelerator_type: str | None
    placement: str

    @classmethod
    def of(cls, task: TrialTask) -> "_Size":
        return cls(
            num_workers=task.num_workers,
            num_cpus=task.num_cpus,
            num_gpus=task.num_gpus,
            accelerator_type=task.accelerator_type,
            placement=task.placement,
        )


class _Worker:
    """A Ray actor that runs tasks of one size.

    Args:
        task: any task of that size.
        forks: whether the actor forks a process for each run, or is itself the process of a single
            run.
        reservation: placement group that the actor is in; None for one of its own.
    """

    def __init__(self, task: TrialTask, *, forks: bool, reservation: PlacementGroup | None) -> None:
        self.task, self.forks = task, forks
        self._own_group = _placement_group(task) if reservation is None else None
        resources = _resources(task, reservation or self._own_group)
        self._actor = (
            ray.remote(_ForkingWorker if forks else _NewWorker)
            .options(max_restarts=0, **resources)
            .remote()
        )

    def fault(self, interrupt: threading.Event) -> str | None:
        """Wait until the actor is ready to train and return why it cannot fork.

        None if it can, or once ``interrupt`` is set.

        Raises:
            ray.exceptions.RayError: the actor ended, or is not ready in time.
        """
        fault: str | None = _answer(self._actor.fault.remote(), interrupt)
        return fault

    def reports(self, task: TrialTask, interrupt: threading.Event) -> Iterator[WorkerReport | Died]:
        """Train a task and yield its reports up to the one with the outcome, or ``Died``.

        Ends early once ``interrupt`` is set.
        """
        stream = self._actor.run.options(num_returns="streaming").remote(task)
        while True:
            while not ray.wait([stream], timeout=POLL_SECONDS)[0]:
                if interrupt.is_set():
                    return
            report: WorkerReport | Died = ray.get(next(stream))
            yield report
            if isinstance(report, Died) or report.outcome is not None:
                return

    def end(self) -> None:
        """End the actor and any training that it still runs, and free its resources."""
        ray.kill(self._actor)
        if self._own_group is not None:
            remove_placement_group(self._own_group)


class _DriverWorker:
    """The driver's own fork server in place of an actor.

    Args:
        reservation: placement group whose GPUs the trainings see; None if nothing else is trained
            on this machine.
    """

    forks = True

    def __init__(
        self, task: TrialTask, server: ForkServer, reservation: PlacementGroup | None
    ) -> None:
        self.task = task
        self._server = server
        self._reservation = reservation
        self._devices: list[str] | None = None

    def fault(self, interrupt: threading.Event) -> str | None:
        """Wait until the fork server is ready and return why it cannot fork.

        None if it can, or once ``interrupt`` is set.

        Raises:
            ray.exceptions.RayError: Ray does not say in time which GPUs are reserved.
        """
        fault = self._server.fault(interrupt.is_set)
        if fault is None and self._reservation is not None:
            asked = (
                ray.remote(_reserved_devices)
                .options(**_resources(self.task, self._reservation))
                .remote(self.task.num_gpus)
            )
            self._devices = _answer(asked, interrupt)
        return fault

    def reports(self, task: TrialTask, interrupt: threading.Event) -> Iterator[WorkerReport | Died]:
        """Train a task and yield its reports up to the one with the outcome, or ``Died``.

        Ends early once ``interrupt`` is set.
        """
        return self._server.train(task, interrupt.is_set, devices=self._devices)

    def end(self) -> None:
        """Do nothing: trainings leave nothing behind, and the fork server has other users."""


def _reserved_devices(num_gpus: int) -> list[str]:
    """Ids of the GPUs that Ray gave to this process, a worker of its own."""
    take_assigned_devices()
    return visible_devices(num_gpus)


def _answer(pending: Any, interrupt: threading.Event) -> Any:
    """Wait for the answer of a process that Ray has yet to start, and return it.

    None once ``interrupt`` is set.

    Raises:
        ray.exceptions.RayError: the process ended, or does not answer in time.
    """
    until = time.monotonic() + _START_SECONDS
    while not ray.wait([pending], timeout=POLL_SECONDS)[0]:
        if interrupt.is_set():
            return None
        if time.monotonic() > until:
            break
    return ray.get(pending, timeout=0)


def _placement_group(task: TrialTask) -> PlacementGroup:
    return placement_group(bundles(task), strategy=task.placement)


def _resources(task: TrialTask, group: PlacementGroup | None) -> dict[str, Any]:
    """Ray options of a task's first worker, which starts the others in the same placement group."""
    bundle = bundles(task)[0]
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    return {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "scheduling_strategy": strategy,
    }


def _train(
    run: FreshRun, incoming: Iterator[WorkerReport | Died]
) -> tuple[TrialResult | None, int, bool]:
    """The result of a run, by its reports as they come, None if it was interrupted.

    Also returns how often the run is to be made again because of how its process died, and whether
    its worker may take another run.
    """
    task, started_at = run.task, time.time()
    reports: list[WorkerReport] = []
    death: str | None = None
    try:
        for report in incoming:
            if isinstance(report, Died):
                death = report.reason
                break
            reports.append(report)
            warn_of_worker(task, report)
            if report.evaluation is not None:
                run.on_evaluation(report.evaluation)
    except ray.exceptions.RayActorError as error:
        death = str(error)
    if death is not None:
        reports.append(report_of_death(task, seconds=time.time() - started_at, reason=death))
    if not reports or reports[-1].outcome is None:
        return None, 0, False
    if not reports[0].is_first_in_process:
        raise ClusterError(
            f"{task.name}: ran in a process that had trained before; this run needs a fresh one"
        )
    result = TrialResult(
        trial=run.trial,
        values=run.values,
        overrides=run.overrides,
        seed=task.config.seed,
        outcome=reports[-1].outcome,
        evaluations=tuple(report.evaluation for report in reports if report.evaluation is not None),
        started_at=started_at,
        stopped_at=time.time(),
        fingerprint=next((report.fingerprint for report in reports if report.fingerprint), {}),
        error=reports[-1].error,
        test_metric=reports[-1].test_metric,
        contention=_contention(reports),
    )
    return (
        result,
        MOST_RETRIES if result.outcome is Outcome.LOST else reports[-1].num_retries,
        death is None,
    )


def _contention(reports: Sequence[WorkerReport]) -> str | None:
    """Why the times of a training that has ended say little about its configuration.

    None if they are to be trusted.
    """
    contention = next(
        (report.contention for report in reversed(reports) if report.contention is not None), None
    )
    is_timed = reports[-1].outcome is not None and reports[-1].outcome.is_timed
    return contention.reason if contention is not None and is_timed else None


class _ForkingWorker:
    """A Ray actor that holds the resources of runs of one size and forks a process for each run."""

    def __init__(self) -> None:
        take_assigned_devices()
        self._fork_server = ForkServer()

    def fault(self) -> str | None:
        """Wait until the fork server is ready and return why it cannot fork; None if it can."""
        return self._fork_server.fault()

    def run(self, task: TrialTask) -> Iterator[WorkerReport | Died]:
        """Yield all reports of a training in a forked process.

        The process is gone when the last report comes.
        """
        yield from self._fork_server.train(task)


class _NewWorker:
    """A Ray actor that trains one task itself and is then ended."""

    def fault(self) -> None:
        """Import all that a training needs; there is no fault to report."""
        take_assigned_devices()
        import_training()

    def run(self, task: TrialTask) -> Iterator[WorkerReport]:
        """Yield all reports of the training, without waiting until anyone receives them."""
        group = WorkerGroup()
        run = TaskRun(task, group.meet)
        report = group.next_report(run)
        while report.outcome is None:
            yield report
            report = group.next_report(run)
        group.end(run)
        yield report
