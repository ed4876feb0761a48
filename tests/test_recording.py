"""Recordings on disk, read back with the libraries that their readers use."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Target
from autotune.outcome import Outcome
from autotune.recording import read_recording, write_recording
from autotune.search.study import earlier_recording
from tests.support.records import make_evaluation, make_result

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=60.0)
SPACE = {
    "batch_size": {"type": "power_of_two", "low": 16, "high": 512},
    "model.widths": [[8, 16], [16, 32]],
}
POINT = {"batch_size": 64, "model.widths": [8, 16]}


def evaluation(step: int, train_seconds: float, metric: float) -> Evaluation:
    return make_evaluation(
        train_seconds,
        step=step,
        samples=step,
        build_seconds=100.0,
        prepare_seconds=0.5,
        evaluate_seconds=9.0,
        metric=metric,
        loss=1.0,
    )


RESULTS = [
    make_result(
        2,
        Outcome.OUT_OF_MEMORY,
        values={"optimizer": "adamw", "weight_decay": 0, "model.widths": [8, 16]},
    ),
    make_result(0, Outcome.REACHED, evaluation(10, 1.0, 0.5), evaluation(20, 2.0, 0.9)),
    make_result(
        1,
        Outcome.DIVERGED,
        evaluation(5, 0.25, math.nan),
        values={"optimizer": "sgd", "weight_decay": 0.5, "nesterov": True, "depth": 3, "mixed": 1},
    ),
    make_result(
        3,
        Outcome.MISSED,
        evaluation(7, 3.0, 0.1),
        values={"optimizer": "sgd", "mixed": "one", "nothing": None},
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_recording(
        tmp_path / "deep" / "study",
        results=RESULTS,
        target=TARGET,
        space=SPACE,
        source="a test",
        baseline=0,
    )
    return tmp_path / "deep" / "study"


def columns(path: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = pq.read_table(path).to_pydict()
    return found


def test_the_study_says_target_and_clock(folder: Path) -> None:
    assert yaml.safe_load((folder / "study.yaml").read_text()) == {
        "format": 1,
        "metric": "accuracy",
        "mode": "max",
        "target": 0.9,
        "max_train_seconds": 60.0,
        "constraints": {},
        "num_trials": 4,
        "clock": "seconds of preparing and training, measured",
        "source": "a test",
        "baseline": 0,
        "outcomes": {0: "REACHED", 1: "DIVERGED", 2: "OUT_OF_MEMORY", 3: "MISSED"},
    }
    assert yaml.safe_load((folder / "space.yaml").read_text()) == SPACE


def test_trials_are_in_order_with_a_column_for_each_parameter(folder: Path) -> None:
    assert columns(folder / "trials.parquet") == {
        "trial": [0, 1, 2, 3],
        "optimizer": [None, "sgd", "adamw", "sgd"],
        "weight_decay": [None, 0.5, 0.0, None],
        "nesterov": [None, True, None, None],
        "depth": [None, 3, None, None],
        "mixed": [None, "1", None, "one"],
        "model.widths": [None, None, "[8, 16]", None],
        "nothing": [None, None, None, None],
    }


def test_curves_hold_every_evaluation_in_warm_seconds(folder: Path) -> None:
    found = columns(folder / "curves.parquet")
    assert found["trial"] == [0, 0, 1, 3]
    assert found["step"] == [10, 20, 5, 7]
    assert found["train_seconds"] == [1.5, 2.5, 0.75, 3.5]
    assert [found["metric"][index] for index in (0, 1, 3)] == [0.5, 0.9, 0.1]
    assert math.isnan(found["metric"][2])


def test_an_evaluation_at_the_target_that_did_not_count_is_not_the_time_to_target(
    tmp_path: Path,
) -> None:
    results = [
        make_result(number, outcome, first, replace(last, outcome=outcome), values=POINT)
        for number, (outcome, first, last) in enumerate(
            [
                (Outcome.REACHED, evaluation(10, 1.0, 0.95), evaluation(30, 3.0, 0.92)),
                (Outcome.CAPPED, evaluation(10, 2.0, 0.99), evaluation(20, 4.0, 0.99)),
            ]
        )
    ]
    write_recording(tmp_path, results=results, target=TARGET, space=SPACE, source="pruning")
    reached, capped = read_recording(tmp_path).trials
    assert reached.time_to_target(TARGET) == results[0].time_to_target_seconds == 3.5
    assert reached.index_of_target(TARGET) == 1
    assert capped.time_to_target(TARGET) is None


def test_a_later_recording_takes_the_place_of_the_earlier(folder: Path) -> None:
    write_recording(folder, results=RESULTS[:1], target=TARGET, space={}, source="again")
    assert columns(folder / "trials.parquet")["trial"] == [2]
    assert not any(columns(folder / "curves.parquet").values())
    assert yaml.safe_load((folder / "space.yaml").read_text()) == {}
    assert len(list(folder.iterdir())) == 4


def test_an_earlier_study_is_named_by_its_name_or_a_folder(tmp_path: Path) -> None:
    studies = tmp_path / "outputs"
    folder = studies / "cnn-2" / "recording"
    for path in (folder, tmp_path / "own"):
        write_recording(path, results=RESULTS, target=TARGET, space={}, source="a test")
    entries = ["cnn-2", str(tmp_path / "own"), str(studies / "cnn-2"), str(folder)]
    found = [earlier_recording(entry, studies=studies, storage_url=None) for entry in entries]
    assert [name for name, _ in found] == ["cnn-2", "own", "cnn-2", "cnn-2"]
    assert len({str(recording.trials) for _, recording in found}) == 1, (
        "as texts, since NaN is not NaN"
    )


def test_what_names_no_earlier_study_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "recording"
    write_recording(folder, results=RESULTS, target=TARGET, space=SPACE, source="a test")
    with pytest.raises(ConfigError) as refused:
        earlier_recording("other", studies=tmp_path, storage_url=None)
    assert str(refused.value) == (
        f"warm_start: other: is no study that has a recording in {tmp_path} (there are mine), and"
        " no folder with study.yaml; give one of these"
    )
