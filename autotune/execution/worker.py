"""The Ray Tune worker: a process that runs trials one after another.

One Tune step is one evaluation.

A process that ran out of memory or ran faulty code ends with that trial, so that the next trial
begins in a clean process; any other process runs the next trial at once, with the data set still in
memory. If the driver has a fork server on this machine, a process forked by it does the training,
and the worker only passes on its reports, so that it need not import torch.

A function of the user's own may leave anything behind in its process (a module's model, a setting
of torch, a working folder). Each of its trials, and each that goes on after a pause, therefore has
a forked process to itself, by a fork server of the worker's own where the driver has none on this
machine. Where nothing can be forked, the worker trains and is replaced when the trial has ended,
and does not pause, since Ray gives the worker of a paused trial another.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray import tune

from autotune.execution.cluster import take_assigned_devices
from autotune.execution.fork_server import (
    CAN_FORK,
    ForkedProcess,
    ForkedRun,
    ForkServer,
    resource_environment,
)
from autotune.execution.task_run import TaskRun, TrialTask
from autotune.execution.worker_group import WorkerGroup, bundles


class _NoCheckpoint:
    """What ``save`` returns to Ray: there is no checkpoint that Ray has to keep or restore."""

    checkpoint = None


class TrialWorker(tune.Trainable):  # type: ignore[misc]  # ray has no types
    """A Ray Tune worker that runs trials one after another."""

    @classmethod
    def default_resource_request(cls, config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        """The resources that a trial's task asks for: one bundle for each of its workers."""
        return tune.PlacementGroupFactory(
            bundles(config["task"]), strategy=config["task"].placement
        )

    def setup(self, config: Mapping[str, Any]) -> None:
        """Begin the first trial of this process."""
        take_assigned_devices()
        self._is_unfit = False
        self._group = WorkerGroup()
        self._fork_server: ForkServer | None = None
        """A fork server of this worker's own."""
        self._forked: ForkedProcess | None = None
        self._run = self._new_run(config["task"])

    def reset_config(self, new_config: Mapping[str, Any]) -> bool:
        """Begin the next trial, in the same process unless the last trial needed one to itself."""
        self._end()
        self._exit_if_stuck()
        if self._needs_fresh:
            self._end_forked()
        self._run = self._new_run(new_config["task"])
        return True

    def _new_run(self, task: TrialTask) -> TaskRun | ForkedRun:
        self._needs_fresh = task.config.needs_fresh_process
        if task.num_workers > 1:  # several workers must be Ray's processes to meet
            return TaskRun(task, self._group.meet)
        if self._forked is None and (address := self._fork_address(task)) is not None:
            with contextlib.suppress(OSError):  # the fork server was ended
                self._forked = ForkedProcess(address, resource_environment(task))
        return (
            TaskRun(task, self._group.meet)
            if self._forked is None
            else ForkedRun(self._forked, task)
        )

    def _fork_address(self, task: TrialTask) -> str | None:
        """Address of the driver's fork server, or of this worker's own.

        None if the worker itself trains the task.
        """
        if task.fork_server is not None or not (CAN_FORK and self._needs_fresh):
            return task.fork_server
        self._fork_server = self._fork_server or ForkServer()
        return self._fork_server.address if self._fork_server.fault() is None else None

    def step(self) -> dict[str, Any]:
        """Train to the next evaluation.

        Raises:
            RuntimeError: called again after an outcome that makes this process unfit for further
                trials; Ray then replaces the process.
        """
        if self._is_unfit:
            self._end()
            self._exit_if_stuck()
            raise RuntimeError("this worker is replaced")
        report = self._group.next_report(self._run)
        if report.outcome is not None:
            self._end()
        needs_new = report.outcome is not None and (
            report.outcome.needs_new_worker or self._needs_fresh
        )
        trains_itself = isinstance(self._run, TaskRun)
        self._is_unfit = self._group.is_stuck or (needs_new and trains_itself)
        if needs_new or (self._forked is not None and self._forked.is_gone):
            self._end_forked()
        if trains_itself and self._needs_fresh:
            report = replace(report, can_pause=False)
        return {"report": report, "is_unfit": self._is_unfit}

    def save(self, checkpoint_dir: str | None = None) -> Any:
        """Keep the state of a trial that is being paused, in its task's state folder.

        Ray keeps no checkpoint of its own.
        """
        self._run.keep()
        return _NoCheckpoint()

    def cleanup(self) -> None:
        """End the training, and the forked process if there is one."""
        self._end()
        self._exit_if_stuck()
        self._end_forked()
        if self._fork_server is not None:
            self._fork_server.close()

    def _end_forked(self) -> None:
        if self._forked is not None:
            self._forked.close()
            self._forked = None

    def _end(self) -> None:
        self._group.end(self._run)

    def _exit_if_stuck(self) -> None:
        if self._group.is_stuck:
            # nothing else ends the training's thread, which waits for a lost worker; Ray replaces
            # this process
            os._exit(1)
