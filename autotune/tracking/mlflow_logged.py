"""What a training's own code logged to MLflow, read from the folder that ``autotune/mlflow_logs.py`` let it go to."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from mlflow import MlflowClient
from mlflow.utils.file_utils import local_file_uri_to_path

from autotune.tracking.mlflow_fields import Point

_ALLOW = "MLFLOW_ALLOW_FILE_STORE"
"""Environment variable without which MLflow opens no folder as a store, so that nobody keeps one for good."""


@dataclass(frozen=True, kw_only=True)
class Logged:
    """Everything that the runs of a folder have, one after the other."""

    points: list[Point] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    """Tags that MLflow did not set itself."""
    artifacts: list[tuple[str, Path]] = field(default_factory=list)
    """Files and folders, each with its name among a run's artifacts."""


def read_logged(folder: Path) -> Logged:
    """Read what was logged into a folder.

    Raises:
        Exception: the folder is no store of MLflow's, or is being written.
    """
    client, logged = _open(folder), Logged()
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    for run in sorted(client.search_runs(experiments), key=lambda run: run.info.start_time):
        logged.params.update(run.data.params)
        logged.tags.update({key: value for key, value in run.data.tags.items() if not key.startswith("mlflow.")})
        for key in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, key)
            logged.points.extend(Point(key, point.value, point.timestamp, point.step) for point in history if math.isfinite(point.value))
        artifacts = Path(local_file_uri_to_path(run.info.artifact_uri))
        logged.artifacts.extend((path.name, path) for path in sorted(artifacts.glob("*")))
    for model in client.search_logged_models(experiments):
        logged.artifacts.append((model.name, Path(local_file_uri_to_path(model.artifact_location))))
    return logged


def _open(folder: Path) -> MlflowClient:
    before = os.environ.get(_ALLOW)
    os.environ[_ALLOW] = "true"
    try:
        return MlflowClient(folder.absolute().as_uri())
    finally:
        if before is None:
            del os.environ[_ALLOW]
        else:
            os.environ[_ALLOW] = before
