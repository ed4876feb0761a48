"""Running one training in a fresh process, for confirmation and comparisons: no state of an earlier one can have a part in it."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autotune.errors import ClusterError
from autotune.execution.gang import Gang, bundles
from autotune.execution.task_run import TaskRun, TrialTask, WorkerReport, how_it_died, import_training
from autotune.measurement import Evaluation, TrialResult

_START_SECONDS = 120.0
"""What new processes may take to start before the cluster counts as out of order."""


@dataclass(frozen=True, kw_only=True)
class FreshRun:
    """One training to be made in a process of its own."""

    task: TrialTask
    trial: int
    values: Mapping[str, Any]
    overrides: tuple[str, ...]
    on_start: Callable[[], None]
    """Called when the process begins to train."""
    on_evaluation: Callable[[Evaluation], None]
    """Called with each evaluation, as it is heard of; the training does not wait for it."""


def train_fresh(
    runs: Sequence[FreshRun], *, fit: Callable[[Sequence[TrialTask]], bool], interrupt: threading.Event
) -> Generator[TrialResult, None, None]:
    """Train each run once in a new worker process, one after another and to the end.

    As many processes as fit at once are started together and wait until they have imported all they need; then they train in turn,
    so that nothing else is under way while one does.

    Yields:
        Results, in the order of the runs; no more once ``interrupt`` is set.

    Raises:
        ClusterError: a process did not start, or was not a new one.
    """
    for batch in _batches(runs, fit):
        groups = [placement_group(bundles(run.task), strategy=run.task.placement) for run in batch]
        actors = [
            ray.remote(_FreshWorker).options(**_resources(run.task, group)).remote() for run, group in zip(batch, groups, strict=True)
        ]
        try:
            ray.get([actor.is_ready.remote() for actor in actors], timeout=_START_SECONDS)
            for run, actor in zip(batch, actors, strict=True):
                result = _train(run, actor, interrupt)
                if result is None:
                    return
                yield result
                ray.kill(actor)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            raise ClusterError(f"no new worker came up: {str(error).splitlines()[0]}") from error
        finally:
            for actor, group in zip(actors, groups, strict=True):
                ray.kill(actor)
                remove_placement_group(group)


def _batches(runs: Sequence[FreshRun], fit: Callable[[Sequence[TrialTask]], bool]) -> Iterator[list[FreshRun]]:
    """The runs in their order, as many at a time as fit; at least one."""
    batch: list[FreshRun] = []
    for run in runs:
        if batch and not fit([each.task for each in [*batch, run]]):
            yield batch
            batch = []
        batch.append(run)
    if batch:
        yield batch


def _resources(task: TrialTask, group: PlacementGroup) -> dict[str, Any]:
    """Of the first worker: it starts the others in the same placement group."""
    own = bundles(task)[0]
    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True)
    return {"num_cpus": own["CPU"], "num_gpus": own.get("GPU", 0), "max_restarts": 0, "scheduling_strategy": where}


def _train(run: FreshRun, actor: Any, interrupt: threading.Event) -> TrialResult | None:
    """What became of a run; None where it was interrupted."""
    if interrupt.is_set():
        return None
    run.on_start()
    task, started_at = run.task, time.time()
    reports: list[WorkerReport] = []
    try:
        for report in _reports(actor, task, interrupt):
            reports.append(report)
            if report.evaluation is not None:
                run.on_evaluation(report.evaluation)
    except ray.exceptions.RayActorError as error:
        outcome, why = how_it_died(task, seconds=time.time() - started_at, reason=str(error))
        reports.append(WorkerReport(evaluation=None, outcome=outcome, error=why))
    if not reports or reports[-1].outcome is None:
        return None
    if not reports[0].is_first_in_process:
        raise ClusterError(f"{task.name}: ran in a process that had trained before; this run needs a fresh one")
    return TrialResult(
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
    )


def _reports(actor: Any, task: TrialTask, interrupt: threading.Event) -> Iterator[WorkerReport]:
    """A training's reports up to the one that has its outcome; fewer once ``interrupt`` is set."""
    coming = actor.run.options(num_returns="streaming").remote(task)
    while True:
        while not ray.wait([coming], timeout=0.2)[0]:
            if interrupt.is_set():
                return
        report: WorkerReport = ray.get(next(coming))
        yield report
        if report.outcome is not None:
            return


class _FreshWorker:
    """A worker that runs one task and is then ended."""

    def is_ready(self) -> bool:
        """True once all that a training needs is imported."""
        import_training()
        return True

    def run(self, task: TrialTask) -> Iterator[WorkerReport]:
        """All reports of the training, each sent on its way without waiting for anyone to take it."""
        gang = Gang()
        run = TaskRun(task, gang.meet)
        report = gang.next_report(run)
        while report.outcome is None:
            yield report
            report = gang.next_report(run)
        gang.end(run)
        yield report
