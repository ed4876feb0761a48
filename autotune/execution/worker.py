"""The Ray Tune worker: it holds resources, and has launchers start the processes that train.

One Tune step is one evaluation. The worker does not train itself and does not import torch, so it
need not be replaced after a trial.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray import tune

from autotune.execution.ray_ranks import bundles, ray_process_group
from autotune.execution.task import WorkerReport

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
    """A Ray Tune worker that runs trials one after another."""

    @classmethod
    def default_resource_request(cls, config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        """The resources that a trial's task asks for."""
        return tune.PlacementGroupFactory(
            bundles(config["task"]), strategy=config["task"].placement
        )

    def setup(self, config: Mapping[str, Any]) -> None:
        """Begin the first trial of this worker."""
        self._has_ended = False
        self._unsaved: str | None = None
        self._processes = ray_process_group(config["task"])
        self._processes.begin(config["task"])

    def reset_config(self, new_config: Mapping[str, Any]) -> bool:
        """Begin the next trial."""
        self._has_ended, self._unsaved = False, None
        self._processes.end()
        self._processes.begin(new_config["task"])
        return True

    def step(self) -> dict[str, WorkerReport | None]:
        """Train to the next evaluation; after the last one, rest for a second."""
        if self._has_ended:  # the driver has it keep its device, see ``Devices``
            time.sleep(_REST_SECONDS)
            return {"report": None}
        report = self._processes.next_report()
        if report is not None:
            self._has_ended = report.outcome is not None
            report, self._unsaved = replace(report, unsaved=self._unsaved), None
        return {"report": report}

    def save(self, checkpoint_dir: str | None = None) -> Any:
        """Keep the state of a trial that is being paused, in its task's state folder.

        Ray keeps no checkpoint of its own. A trial that cannot be saved may continue.
        """
        self._unsaved = self._processes.keep()
        return _Saved(is_saved=self._unsaved is None)

    def cleanup(self) -> None:
        """End the training, and the processes."""
        self._processes.close()
