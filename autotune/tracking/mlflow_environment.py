"""MLflow's environment: which store it names, and what MLflow finds there where the user set nothing.

MLflow reads part of it as it is imported.
"""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.database_url import without_password

_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Short patience, since what fails is tried again, and no word to others."""


def set_environment() -> None:
    """Fill in what the user did not set; to be called before MLflow is imported."""
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)


def store_uri(uri: str | None) -> str:
    """The store to use: the one given, else the environment's, else a SQLite file in the working folder."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('mlflow.db').resolve()}"


def how_to_browse(tracking: Mapping[str, Any], studies: str) -> str | None:
    """What shows the runs of a tracker of this configuration, a command or the address of a server; None for a tracker that is not ours.

    Args:
        tracking: the configuration's node.
        studies: the folder that studies lie in.
    """
    if tracking["_target_"].endswith(".TensorBoardTracker"):
        return f"tensorboard --logdir {shlex.quote(studies)}"
    if "uri" not in tracking:
        return None
    uri = tracking["uri"] or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return "mlflow ui"
    shown = without_password(uri)
    return shown if uri.startswith(("http://", "https://")) else f"mlflow ui --backend-store-uri {shlex.quote(shown)}"
