"""What a training's own code logs to MLflow reaches the trial's run, whatever kind of training
it is.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from autotune.mlflow_logs import keep_logs, logs_folder
from autotune.outcome import Outcome
from autotune.space import Suggestion
from autotune.tracking.mlflow_tracker import MlflowTracker
from autotune.tracking.tracker import StudyInfo
from tests.support.tracked import close, make_run, tell
from tests.tracking.test_mlflow_tracker import artifact, children_of, empty_store, info, uri

__all__ = ["empty_store", "info", "uri"]  # fixtures
pytestmark = pytest.mark.store

CODE = """
import sys

import mlflow

import autotune


def log(step):
    mlflow.log_metric("train_loss", 1.0 / (step + 1), step=step)


def started(lr):
    mlflow.set_experiment("mine")
    with mlflow.start_run(run_name="my own"):
        mlflow.log_params({"lr": lr, "depth": 3})
        mlflow.set_tag("team", "vision")
        mlflow.log_text("hello", "notes/hello.txt")
        mlflow.log_text("mine", "config.yaml")
        for step in range(4):
            log(step)
            mlflow.log_metric("loss", 5.0, step=step)
            autotune.report(accuracy=0.1 * step, step=step + 1)


def left_open(lr):
    for step in range(4):
        log(step)
        autotune.report(accuracy=0.1 * step, step=step + 1)


def generated(lr):
    for step in range(4):
        log(step)
        yield {"accuracy": 0.1 * step, "step": step + 1}


if __name__ == "__main__":
    left_open(float(sys.argv[1]))
"""

RUN = """
import json, sys
from dataclasses import replace
from autotune.config.compose import Composer
from autotune.execution.task import TrialTask
from autotune.execution.task_run import TaskRun

folder, study, target, *names = sys.argv[1:]
is_function = target.startswith("my_code")
training = f"training={{_target_:{target},lr:0.1}}" if is_function else "training=" + target
target = ["target.metric=accuracy", "target.value=2"]
allowed = "allowed_targets=[my_code,autotune.script]"
composer = Composer(["experiment=cnn", "device=cpu", *target, allowed, "+" + training])
task = TrialTask(
    name="", config=composer.compose().trial, cap_seconds=100, num_threads=1,
    deadline_seconds=100.0,
    code_folders=(folder,), working_folder=folder, hang_folder=study,
    logs_folder=study + "/mlflow", num_cpus=1, num_gpus=0,
)
for name in names:
    run = TaskRun(replace(task, name=name), "127.0.0.1")
    while (report := run.next_report()).outcome is None:
        pass
    run.close()  # until then this process's stdout is the run's
    print(report.outcome, report.error)
"""


def train(tmp_path: Path, info: StudyInfo, target: str, *names: str) -> None:
    """Run tasks of these names one after the other in one process, with a store of the user's
    that they must not touch.
    """
    (tmp_path / "my_code.py").write_text(CODE)
    Path(info.folder).mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/stray.db",
        "MLFLOW_EXPERIMENT_ID": "7",
    }
    arguments = [sys.executable, "-c", RUN, str(tmp_path), info.folder, target, *names]
    ended = subprocess.run(
        arguments,
        cwd=Path(__file__).resolve().parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert ended.stdout.splitlines() == ["MISSED None"] * len(names), ended.stdout + ended.stderr
    assert not (tmp_path / "stray.db").exists()
    assert not (tmp_path / "mlruns").exists()


def curve(uri: str, name: str, key: str = "train_loss") -> list[tuple[int, float]]:
    history = MlflowClient(uri).get_metric_history(children_of(uri)[name].info.run_id, key)
    return sorted((point.step, point.value) for point in history)


CURVE = [(0, 1.0), (1, 0.5), (2, 1 / 3), (3, 0.25)]


def test_what_a_function_logs_reaches_its_trials_run_beside_autotunes_own(
    info: StudyInfo, uri: str, tmp_path: Path
) -> None:
    train(tmp_path, info, "my_code.started", "trial-0", "trial-1")
    tracker = MlflowTracker(info, uri=uri)
    for number in range(2):
        trial, result, score = make_run(number, Outcome.MISSED)
        tell(tracker, (replace(trial, suggestion=Suggestion({"lr": 0.1})), result, score))
    close(tracker)
    for name, run in children_of(uri).items():
        assert curve(uri, name) == CURVE, "the call that only warms up does not count"
        assert curve(uri, name, "logged/loss") == [(step, 5.0) for step in range(4)]
        assert run.data.metrics["loss"] == 0.3
        assert run.data.params == {"lr": "0.1", "logged/lr": "0.1", "depth": "3"}
        assert (run.data.tags["team"], run.data.tags["autotune.outcome"]) == ("vision", "MISSED")
        assert artifact(uri, run, "notes/hello.txt") == "hello"
        assert artifact(uri, run, "logged/config.yaml") == "mine"
        assert "batch_size: 64" in artifact(uri, run, "config.yaml")
    assert [path.name for path in Path(info.folder, "mlflow").iterdir()] == [], (
        "what MLflow has is not kept twice"
    )


@pytest.mark.parametrize(
    "target",
    [
        "my_code.left_open",
        *(
            pytest.param(target, marks=pytest.mark.slow)
            for target in ("my_code.generated", "command")
        ),
    ],
)
def test_runs_that_are_left_open_stay_with_their_trial(
    info: StudyInfo, uri: str, tmp_path: Path, target: str
) -> None:
    script = (
        f"{{_target_:autotune.script.run,command:'python {tmp_path}/my_code.py {{lr}}',lr:0.1}}"
    )
    train(tmp_path, info, script if target == "command" else target, "trial-0", "trial-1")
    tracker = MlflowTracker(info, uri=uri)
    for number in range(2):
        tell(tracker, make_run(number, Outcome.MISSED))
    close(tracker)
    assert (curve(uri, "trial-0"), curve(uri, "trial-1")) == (CURVE, CURVE)


def test_logs_wait_for_a_tracker_that_comes_later_and_odd_ones_cost_nothing(
    info: StudyInfo, uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, info, "my_code.left_open", "trial-0", "trial-1")
    for path in Path(info.folder, "mlflow", "trial-1").rglob("train_loss"):
        path.write_text("half a li")
    tracker = MlflowTracker(info, uri=uri)
    for number in range(2):
        tracker.finish(*make_run(number))
    assert curve(uri, "trial-0") == CURVE
    assert children_of(uri)["trial-1"].data.metrics["accuracy"] == 0.9
    assert "what trial-1 logged cannot be read" in caplog.text


@pytest.mark.slow
def test_autologging_and_its_model_reach_the_run(info: StudyInfo, uri: str) -> None:
    code = f"""
import mlflow
import numpy as np
from sklearn.linear_model import LinearRegression

mlflow.set_tracking_uri({Path(info.folder, "mlflow", "trial-0").as_uri()!r})
mlflow.sklearn.autolog(extra_tags={{"team": "vision"}})
LinearRegression(positive=True).fit(np.arange(12.0).reshape(6, 2), np.arange(6.0))
"""
    environment = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"}
    subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, timeout=300, capture_output=True
    )
    tracker = MlflowTracker(info, uri=uri)
    tell(tracker, make_run())
    close(tracker)
    run = children_of(uri)["trial-0"]
    assert (run.data.params["positive"], run.data.tags["team"]) == ("True", "vision")
    assert "training_mean_squared_error" in run.data.metrics
    assert "sklearn" in artifact(uri, run, "model/MLmodel")


@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_trial_that_goes_on_after_a_pause_keeps_its_logs_and_one_that_is_made_again_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_resumed: bool
) -> None:
    for name in ("TRACKING_URI", "ALLOW_FILE_STORE", "RUN_ID", "EXPERIMENT_ID"):
        monkeypatch.setenv(f"MLFLOW_{name}", "before")
    (tmp_path / "trial-0" / "0").mkdir(parents=True)
    keep_logs(tmp_path / "trial-0", is_resumed=is_resumed)
    assert (tmp_path / "trial-0" / "0").exists() == is_resumed
    assert os.environ["MLFLOW_TRACKING_URI"] == (tmp_path / "trial-0").as_uri()
    assert "MLFLOW_RUN_ID" not in os.environ


def test_only_mlflows_tracker_asks_for_logs(tmp_path: Path) -> None:
    node: dict[str, Any] = {"_target_": "autotune.tracking.mlflow_tracker.MlflowTracker"}
    assert logs_folder(node, tmp_path) == str(tmp_path / "mlflow")
    assert logs_folder({"_target_": "autotune.tracking.tracker.NoTracker"}, tmp_path) is None
