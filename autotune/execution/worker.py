"""The Ray Tune worker: it holds resources, and has launchers start the processes that train.

One Tune step is one evaluation. The worker does not train itself and does not import torch, so it
need not be replaced after a trial.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from ray import tune

from autotune.execution.ray_ranks import bundles, ray_process_group
from autotune.execution.task import TrialTask, WorkerReport

_REST_SECONDS = 1.0


class _Saved:
    """What ``save`` returns to Ray: there is no checkpoint that Ray has to keep or restore.

    Where it is false, Ray forgets that the trial was to be paused.
    """

    checkpoint = None

    def __init__(self, *, is_saved: bool) -> None:
        self._is_saved = is_saved

    def __bool__(self) -> bool:
        return self._is_saved


class TrialWorker(tune.Trainable):  # type: ignore[misc]  # ray has no types
    """A Ray Tune worker that makes runs one after another: those of one configuration of Ray's,
    then those of the next.
    """

    @classmethod
    def default_resource_request(cls, config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        """The resources that the largest of its tasks asks for."""
        largest = max(config["tasks"], key=attrgetter("num_gpus", "num_cpus"))
        return tune.PlacementGroupFactory(bundles(largest), strategy=largest.placement)

    def setup(self, config: Mapping[str, Any]) -> None:
        """Begin the first run of this worker."""
        self._processes = ray_process_group(config["tasks"][0])
        self._begin(config["tasks"])

    def reset_config(self, new_config: Mapping[str, Any]) -> bool:
        """Begin the next run."""
        self._processes.end()
        self._begin(new_config["tasks"])
        return True

    def _begin(self, tasks: Sequence[TrialTask]) -> None:
        self._last: WorkerReport | None = None
        self._unsaved: str | None = None
        task, *self._following = tasks
        self._processes.begin(task)

    def step(self) -> dict[str, WorkerReport | None]:
        """Train to the next evaluation, of the next run where one has ended well; after a failure,
        rest for a second.
        """
        if self._last is not None and self._last.outcome is not None:
            if self._last.failure is not None or not self._following:
                time.sleep(_REST_SECONDS)  # the driver has it keep its device, see ``Devices``
                return {"report": None}
            self._begin(self._following)
        report = self._processes.next_report()
        assert report is not None, "nothing interrupts it"
        self._last, self._unsaved = replace(report, unsaved=self._unsaved), None
        return {"report": self._last}

    def save(self, checkpoint_dir: str | None = None) -> Any:
        """Keep the state of a trial that is being paused, in its task's state folder.

        Ray keeps no checkpoint of its own. A trial that cannot be saved may continue.
        """
        self._unsaved = self._processes.keep()
        return _Saved(is_saved=self._unsaved is None)

    def cleanup(self) -> None:
        """End the training, and the processes."""
        self._processes.close()
