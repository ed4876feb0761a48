"""What MLflow finds in its environment where the user set nothing; it reads part of it as it is imported."""

import os

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
