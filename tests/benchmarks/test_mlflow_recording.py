"""A study that MLflow keeps, written as a recording: the same as the study's own."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from autotune.config.command_line import run_command
from autotune.measurement import Target
from autotune.recording import write_recording
from autotune.tracking.mlflow_tracker import MlflowTracker
from autotune.tracking.tracker import StudyInfo
from benchmarks.mlflow_recording import mlflow_recording_command
from tests.support.tracked import close, make_info, make_run

pytestmark = pytest.mark.store

TARGET = Target(metric="accuracy", value=0.85, mode="max", max_train_seconds=60.0)
SPACE: dict[str, Any] = {
    "optimizer": ["sgd", "adamw"],
    "optimizer.lr": {"type": "float", "low": 0.01, "high": 1.0},
}
RUNS = [make_run(number) for number in range(3)]
RESULTS = [result for _, result, _ in RUNS]


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> StudyInfo:
    return make_info(tmp_path_factory.mktemp("outputs") / "cnn-1")


@pytest.fixture(scope="module")
def folder(info: StudyInfo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with ``mlflow.db``, in which a study is kept that has ended, and one that
    was interrupted.
    """
    path = tmp_path_factory.mktemp("tracked")
    write_recording(
        path / "own", results=RESULTS, target=TARGET, space=SPACE, source="a test", baseline=0
    )
    shutil.copytree(path / "own", path / "recording")
    tracker = MlflowTracker(info, uri=uri_of(path))
    for run in RUNS:
        tracker.finish(*run)
    close(tracker, artifacts=[path / "recording"])
    close(MlflowTracker(replace(info, name="old"), uri=uri_of(path)), status="KILLED")
    return path


def uri_of(path: Path) -> str:
    return f"sqlite:///{path / 'mlflow.db'}"


def run_named(path: Path, name: str) -> str:
    client = MlflowClient(uri_of(path))
    (experiment,) = [each for each in client.search_experiments() if each.name == "cnn"]
    (found,) = [
        run for run in client.search_runs([experiment.experiment_id]) if run.info.run_name == name
    ]
    return str(found.info.run_id)


def test_a_study_that_has_ended_keeps_its_recording_in_mlflow(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output"
    line = [
        f"--mlflow-run={run_named(folder, 'cnn-1')}",
        f"--tracking-uri={uri_of(folder)}",
        f"--output={output}",
    ]
    assert run_command(mlflow_recording_command, line) == 0
    said = capsys.readouterr()
    assert (said.err, said.out) == ("", f"wrote {output}: study cnn-1, 3 trials, 9 evaluations\n")
    written, own = (
        {file.name: file.read_bytes() for file in path.iterdir()}
        for path in (output, folder / "own")
    )
    assert written == own


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            ["--mlflow-run=x", "--output={folder}/own"],
            "autotune: --output {folder}/own: holds a recording already; use another folder",
        ),
        (
            ["--mlflow-run=x", "--output=s3://x/y"],
            "autotune: --output: found the URL s3://x/y, use a folder of this machine",
        ),
        (
            ["--mlflow-run=abc", "--tracking-uri={uri}", "--output={new}"],
            "autotune: --mlflow-run abc: no such run in {uri}; give the id",
        ),
        (
            ["--mlflow-run={child}", "--tracking-uri={uri}", "--output={new}"],
            "autotune: --mlflow-run {child}: is not the run of a study; its study's is",
        ),
        (
            ["--mlflow-run={old}", "--tracking-uri={uri}", "--output={new}"],
            "autotune: --mlflow-run {old}: study old has not ended; give its folder",
        ),
        (
            ["--mlflow-run=x", "--tracking-uri=sqlite:///{new}.db", "--output={new}"],
            "autotune: tracking.uri: sqlite:///{new}.db: cannot be used (there",
        ),
        (
            ["--mlflow-run=x", "--tracking-uri=nope://x", "--output={new}"],
            "autotune: tracking.uri: nope://x: cannot be used (MLflow knows no such",
        ),
    ],
)
def test_bad_input_is_one_line(
    line: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {
        "folder": folder,
        "new": tmp_path / "new",
        "uri": uri_of(folder),
        "child": run_named(folder, "1: optimizer=sgd, lr=0.2"),
        "old": run_named(folder, "old"),
    }
    assert run_command(mlflow_recording_command, [each.format(**names) for each in line]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(message.format(**names))
    assert said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
