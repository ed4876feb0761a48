"""The workers of a trial that train together: the first one starts the others in the trial's own placement group.

They end with it: Ray ends actors whose owner is gone, and a placement group's with the group. Between trials of the same size the
others stay, with all that a training needs imported; one that was lost, or did not end in time, is replaced.

The first worker trains in a thread of its own, and this one looks after the others meanwhile: where one is gone without a word (its
machine was cut off), the training would wait for it until the trial's deadline.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autotune.execution.fork_server import ForkedRun
from autotune.execution.task_run import ACCELERATOR, TaskRun, TrialTask, WorkerReport, follow_task, import_training
from autotune.outcome import Outcome

if TYPE_CHECKING:
    from autotune.training.parallel.rendezvous import Failure, Rendezvous  # imports torch

_END_SECONDS = 10.0
"""What the others may take to end once the first one has."""
_EXPLAIN_SECONDS = 5.0
"""What they may take to say why, once the first one met an error; and what that one may take to meet it, once another has."""
_LOOK_EVERY_SECONDS = 1.0


def bundles(task: TrialTask) -> list[dict[str, float]]:
    """What a trial asks of the cluster: a bundle for each worker."""
    size = task.num_workers
    bundle = {"CPU": task.num_cpus / size} | ({"GPU": task.num_gpus / size} if task.num_gpus else {})
    if task.accelerator_type is not None:
        bundle[f"{ACCELERATOR}{task.accelerator_type}"] = _SOME
    return [dict(bundle) for _ in range(size)]


_SOME = 0.001
"""Of the one that a machine has of its accelerator's name: what Ray itself asks for, so that a thousand workers share it."""


class WorkerGroup:
    """The other workers of one trial after another, as the first one has them."""

    def __init__(self) -> None:
        self._others: dict[int, Any] = {}
        """By rank, which is also the bundle that each lies in."""
        self._running: dict[int, Any] = {}
        self._store: Any = None
        self._thread: _Thread | None = None
        self.is_stuck = False
        """The training waits for a worker that is gone: nothing ends it but the end of this process."""

    def meet(self, task: TrialTask) -> "Rendezvous | None":
        """Set the others to work on a trial; where this process meets them, None for a trial of one worker."""
        if task.num_workers == 1:
            return None
        from autotune.training.parallel.ranks import open_store  # noqa: PLC0415  # likewise
        from autotune.training.parallel.rendezvous import Rendezvous  # noqa: PLC0415  # imports torch

        host = ray.util.get_node_ip_address()
        self._start_others(task)
        self._store = open_store(host)
        at = Rendezvous(host=host, port=self._store.port, rank=0, size=task.num_workers)
        self._running = {rank: other.follow.remote(task, replace(at, rank=rank)) for rank, other in self._others.items()}
        return at

    def next_report(self, run: TaskRun | ForkedRun) -> WorkerReport:
        """Train to the next evaluation; an error is told as that of the worker that met it first."""
        if run.num_workers == 1:
            return run.next_report()
        self._thread = self._thread or _Thread()
        coming = self._thread.call(run.next_report)
        while not wait_for([coming], _LOOK_EVERY_SECONDS).done:
            failures = [_why(running) for running in self._ended(0)]
            if any(each is not None for each in failures) and not wait_for([coming], _EXPLAIN_SECONDS).done:
                self.is_stuck = True
                told = _told(failures)
                unfit = told.outcome is not None and told.outcome.needs_new_worker
                return told if unfit else replace(told, outcome=Outcome.ERRORED)  # whatever it was, this process cannot go on
        report: WorkerReport = coming.result()
        return self._explained(report)

    def end(self, run: TaskRun | ForkedRun) -> None:
        """End the training where it stands, and wait until the others have ended; replace those that do not."""
        if self.is_stuck:
            return
        if self._thread is None:
            run.close()
        else:
            self._thread.call(run.close).result()
        ended = self._ended(_END_SECONDS)
        for rank, running in self._running.items():
            if running not in ended or _why(running) is not None:
                ray.kill(self._others.pop(rank))
        self._running, self._store = {}, None

    def _explained(self, report: WorkerReport) -> WorkerReport:
        """A report of an error here, as that of the worker that met it first: all others meet that they cannot reach it."""
        if report.outcome is not Outcome.ERRORED or not self._running:
            return report
        failures = [_why(running) for running in self._ended(_EXPLAIN_SECONDS)]
        return _told(failures) if any(each is not None and not each.is_of_another for each in failures) else report

    def _ended(self, seconds: float) -> list[Any]:
        """Those of the others that end within so many seconds."""
        running = list(self._running.values())
        ended: list[Any] = ray.wait(running, num_returns=len(running), timeout=seconds)[0] if running else []
        return ended

    def _start_others(self, task: TrialTask) -> None:
        group = ray.util.get_current_placement_group()
        wanted = bundles(task)
        for rank in sorted(set(range(1, task.num_workers)) - set(self._others)):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            resources = {"num_cpus": wanted[rank]["CPU"], "num_gpus": wanted[rank].get("GPU", 0)}
            self._others[rank] = ray.remote(_Other).options(**resources, scheduling_strategy=where, max_restarts=0).remote()


def _why(running: Any) -> "Failure | None":
    """What went wrong in a worker that has ended."""
    from autotune.training.parallel.rendezvous import Failure  # noqa: PLC0415  # imports torch

    try:
        found: Failure | None = ray.get(running)
    except ray.exceptions.RayActorError as error:
        return Failure(outcome=Outcome.LOST, error=f"a worker was lost: {str(error).splitlines()[0]}")
    return found


def _told(failures: "Sequence[Failure | None]") -> WorkerReport:
    """The failure that came first: one that is not of another worker's end, where there is one."""
    known = [each for each in failures if each is not None]
    first = min(known, key=lambda each: each.is_of_another)
    return WorkerReport(evaluation=None, outcome=first.outcome, error=first.error)


class _Thread:
    """One thread that makes calls in turn; what torch keeps by thread holds for all of them. It keeps no process from ending."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="first-worker", daemon=True).start()

    def call(self, made: Callable[[], Any]) -> "Future[Any]":
        """What comes of the call."""
        future: Future[Any] = Future()
        self._calls.put((future, made))
        return future

    def _work(self) -> None:
        while True:
            future, made = self._calls.get()
            try:
                future.set_result(made())
            except BaseException as error:  # noqa: BLE001  # whoever waits for the result meets it
                future.set_exception(error)


class _Other:
    """A worker that is not the first."""

    def __init__(self) -> None:
        import_training()

    def follow(self, task: TrialTask, rendezvous: "Rendezvous") -> "Failure | None":
        """Train along until the first worker ends the training."""
        return follow_task(task, rendezvous)
