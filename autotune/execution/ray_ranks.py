"""Processes of ranks whose resources Ray has reserved, on this machine and on others."""

import os
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autotune.errors import AutotuneError, FileError, StateError
from autotune.execution.launcher import Launcher, TrainingProcess
from autotune.execution.process_group import ProcessGroup
from autotune.execution.task import (
    ACCELERATOR,
    ProcessExited,
    TrialTask,
)
from autotune.failure import FailureKind, kind_of_text
from autotune.training.capabilities import visible_devices_environment

_ACCELERATOR_AMOUNT = 0.001
"""Amount of a machine's accelerator resource, which is 1, that a worker takes: as Ray itself
asks, so that a thousand workers can share."""
_END_SECONDS = 10.0
"""Seconds that a rank on another machine may take to end."""


def bundles(task: TrialTask) -> list[dict[str, float]]:
    """The resources that a trial asks Ray for: one bundle for each rank, or one for all on the
    driver's machine, where there is no other.
    """
    size = 1 if task.launcher is not None else task.num_workers
    bundle = {"CPU": task.num_cpus / size}
    if task.num_gpus:
        bundle["GPU"] = task.num_gpus / size / task.trials_per_gpu
    if task.accelerator_type is not None:
        bundle[f"{ACCELERATOR}{task.accelerator_type}"] = _ACCELERATOR_AMOUNT
    return [dict(bundle) for _ in range(size)]


def ray_process_group(task: TrialTask) -> ProcessGroup:
    """The processes for tasks like this one, of a Ray worker in the first bundle of its placement
    group.
    """
    _take_assigned_devices()
    is_spread = len(bundles(task)) > 1
    return ProcessGroup(
        launcher=task.launcher,
        host=ray.util.get_node_ip_address(),
        start_elsewhere=_RemoteRank if is_spread else None,
    )


def kind_of_death(error: Exception | None) -> FailureKind:
    """Whose fault it is that a Ray worker died, by what Ray raised; None if it raised nothing."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    if isinstance(cause, ray.exceptions.OutOfMemoryError):
        return FailureKind.MEMORY
    if isinstance(cause, FileError):  # the state of a trial that is being paused
        return FailureKind.DISK
    if isinstance(cause, AutotuneError) and not isinstance(cause, StateError):
        # of a script's process, or another rank
        return kind_of_text(str(cause))[0] or FailureKind.USER_CODE
    return FailureKind.LOST  # no code of the user's runs in it


class _RankWorker:
    """A Ray actor that has a process started for one rank of trainings, where Ray reserved its
    resources.
    """

    def __init__(self) -> None:
        _take_assigned_devices()
        self._launcher = Launcher()
        self._process = TrainingProcess(self._launcher.address, {})

    def place(self) -> tuple[str, list[str]]:
        """This machine's address, and the ids of the GPUs that Ray gave this actor."""
        return str(ray.util.get_node_ip_address()), _assigned_devices()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method in the process, see ``TrainingProcess.call``."""
        return self._process.call(method, *arguments)

    def end(self) -> None:
        """End the process, also while it is called."""
        self._launcher.close()


class _RemoteRank(TrainingProcess):
    """The process of a rank, which an actor on its machine has started and speaks to."""

    def __init__(self, task: TrialTask, rank: int) -> None:
        group = ray.util.get_current_placement_group()
        bundle = bundles(task)[rank]
        strategy = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=rank, placement_group_capture_child_tasks=True
        )
        worker = ray.remote(_RankWorker).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            max_restarts=0,
            max_concurrency=2,  # it is ended while it is called
        )
        self._actor = worker.remote()
        self._answer: Any = None
        self.host, self.devices = ray.get(self._actor.place.remote())

    def send(self, method: str, *arguments: Any) -> None:
        """Ask for a method, whose answer ``receive`` returns."""
        self._answer = self._actor.call.remote(method, *arguments)

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether an answer comes within so many seconds."""
        return bool(ray.wait([self._answer], timeout=seconds)[0])

    def receive(self) -> Any:
        """The answer to the last request, or ``ProcessExited``."""
        try:
            answer = ray.get(self._answer)
        except ray.exceptions.RayActorError as error:
            answer = ProcessExited(reason=f"the worker died: {str(error).splitlines()[0]}")
        self.is_gone = self.is_gone or isinstance(answer, ProcessExited)
        return answer

    def close(self) -> None:
        """End the process, and wait until it is gone with all that it held on a device; then the
        actor.
        """
        ray.wait([self._actor.end.remote()], timeout=_END_SECONDS)
        ray.kill(self._actor)
        self.is_gone = True


def _take_assigned_devices() -> None:
    """Limit this process, a worker of Ray's, and all that it starts to the GPUs that Ray gave it.

    Called before it uses a GPU.

    Ray does so itself, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES or its like keeps it from
    that: every trial would then train on the machine's first GPU.
    """
    if devices := _assigned_devices():
        os.environ.update(visible_devices_environment(devices))


def _assigned_devices() -> list[str]:
    devices: list[str] = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return devices
