"""The worker as Ray Tune runs it: a process that runs trials one after another, a step being one evaluation.

A process that ran out of memory or ran faulty code ends with that trial, so that the next one begins in a clean one; any other
goes on with the next trial at once, its data set in memory.
"""

import os
from collections.abc import Mapping
from typing import Any

from ray import tune

from autotune.execution.gang import Gang, bundles
from autotune.execution.task_run import TaskRun


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
        self._gang = Gang()
        self._run = TaskRun(config["task"], self._gang.meet)

    def reset_config(self, new_config: Mapping[str, Any]) -> bool:
        """Take the next trial in the same process."""
        self._end()
        self._run = TaskRun(new_config["task"], self._gang.meet)
        return True

    def step(self) -> dict[str, Any]:
        """Train to the next evaluation.

        Raises:
            RuntimeError: asked again after an outcome that makes this process unfit; Ray then replaces it.
        """
        if self._is_unfit:
            if self._gang.is_stuck:
                os._exit(1)  # no less would end the thread that waits
            self._end()
            raise RuntimeError("this worker is replaced")
        report = self._gang.next_report(self._run)
        if report.outcome is not None:
            self._end()
        self._is_unfit = report.outcome is not None and report.outcome.needs_new_worker
        return {"report": report}

    def save(self, checkpoint_dir: str | None = None) -> Any:
        """Keep the trial's state where its task says, before it is paused; Ray keeps no checkpoint of its own."""
        self._run.keep()
        return _Kept()

    def cleanup(self) -> None:
        """End what is still training."""
        self._end()

    def _end(self) -> None:
        self._gang.end(self._run)
