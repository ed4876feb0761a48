"""Writes a study to MLflow: an MLflow experiment for each experiment, a parent run per study, a
child run per trial or confirmation run.
"""

import logging
import math
import os
import time
from dataclasses import dataclass, field

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, TrialResult
from autotune.tracking import mlflow_fields as fields
from autotune.tracking.tracker import StudyEnd, StudyInfo, TrackedTrial

LOGGER = logging.getLogger("autotune.tracking")
WRITE_EVERY_SECONDS = 5.0
"""Least seconds between writes of a running trial; a trial that ends before its first write is
written all at once."""
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Defaults of MLflow's environment variables: short timeouts, since failed writes are tried
again, no telemetry and less output."""


def preload() -> None:
    """Import MLflow, which takes seconds, with defaults for those of its environment variables
    that the user did not set.
    """
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    # MLflow reads its environment while it is imported
    import autotune.tracking.mlflow_runs  # noqa: F401, PLC0415


class MlflowTracker:
    """Tracker that writes a study to an MLflow store.

    Args:
        uri: of the store; if None, MLFLOW_TRACKING_URI of the environment, else ``mlflow.db`` in
            the working folder.
        log_model: whether a study's run gets the trained model of the configuration that it
            exports, as an MLflow model.
        close_seconds: longest time that writing may take once the study has ended.

    Raises:
        ConfigError: the store does not answer, ``close_seconds`` is no number from 0, or
            ``log_model`` is neither true nor false.
    """

    def __init__(
        self,
        info: StudyInfo,
        *,
        uri: str | None = None,
        log_model: bool = True,
        close_seconds: float = 300.0,
    ) -> None:
        if not isinstance(close_seconds, int | float) or not 0 <= close_seconds < math.inf:
            raise ConfigError(
                f"tracking.close_seconds: found {close_seconds}; give a number from 0"
            )
        if not isinstance(log_model, bool):
            raise ConfigError(f"tracking.log_model: found {log_model}; give true or false")
        preload()
        # MLflow takes seconds to import
        from autotune.tracking.mlflow_runs import MlflowRuns  # noqa: PLC0415

        self._store, self._logs_model = MlflowRuns(info, uri), log_model
        self.page = self._store.page
        """Address of the page that shows the trials of the experiment, best first."""
        self.complete = self._store.complete
        """Names of the runs that the store holds as a whole."""
        self._runs: dict[str, _Run] = {}

    def start(self, trial: TrackedTrial) -> None:
        """Take up a run; it is created with its first write."""
        self.complete.discard(trial.name)
        self._open(trial)

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Write an evaluation of the run ``name``, with the current time, unless the run was
        written just before.
        """
        if (run := self._runs.get(name)) is not None:
            run.add(evaluation, time.time())
            if time.monotonic() - run.written_at >= WRITE_EVERY_SECONDS:
                self._write(run)

    def finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        """Write what the store lacks of a run, its evaluations and its result, and end it."""
        if trial.name in self.complete:
            return
        run = self._open(trial)
        for evaluation in result.evaluations:
            run.add(evaluation, fields.evaluated_at(result, evaluation))
        if run.run_id is None:
            run.run_id = self._store.create(trial)
        self._store.log(
            run.run_id,
            points=[*run.points, *fields.result_points(result, score)],
            params=fields.params(trial.values),
            tags=fields.result_tags(trial, result),
        )
        self._store.finish(run.run_id, trial, result)
        del self._runs[trial.name]

    def close(self, end: StudyEnd) -> None:
        """Write and interrupt every open run, write the study's end, and its model, if there is
        one.
        """
        try:
            for run in self._runs.values():
                self._write(run)
        # the study's own end must not depend on one run that the store refuses
        except Exception as error:  # noqa: BLE001
            LOGGER.info("an open run is not written: %s", error)
        self._store.close(end)
        if end.make_model is not None and self._logs_model:
            try:
                self._store.log_model(*end.make_model())
            # a model of any kind, which torch may refuse to export in as many ways
            except Exception as error:  # noqa: BLE001
                LOGGER.warning(
                    "MLflow has no model of the best configuration (%s)",
                    " ".join(str(error).split())[:200],
                )

    def _open(self, trial: TrackedTrial) -> "_Run":
        """The record of a run, which goes on where an earlier process left it."""
        if trial.name not in self._runs:
            run_id, steps = self._store.reopened(trial.name) or (None, set())
            self._runs[trial.name] = _Run(trial, run_id, steps)
        return self._runs[trial.name]

    def _write(self, run: "_Run") -> None:
        if run.run_id is None:
            run.run_id = self._store.create(run.trial)
        self._store.log(run.run_id, points=run.points, params=fields.params(run.trial.values))
        run.points = []
        run.written_at = time.monotonic()


@dataclass
class _Run:
    """A run that has not ended."""

    trial: TrackedTrial
    run_id: str | None
    """Id of the run in the store; None before its first write."""
    steps: set[int]
    """Steps whose evaluations are written or in ``points``."""
    points: list[fields.Point] = field(default_factory=list)
    written_at: float = field(default_factory=time.monotonic)

    def add(self, evaluation: Evaluation, at: float) -> None:
        """Add the metrics of an evaluation that is not known yet; ``at`` is its Unix time."""
        if evaluation.step not in self.steps:
            self.steps.add(evaluation.step)
            self.points += fields.evaluation_points(
                evaluation, at, fields.metric_name_of(self.trial)
            )
