"""The worker as Ray Tune runs it: a process that runs trials one after another, a step being one evaluation.

A process that ran out of memory or ran faulty code ends with that trial, so that the next one begins in a clean one; any other
goes on with the next trial at once, its data set in memory. Where the driver has a fork server on this machine, the process that trains
is forked by it, and the worker, which need not import torch then, passes on what is said.
"""

import os
from collections.abc import Mapping
from typing import Any

from ray import tune

from autotune.execution.fork_server import ForkedProcess, ForkedRun, share_of
from autotune.execution.task_run import TaskRun, TrialTask
from autotune.execution.worker_group import WorkerGroup, bundles


class _Kept:
    """What Ray is told of a state that was kept: that there is no checkpoint to restore."""

    checkpoint = None


class TrialWorker(tune.Trainable):  # type: ignore[misc]  # ray has no types
    """A worker as Ray Tune runs it."""

    @classmethod
    def default_resource_request(cls, config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        """The resources of one trial, from its task: a bundle for each worker."""
        return tune.PlacementGroupFactory(bundles(config["task"]), strategy=config["task"].placement)

    def setup(self, config: Mapping[str, Any]) -> None:
        """Take the first trial."""
        self._is_unfit = False
        self._group = WorkerGroup()
        self._forked: ForkedProcess | None = None
        self._run = self._new_run(config["task"])

    def reset_config(self, new_config: Mapping[str, Any]) -> bool:
        """Take the next trial in the same process."""
        self._end()
        self._run = self._new_run(new_config["task"])
        return True

    def _new_run(self, task: TrialTask) -> TaskRun | ForkedRun:
        if task.fork_server is None or task.num_workers > 1:  # several are Ray's own processes, which meet by it
            return TaskRun(task, self._group.meet)
        if self._forked is None:
            try:
                self._forked = ForkedProcess(task.fork_server, share_of(task))
            except OSError:  # the fork server was ended
                return TaskRun(task, self._group.meet)
        return ForkedRun(self._forked, task)

    def step(self) -> dict[str, Any]:
        """Train to the next evaluation.

        Raises:
            RuntimeError: asked again after an outcome that makes this process unfit; Ray then replaces it.
        """
        if self._is_unfit:
            if self._group.is_stuck:
                os._exit(1)  # no less would end the thread that waits
            self._end()
            raise RuntimeError("this worker is replaced")
        report = self._group.next_report(self._run)
        if report.outcome is not None:
            self._end()
        needs_new = report.outcome is not None and report.outcome.needs_new_worker
        self._is_unfit = needs_new and isinstance(self._run, TaskRun)
        if needs_new or (self._forked is not None and self._forked.is_gone):
            self._end_forked()
        return {"report": report, "is_unfit": self._is_unfit}

    def save(self, checkpoint_dir: str | None = None) -> Any:
        """Keep the trial's state where its task says, before it is paused; Ray keeps no checkpoint of its own."""
        self._run.keep()
        return _Kept()

    def cleanup(self) -> None:
        """End what is still training."""
        self._end()
        self._end_forked()

    def _end_forked(self) -> None:
        if self._forked is not None:
            self._forked.close()
            self._forked = None

    def _end(self) -> None:
        self._group.end(self._run)
