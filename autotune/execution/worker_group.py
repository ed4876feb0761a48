"""The workers of a trial that train together: the first worker starts the others in the trial's own
placement group.

The other workers end with the first one: Ray ends actors whose owner is gone, and those of a
removed placement group. Between trials of the same size they stay, with all that a training needs
imported; a worker that was lost, or did not end in time, is replaced.

The first worker trains in a separate thread, while its calling thread watches the other workers: if
one vanishes without a message (its machine was cut off), the training would otherwise wait for it
until the trial's deadline.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autotune.execution.cluster import take_assigned_devices
from autotune.execution.fork_server import ForkedRun
from autotune.execution.task_run import (
    ACCELERATOR,
    TaskRun,
    TrialTask,
    WorkerReport,
    follow_task,
    import_training,
)
from autotune.outcome import Outcome

if TYPE_CHECKING:
    from autotune.training.parallel.rendezvous import Failure, Rendezvous  # imports torch

logger = logging.getLogger(__name__)

_END_SECONDS = 10.0
"""Seconds that the first worker may take to end a training, and then the other workers; longer
than leaving the process group takes."""
_EXPLAIN_SECONDS = 5.0
"""Seconds that the other workers may take to report an error after the first worker met one, and
the first one after another did."""
_LOOK_EVERY_SECONDS = 1.0


def bundles(task: TrialTask) -> list[dict[str, float]]:
    """The resources that a trial asks Ray for: one bundle for each worker."""
    size = task.num_workers
    bundle = {"CPU": task.num_cpus / size} | (
        {"GPU": task.num_gpus / size} if task.num_gpus else {}
    )
    if task.accelerator_type is not None:
        bundle[f"{ACCELERATOR}{task.accelerator_type}"] = _ACCELERATOR_AMOUNT
    return [dict(bundle) for _ in range(size)]


_ACCELERATOR_AMOUNT = 0.001
"""Amount of a machine's accelerator resource, which is 1, that a worker takes: as Ray itself
asks, so that a thousand workers can share."""


class WorkerGroup:
    """The other workers of a trial, held by its first worker; they are kept from trial to trial."""

    def __init__(self) -> None:
        self._others: dict[int, Any] = {}
        """Actors of the other workers, by rank, which is also the index of a worker's bundle."""
        self._running: dict[int, Any] = {}
        """Ray's reference to what each other worker will return, by rank."""
        self._store: Any = None
        self._thread: _Thread | None = None
        self.is_stuck = False
        """Whether the training, or its end, waits for a lost worker: then only the end of this
        process ends it."""

    def meet(self, task: TrialTask) -> "Rendezvous | None":
        """Start the other workers on a task and return where this process meets them.

        None for a task of one worker.
        """
        if task.num_workers == 1:
            return None
        from autotune.training.parallel.ranks import open_store  # noqa: PLC0415  # imports torch

        # imports torch
        from autotune.training.parallel.rendezvous import Rendezvous  # noqa: PLC0415

        host = ray.util.get_node_ip_address()
        self._start_others(task)
        self._store = open_store(host)
        rendezvous = Rendezvous(host=host, port=self._store.port, rank=0, size=task.num_workers)
        self._running = {
            rank: other.follow.remote(task, replace(rendezvous, rank=rank))
            for rank, other in self._others.items()
        }
        return rendezvous

    def next_report(self, run: TaskRun | ForkedRun) -> WorkerReport:
        """Train to the next evaluation.

        An error is reported as that of the worker that met it first.
        """
        if run.num_workers == 1:
            return run.next_report()
        self._thread = self._thread or _Thread()
        pending = self._thread.call(run.next_report)
        while not wait_for([pending], _LOOK_EVERY_SECONDS).done:
            failures = [_failure(reference) for reference in self._ended(0)]
            if (
                any(failure is not None for failure in failures)
                and not wait_for([pending], _EXPLAIN_SECONDS).done
            ):
                self.is_stuck = True
                report = _report_of_first(failures)
                is_unfit = report.outcome is not None and report.outcome.needs_new_worker
                # this process must be replaced in any case
                return report if is_unfit else replace(report, outcome=Outcome.ERRORED)
        return self._with_stops(self._explained(pending.result()), run.num_workers)

    def _with_stops(self, report: WorkerReport, size: int) -> WorkerReport:
        """Tell the time that any worker was stopped as the time that the first one was: all
        others waited for it.
        """
        # imports torch
        from autotune.training.parallel.rendezvous import stopped_seconds  # noqa: PLC0415

        contention = report.contention
        if contention is None or self._store is None:
            return report
        contention = replace(
            contention,
            stopped_seconds=max(contention.stopped_seconds, stopped_seconds(self._store, size)),
        )
        evaluation = report.evaluation and replace(report.evaluation, contention=contention)
        return replace(report, evaluation=evaluation, contention=contention)

    def end(self, run: TaskRun | ForkedRun) -> None:
        """End the training where it stands and wait until the other workers have ended.

        Those that failed or do not end are killed.
        """
        if self.is_stuck:
            return
        self._kill_failed(self._ended(0))  # this worker's end would wait for them
        if self._thread is None:
            run.close()
        else:
            self._close_in_time(self._thread.call(run.close))
        ended = self._ended(_END_SECONDS)
        self._kill_failed(ended)
        self._kill(rank for rank, reference in self._running.items() if reference not in ended)
        self._running, self._store = {}, None

    def _close_in_time(self, closed: "Future[None]") -> None:
        """Wait until a training is closed.

        If it waits for another worker, kill the others, and give it up if that doesn't help.
        """
        from autotune.training.parallel.ranks import abort  # noqa: PLC0415  # imports torch

        if not wait_for([closed], _END_SECONDS).done:
            self._kill(self._running)
            abort()
            wait_for([closed], _END_SECONDS)
        if not closed.done() or closed.exception() is not None:
            logger.warning(
                "the training does not end, so its worker is replaced: %s",
                closed.exception() if closed.done() else "it hangs",
            )
            self.is_stuck = True

    def _kill_failed(self, ended: Sequence[Any]) -> None:
        """Kill the workers that have ended with a failure: they may not be fit for another
        training.
        """
        self._kill(
            rank
            for rank, reference in self._running.items()
            if reference in ended and _failure(reference) is not None
        )

    def _kill(self, ranks: Iterable[int]) -> None:
        for rank in list(ranks):
            if (other := self._others.pop(rank, None)) is not None:
                ray.kill(other)

    def _explained(self, report: WorkerReport) -> WorkerReport:
        """Replace a report of an error by that of the worker that met it first: all others only
        fail because they cannot reach it.
        """
        if report.outcome is not Outcome.ERRORED or not self._running:
            return report
        failures = [_failure(reference) for reference in self._ended(_EXPLAIN_SECONDS)]
        return (
            _report_of_first(failures)
            if any(failure is not None and not failure.is_lost_connection for failure in failures)
            else report
        )

    def _ended(self, seconds: float) -> list[Any]:
        """Ray's references of the other workers that end within so many seconds."""
        references = list(self._running.values())
        ended: list[Any] = (
            ray.wait(references, num_returns=len(references), timeout=seconds)[0]
            if references
            else []
        )
        return ended

    def _start_others(self, task: TrialTask) -> None:
        group = ray.util.get_current_placement_group()
        trial_bundles = bundles(task)
        for rank in sorted(set(range(1, task.num_workers)) - set(self._others)):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            resources = {
                "num_cpus": trial_bundles[rank]["CPU"],
                "num_gpus": trial_bundles[rank].get("GPU", 0),
            }
            self._others[rank] = (
                ray.remote(_Other)
                .options(**resources, scheduling_strategy=strategy, max_restarts=0)
                .remote()
            )


def _failure(reference: Any) -> "Failure | None":
    """The failure of a worker that has ended, by Ray's reference to its result.

    None if it ended without one.
    """
    from autotune.training.parallel.rendezvous import Failure  # noqa: PLC0415  # imports torch

    try:
        failure: Failure | None = ray.get(reference)
    except ray.exceptions.RayActorError as error:
        return Failure(
            outcome=Outcome.LOST, error=f"a worker was lost: {str(error).splitlines()[0]}"
        )
    return failure


def _report_of_first(failures: "Sequence[Failure | None]") -> WorkerReport:
    """Report the original failure: one that is not a mere consequence of another worker's end,
    if there is one.
    """
    known = [failure for failure in failures if failure is not None]
    first = min(known, key=lambda failure: failure.is_lost_connection)
    return WorkerReport(evaluation=None, outcome=first.outcome, error=first.error)


class _Thread:
    """One daemon thread that makes calls in turn, so that torch's thread-local state holds for
    all of them.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="first-worker", daemon=True).start()

    def call(self, function: Callable[[], Any]) -> "Future[Any]":
        """Queue a call, and return a future of its result."""
        future: Future[Any] = Future()
        self._calls.put((future, function))
        return future

    def _work(self) -> None:
        while True:
            future, function = self._calls.get()
            try:
                future.set_result(function())
            # raised again where the future's result is taken
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)


class _Other:
    """A Ray actor for a worker other than the first."""

    def __init__(self) -> None:
        take_assigned_devices()
        import_training()

    def follow(self, task: TrialTask, rendezvous: "Rendezvous") -> "Failure | None":
        """Train the task until the first worker ends it.

        Returns this worker's failure, None if there was none.
        """
        return follow_task(task, rendezvous)
