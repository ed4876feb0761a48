"""Single trainings in processes that never trained, for confirmation and comparisons: nothing of an earlier one can have a part in them.

A process that never trained need not import torch anew: a Ray actor for each size of a training holds its resources, and a fork server
(``execution/fork_server.py``) that forks a process for each run. Trainings of several workers, which Ray's own processes make up, start
in actors that are new each time; so do all where the fork server cannot fork.
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

from autotune.contention import MOST_RETAKES
from autotune.errors import ClusterError
from autotune.execution.fork_server import CAN_FORK, LOOK_EVERY_SECONDS, Died, ForkServer
from autotune.execution.task_run import TaskRun, TrialTask, WorkerReport, how_it_died, import_training, say_niceness
from autotune.execution.worker_group import WorkerGroup, bundles
from autotune.measurement import Evaluation, TrialResult

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

_START_SECONDS = 300.0
"""What new processes may take to start before the cluster counts as out of order."""


@dataclass(frozen=True, kw_only=True)
class FreshRun:
    """One training to be made in a process of its own."""

    task: TrialTask
    trial: int
    values: Mapping[str, Any]
    overrides: tuple[str, ...]
    on_start: Callable[[], None]
    """Called when its process begins to train; once, however often the run is taken."""
    on_evaluation: Callable[[Evaluation], None]
    """Called with each evaluation, as it is heard of; the training does not wait for it."""


class FreshProcesses(AbstractContextManager["FreshProcesses"]):
    """Trains single runs, each in a process that never trained, one after another.

    The actor of a size, with its fork server, stays until another size needs its room or the context ends; all runs of a size are
    made on the same machine. A run of several workers has new actors, which import torch anew: they meet by Ray, and a forked process
    is none of Ray's. For the same reason code that is trained here cannot call on Ray.

    Args:
        fit: whether actors of these tasks fit into the cluster side by side.
        interrupt: ends the run that is under way, and lets no further one begin.
        max_retakes: how often a run is made again whose times something else on the machine has spoilt. Where that did not help, none of
            the next ones is, until one comes out unspoilt: the machine is just so.
        can_fork: whether processes are forked; else all runs have new actors.
        fork_server: one of the driver's own, where Ray holds this machine alone: it takes the actors' place.
    """

    def __init__(
        self,
        *,
        fit: Callable[[Sequence[TrialTask]], bool],
        interrupt: threading.Event,
        max_retakes: int = MOST_RETAKES,
        can_fork: bool = CAN_FORK,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._fork_server = fork_server
        self._fit = fit
        self._interrupt = interrupt
        self._workers: dict[_Size, _Worker | _OwnWorker] = {}
        """Of the sizes that were asked for, the latest last."""
        self._max_retakes = max_retakes
        self._is_always_busy = False
        self._can_fork = can_fork

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for size in list(self._workers):
            self._end(size)

    def train(self, run: FreshRun) -> TrialResult | None:
        """Train a run to its end; again where something else wanted the machine too much, and what is kept then says so.

        Returns:
            What became of it; None where it was interrupted.

        Raises:
            ClusterError: a process did not start, or was not a new one.
        """
        max_retakes = 0 if self._is_always_busy else self._max_retakes
        for number in range(max_retakes + 1):
            result = self._train_once(run, is_first=number == 0)
            if result is None or result.contention is None:
                self._is_always_busy = False
                break
            again = "it is taken again" if number < max_retakes else "it is kept, and marked"
            logger.info("%s: %s; %s", run.task.name, result.contention, again)
        else:
            self._is_always_busy = self._is_always_busy or max_retakes > 0  # that did not help
        return result

    def _train_once(self, run: FreshRun, *, is_first: bool) -> TrialResult | None:
        worker = None if self._interrupt.is_set() else self._ready_worker(run.task)
        if worker is None:
            return None
        if is_first:
            run.on_start()
        is_fit = False
        try:
            result, is_fit = _train(run, worker.reports(run.task, self._interrupt))
        finally:
            if not (is_fit and worker.forks):
                self._end(_Size.of(run.task))
        return result

    def _ready_worker(self, task: TrialTask) -> "_Worker | _OwnWorker | None":
        """The actor for runs of the task's size, with all that a training needs imported; None where that was interrupted."""
        size = _Size.of(task)
        worker = self._workers.pop(size, None)
        if worker is not None:
            self._workers[size] = worker
            return worker
        while self._workers and not self._fit([*(each.task for each in self._workers.values()), task]):
            self._end(next(iter(self._workers)))
        worker = self._workers[size] = self._new_worker(task)
        try:
            fault = worker.fault(self._interrupt)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            raise ClusterError(f"no new worker came up: {str(error).splitlines()[0]}") from error
        if self._interrupt.is_set():
            return None
        if fault is None:
            return worker
        logger.warning("each fresh process imports torch anew, since the one that was to fork them cannot: %s", fault)
        self._can_fork = False
        self._end(size)
        return self._ready_worker(task)

    def _new_worker(self, task: TrialTask) -> "_Worker | _OwnWorker":
        if task.num_workers > 1 or not self._can_fork:
            return _Worker(task, forks=False)
        if self._fork_server is not None and self._fork_server.fault(self._interrupt.is_set) is not None:
            self._fork_server = None
        return _Worker(task, forks=True) if self._fork_server is None else _OwnWorker(task, self._fork_server)

    def _end(self, size: "_Size") -> None:
        worker = self._workers.pop(size, None)
        if worker is not None:
            worker.end()


@dataclass(frozen=True, kw_only=True)
class _Size:
    """What actors for runs must have in common."""

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
    """An actor in a placement group of its own.

    Args:
        task: one of those that it is for.
        forks: whether it forks a process for each run, or is itself the process of one run.
    """

    def __init__(self, task: TrialTask, *, forks: bool) -> None:
        self.task, self.forks = task, forks
        self._group = placement_group(bundles(task), strategy=task.placement)
        self._actor = ray.remote(_ForkingWorker if forks else _NewWorker).options(**_resources(task, self._group)).remote()

    def fault(self, interrupt: threading.Event) -> str | None:
        """Why it cannot fork, once it is ready to train; None where it can, and once ``interrupt`` is set.

        Raises:
            ray.exceptions.GetTimeoutError: it is not ready in time.
            ray.exceptions.RayActorError: it ended.
        """
        until = time.monotonic() + _START_SECONDS
        coming = self._actor.fault.remote()
        while not ray.wait([coming], timeout=LOOK_EVERY_SECONDS)[0]:
            if interrupt.is_set():
                return None
            if time.monotonic() > until:
                break
        fault: str | None = ray.get(coming, timeout=0)
        return fault

    def reports(self, task: TrialTask, interrupt: threading.Event) -> Iterator[WorkerReport | Died]:
        """A training's reports up to the one that has its outcome, or that it died; fewer once ``interrupt`` is set."""
        coming = self._actor.run.options(num_returns="streaming").remote(task)
        while True:
            while not ray.wait([coming], timeout=LOOK_EVERY_SECONDS)[0]:
                if interrupt.is_set():
                    return
            report: WorkerReport | Died = ray.get(next(coming))
            yield report
            if isinstance(report, Died) or report.outcome is not None:
                return

    def end(self) -> None:
        """End the process, and with it whatever it still trains; its room is free."""
        ray.kill(self._actor)
        remove_placement_group(self._group)


class _OwnWorker:
    """A fork server of the driver's own, in an actor's place: nothing else is trained on this machine, and so it holds no resources."""

    forks = True

    def __init__(self, task: TrialTask, server: ForkServer) -> None:
        self.task = task
        self._server = server

    def fault(self, interrupt: threading.Event) -> str | None:
        """Why it cannot fork, once it is ready; None where it can, and once ``interrupt`` is set."""
        return self._server.fault(interrupt.is_set)

    def reports(self, task: TrialTask, interrupt: threading.Event) -> Iterator[WorkerReport | Died]:
        """A training's reports up to the one that has its outcome, or that it died; fewer once ``interrupt`` is set."""
        return self._server.train(task, interrupt.is_set)

    def end(self) -> None:
        """Nothing is left of a training that has ended; the server serves others, too."""


def _resources(task: TrialTask, group: PlacementGroup) -> dict[str, Any]:
    """Of the first worker: it starts the others in the same placement group."""
    own = bundles(task)[0]
    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True)
    return {"num_cpus": own["CPU"], "num_gpus": own.get("GPU", 0), "max_restarts": 0, "scheduling_strategy": where}


def _train(run: FreshRun, coming: Iterator[WorkerReport | Died]) -> tuple[TrialResult | None, bool]:
    """What became of a run whose reports come, None where it was interrupted; and whether its worker may take another one."""
    task, started_at = run.task, time.time()
    reports: list[WorkerReport] = []
    died: str | None = None
    try:
        for report in coming:
            if isinstance(report, Died):
                died = report.reason
                break
            reports.append(report)
            say_niceness(task, report)
            if report.evaluation is not None:
                run.on_evaluation(report.evaluation)
    except ray.exceptions.RayActorError as error:
        died = str(error)
    if died is not None:
        outcome, why = how_it_died(task, seconds=time.time() - started_at, reason=died)
        reports.append(WorkerReport(evaluation=None, outcome=outcome, error=why))
    if not reports or reports[-1].outcome is None:
        return None, False
    if not reports[0].is_first_in_process:
        raise ClusterError(f"{task.name}: ran in a process that had trained before; this run needs a fresh one")
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
    return result, died is None


def _contention(reports: Sequence[WorkerReport]) -> str | None:
    """Why the times of a training that has ended say little."""
    found = next((report.contention for report in reversed(reports) if report.contention is not None), None)
    is_timed = reports[-1].outcome is not None and reports[-1].outcome.is_timed
    return found.reason if found is not None and is_timed else None


class _ForkingWorker:
    """Holds the resources of runs of one size, and the fork server that trains them."""

    def __init__(self) -> None:
        self._fork_server = ForkServer()

    def fault(self) -> str | None:
        """Why no run can be forked, once the fork server is ready; None where they can."""
        return self._fork_server.fault()

    def run(self, task: TrialTask) -> Iterator[WorkerReport | Died]:
        """All reports of a training in a forked process; when the last one comes, the process is gone."""
        yield from self._fork_server.train(task)


class _NewWorker:
    """A worker that runs one task and is then ended."""

    def fault(self) -> None:
        """Nothing is wrong, once all that a training needs is imported."""
        import_training()

    def run(self, task: TrialTask) -> Iterator[WorkerReport]:
        """All reports of the training, each sent on its way without waiting for anyone to take it."""
        group = WorkerGroup()
        run = TaskRun(task, group.meet)
        report = group.next_report(run)
        while report.outcome is None:
            yield report
            report = group.next_report(run)
        group.end(run)
        yield report
