"""Where a training's own calls of MLflow go: into a folder of its run, from which the tracker
copies them into the trial's run in MLflow.

User code and autologging find their store by environment variables. A folder needs no server while
something is trained, locks nothing that other trials write to, and is there before the trial's run,
which MLflow gets later. MLflow is not imported here.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOGS_FOLDER = "mlflow"
"""Folder of a study's that holds a folder for each run's logs until the tracker has them."""


def logs_folder(tracking: Mapping[str, Any], study_folder: Path) -> str | None:
    """Path of a study's folder for logs.

    None if the ``tracking`` node names another tracker than MLflow's.
    """
    return (
        str(study_folder / LOGS_FOLDER)
        if str(tracking.get("_target_")).endswith(".MlflowTracker")
        else None
    )


def keep_logs(folder: Path, *, is_resumed: bool) -> None:
    """Let what this process and those that it starts log to MLflow go into a folder.

    Earlier logs in it are kept if ``is_resumed``.
    """
    # runs that code in this thread left open: the next one's calls would go to them
    if (mlflow := sys.modules.get("mlflow")) is not None:
        # whatever is wrong with a run that was left is no fault of what follows
        with contextlib.suppress(Exception):
            while mlflow.active_run() is not None:
                mlflow.end_run()
    if not is_resumed:
        shutil.rmtree(folder, ignore_errors=True)
    os.environ["MLFLOW_TRACKING_URI"] = folder.absolute().as_uri()
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"):  # of another store
        os.environ.pop(name, None)
