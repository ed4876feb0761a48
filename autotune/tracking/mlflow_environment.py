"""MLflow's environment variables: our defaults for what the user did not set, and the store that they name.

MLflow reads some of them while it is imported.
"""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.remote.url import without_password

_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Defaults of MLflow's environment variables: short timeouts, since failed writes are tried again, no telemetry and less output."""


def set_environment() -> None:
    """Set MLflow's environment variables that the user did not set; must be called before MLflow is imported."""
    for variable, value in _DEFAULTS.items():
        os.environ.setdefault(variable, value)


def store_uri(uri: str | None) -> str:
    """The URI of the store: ``uri`` if given, else MLFLOW_TRACKING_URI, else a SQLite file in the working folder."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('mlflow.db').resolve()}"


def browse_command(tracking: Mapping[str, Any], studies: str) -> str | None:
    """The command or the server address that shows the tracked runs; None for a tracker that is not part of autotune.

    Args:
        tracking: the ``tracking`` node of the configuration.
        studies: folder that contains the studies' folders.
    """
    if tracking["_target_"].endswith(".TensorBoardTracker"):
        return f"tensorboard --logdir {shlex.quote(studies)}"
    if "uri" not in tracking:
        return None
    uri = tracking["uri"] or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return "mlflow ui"
    shown_uri = without_password(uri)
    return shown_uri if uri.startswith(("http://", "https://")) else f"mlflow ui --backend-store-uri {shlex.quote(shown_uri)}"
