"""Running one training in a fresh process, for confirmation: no state of an earlier one can have a part in it."""

import time
from typing import Any

import ray

from autotune.errors import ClusterError
from autotune.execution.worker import TaskRun, TrialTask, WorkerReport
from autotune.measurement import Evaluation, Outcome, TrialResult
from autotune.space import Suggestion

_START_SECONDS = 120.0
"""What a new process may take to start before the cluster counts as out of order."""


def train_fresh(task: TrialTask, *, trial: int, suggestion: Suggestion) -> TrialResult:
    """Train once in a new worker process, to the end.

    Raises:
        ClusterError: the process did not start, or was not a new one.
    """
    started_at = time.time()
    options: dict[str, Any] = {"num_cpus": task.num_cpus, "num_gpus": task.num_gpus, "max_restarts": 0}
    actor = ray.remote(_FreshWorker).options(**options).remote()
    try:
        reports = ray.get(actor.run.remote(task), timeout=task.deadline_seconds + _START_SECONDS)
    except ray.exceptions.GetTimeoutError as error:
        raise ClusterError(f"{task.name}: no worker came up within {_START_SECONDS:.0f} s of its deadline") from error
    except ray.exceptions.RayActorError as error:
        hung = time.time() - started_at >= task.deadline_seconds
        outcome = Outcome.TIMED_OUT if hung else Outcome.ERRORED
        reports = [WorkerReport(evaluation=None, outcome=outcome, error=str(error))]
    finally:
        ray.kill(actor)
    if not reports[0].is_first_in_process:
        raise ClusterError(f"{task.name}: ran in a process that had trained before; confirmation needs a fresh one")
    evaluations = tuple(report.evaluation for report in reports if isinstance(report.evaluation, Evaluation))
    return TrialResult(
        trial=trial,
        values=suggestion.values,
        overrides=tuple(suggestion.as_overrides()),
        seed=task.config.seed,
        outcome=reports[-1].outcome or Outcome.ERRORED,
        evaluations=evaluations,
        started_at=started_at,
        stopped_at=time.time(),
        fingerprint=next((report.fingerprint for report in reports if report.fingerprint), {}),
        error=reports[-1].error,
        test_metric=reports[-1].test_metric,
    )


class _FreshWorker:
    """A worker that runs one task and is then ended."""

    def run(self, task: TrialTask) -> list[WorkerReport]:
        """All reports of the training."""
        run = TaskRun(task)
        reports = [run.next_report()]
        while reports[-1].outcome is None:
            reports.append(run.next_report())
        run.close()
        return reports
