"""A study that MLflow keeps, written as a recording: the same as the study's own."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from autotune.config.command_line import run_command
from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Target, TrialResult
from autotune.outcome import Outcome
from autotune.record import record_command
from autotune.recording import read_recording, write_recording
from autotune.space import SearchSpace
from autotune.tracking.earlier_recordings import earlier_recordings
from autotune.tracking.mlflow_tracker import MlflowTracker
from autotune.tracking.tracker import StudyEnd, StudyInfo, TrackedTrial
from tests.support.records import make_evaluation, make_result
from tests.support.tracked import make_info

pytestmark = pytest.mark.store

TARGET = Target(metric="accuracy", value=0.9123456789, mode="max", max_train_seconds=60.0)
SPACE: dict[str, Any] = {
    "optimizer": {
        "type": "choice",
        "choices": {
            "sgd": {"optimizer.momentum": {"type": "float", "low": 0.0, "high": 1.0}},
            "adamw": {"optimizer@kind": [1, "1", True, None, [8, 16]]},
        },
    },
    "batch_size": {"type": "power_of_two", "low": 16, "high": 512},
    "depth": {"type": "int", "low": 1, "high": 4},
}


def evaluation(step: int, metric: float, outcome: Outcome | None) -> Evaluation:
    return make_evaluation(
        step / 3,
        step=step,
        epoch=step / 10,
        samples=step,
        build_seconds=5.0,
        prepare_seconds=0.1 + 0.01 * step,
        evaluate_seconds=1.0,
        metric=metric,
        loss=1.0,
        outcome=outcome,
    )


def result(trial: int, outcome: Outcome, values: dict[str, Any], *metrics: float) -> TrialResult:
    return make_result(
        trial,
        outcome,
        *tuple(
            evaluation(5 * (place + 1), metric, outcome if place == len(metrics) - 1 else None)
            for place, metric in enumerate(metrics)
        ),
        values=values,
        seed=trial,
        started_at=1_700_000_000.0,
        stopped_at=1_700_000_050.0,
        cap_seconds=1 / 3 if trial == 1 else None,
    )


RESULTS = [
    result(0, Outcome.MISSED, {}, 0.5, 0.6),  # a baseline outside the space
    result(
        1,
        Outcome.REACHED,
        {"optimizer": "sgd", "optimizer.momentum": 1 / 3, "batch_size": 64, "depth": 2},
        0.7,
        0.8,
        0.95,
    ),
    result(
        2,
        Outcome.DIVERGED,
        {"optimizer": "adamw", "optimizer@kind": [8, 16], "batch_size": 16, "depth": 1},
        0.4,
        math.nan,
    ),
    result(
        3,
        Outcome.OUT_OF_MEMORY,
        {"optimizer": "adamw", "optimizer@kind": None, "batch_size": 512, "depth": 4},
    ),
]


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> StudyInfo:
    return make_info(tmp_path_factory.mktemp("outputs") / "cnn-1")


@pytest.fixture(scope="module")
def folder(info: StudyInfo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with ``mlflow.db``, in which a study of four trials is kept that has
    ended, and one that was interrupted.
    """
    path = tmp_path_factory.mktemp("tracked")
    space = SearchSpace.from_mapping(SPACE, "").as_mapping()
    write_recording(
        path / "own",
        results=RESULTS,
        target=TARGET,
        space=space,
        source="autotune study cnn-1",
        baseline=0,
    )
    shutil.copytree(path / "own", path / "recording")
    for name, status, artifacts in (
        ("cnn-1", "FINISHED", [path / "recording"]),
        ("old", "KILLED", []),
    ):
        tracker = MlflowTracker(replace(info, name=name), uri=uri_of(path))
        for each in RESULTS:
            tracker.finish(tracked(replace(each, trial=each.trial + 10 * len(name))), each, None)
        tracker.close(StudyEnd(status=status, artifacts=artifacts))
    return path


def tracked(each: TrialResult) -> TrackedTrial:
    return TrackedTrial(
        name=f"trial-{each.trial}",
        phase="search",
        trial=each.trial,
        values=each.values,
        overrides=(),
        make_config=dict,
        seed=each.seed,
        started_at=each.started_at,
    )


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
        f"mlflow_run={run_named(folder, 'cnn-1')}",
        f"tracking.uri={uri_of(folder)}",
        f"output={output}",
    ]
    assert run_command(record_command, line) == 0
    said = capsys.readouterr()
    assert (said.err, said.out) == ("", f"wrote {output}: study cnn-1, 4 trials, 7 evaluations\n")
    written, own = (
        {file.name: file.read_bytes() for file in path.iterdir()}
        for path in (output, folder / "own")
    )
    assert written == own


def test_an_earlier_study_is_named_by_its_name_its_folder_or_its_run(
    folder: Path, tmp_path: Path
) -> None:
    own = read_recording(folder / "own")
    studies = tmp_path / "outputs"
    write_recording(
        studies / "cnn-2" / "recording",
        results=RESULTS,
        target=TARGET,
        space=own.space.as_mapping(),
        source="a test",
        baseline=0,
    )
    entries = [
        "cnn-2",
        str(folder / "own"),
        str(studies / "cnn-2"),
        str(studies / "cnn-2" / "recording"),
        run_named(folder, "cnn-1"),
    ]
    found = earlier_recordings(entries, studies, uri_of(folder))
    assert [name for name, _ in found] == ["cnn-2", "own", "cnn-2", "cnn-2", "cnn-1"]
    for _, each in found:
        # NaN is NaN
        assert (each.target, each.space, str(each.trials)) == (
            own.target,
            own.space,
            str(own.trials),
        )


def test_what_names_no_earlier_study_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    write_recording(
        tmp_path / "mine" / "recording", results=RESULTS, target=TARGET, space={}, source="a test"
    )
    with pytest.raises(ConfigError) as refused:
        earlier_recordings(["other"], tmp_path, None)
    assert (
        str(refused.value)
        == f"warm_start: other: is no study that has a recording in {tmp_path} (there are mine), no"
        " folder with study.yaml, and no id of an MLflow run; give one of these"
    )
    with pytest.raises(ConfigError, match=r"^mlflow_run=0{32}: no such run in "):
        earlier_recordings(["0" * 32], tmp_path, uri_of(folder))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "autotune: mlflow_run and output: missing; add mlflow_run=RUN_ID output=DIR"),
        (
            ["mlflow_run=x", "output=y", "seed=3"],
            (
                "autotune: seed: no such key; there are mlflow_run=RUN_ID, output=DIR,"
                " tracking.uri=URI"
            ),
        ),
        (
            ["mlflow_run=x", "output={folder}/own"],
            "autotune: output={folder}/own: holds a recording already; use another folder",
        ),
        (
            ["mlflow_run=x", "output=s3://x/y"],
            "autotune: output: found the URL s3://x/y, use a folder of this machine",
        ),
        (["mlflow_run=x", "tracking.uri={uri}"], "autotune: output: missing; add"),
        (
            ["mlflow_run=abc", "tracking.uri={uri}", "output={new}"],
            "autotune: mlflow_run=abc: no such run in {uri}; give the id",
        ),
        (
            ["mlflow_run={child}", "tracking.uri={uri}", "output={new}"],
            "autotune: mlflow_run={child}: is not the run of a study; its study's is",
        ),
        (
            ["mlflow_run={old}", "tracking.uri={uri}", "output={new}"],
            "autotune: mlflow_run={old}: study old has not ended; give its folder",
        ),
        (
            ["mlflow_run=x", "tracking.uri=sqlite:///{new}.db", "output={new}"],
            "autotune: tracking.uri: sqlite:///{new}.db: cannot be used (there",
        ),
        (
            ["mlflow_run=x", "tracking.uri=nope://x", "output={new}"],
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
        "child": run_named(folder, "51: optimizer=sgd, momentum=0.333, batch_size=64, depth=2"),
        "old": run_named(folder, "old"),
    }
    assert run_command(record_command, [each.format(**names) for each in line]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(message.format(**names))
    assert said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
