"""The model that a study exports, as MLflow serves it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient

from autotune.training.checkpoint import save_weights, weights_metadata
from tests.conftest import MakeTrialConfig
from tests.support.patience import PATIENCE_SECONDS
from tests.tracking.test_mlflow_tracker import parent_of
from tests.training.test_trained_model import NODE, SHAPE, simple_cnn

pytestmark = [
    pytest.mark.store,
    pytest.mark.slow,
]

TRACK = """
import logging, sys
from functools import partial
from pathlib import Path
from autotune.execution.exported import exported_model
from autotune.tracking.mlflow_tracker import MlflowTracker
from autotune.tracking.tracker import StudyEnd, StudyInfo

logging.basicConfig(stream=sys.stdout, format="%(message)s")
info = StudyInfo(
    name="cnn-1", kind="study", workload="w", experiment="cnn", folder=sys.argv[2], settings={},
    tags={}, is_resumed=True,
)
for path in sys.argv[2:]:
    tracker = MlflowTracker(info, uri=sys.argv[1])
    tracker.close(StudyEnd(status="FINISHED", make_model=partial(exported_model, Path(path), ())))
"""


def ran(arguments: list[str], folder: Path, uri: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )


def test_mlflow_gives_the_outputs_of_the_exported_weights(
    tmp_path: Path, trial_config: MakeTrialConfig
) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    config = replace(
        trial_config(), model=NODE, views={"_target_": "autotune.training.views.plain"}
    )
    metadata = weights_metadata(
        config, input_shape=SHAPE, num_classes=3, evaluation=None, origin={}
    )
    model = simple_cnn()
    save_weights(tmp_path / "first" / "best.safetensors", simple_cnn().state_dict(), metadata)
    save_weights(tmp_path / "resumed" / "best.safetensors", model.state_dict(), metadata)
    tracked = ran(
        ["-c", TRACK, uri, str(tmp_path / "first"), str(tmp_path / "resumed")], tmp_path, uri
    )
    assert (tracked.stdout, tracked.stderr) == ("", "")
    run = parent_of(uri)
    assert run.info.status == "FINISHED"
    [kept] = MlflowClient(uri).search_logged_models([run.info.experiment_id])
    assert (kept.name, kept.source_run_id) == ("model", run.info.run_id)
    inputs = torch.rand(3, *SHAPE)
    (tmp_path / "inputs.json").write_text(json.dumps({"inputs": inputs.tolist()}))
    predict = [
        "models",
        "predict",
        "-m",
        f"runs:/{run.info.run_id}/model",
        "--env-manager",
        "local",
        "-i",
        "inputs.json",
        "-o",
        "outputs.json",
    ]
    ran(["-m", "mlflow", *predict], tmp_path, uri)
    outputs = json.loads((tmp_path / "outputs.json").read_text())
    with torch.no_grad():
        assert torch.allclose(torch.tensor(outputs["predictions"]), model(inputs), atol=1e-5)


def test_weights_that_name_no_model_are_a_line_and_no_failure(
    tmp_path: Path, trial_config: MakeTrialConfig
) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    config = replace(trial_config(), training={"_target_": "mine.train"})
    metadata = weights_metadata(
        config, input_shape=(), num_classes=None, evaluation=None, origin={}
    )
    save_weights(tmp_path / "best.safetensors", {"weight": torch.ones(2)}, metadata)
    tracked = ran(["-c", TRACK, uri, str(tmp_path)], tmp_path, uri)
    assert tracked.stdout.startswith("MLflow has no model of the best configuration (")
    assert (tracked.stdout.count("\n"), tracked.stderr) == (1, "")
    assert parent_of(uri).info.status == "FINISHED"
