"""The TensorBoard tracker: what it writes, read back as TensorBoard reads it."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from autotune.tracking.tensorboard_tracker import TensorBoardTracker
from autotune.tracking.tracker import StudyInfo
from tests.support.tracked import close, make_evaluation, make_info, make_run


@pytest.fixture
def info(tmp_path: Path) -> StudyInfo:
    return make_info(tmp_path)


def read(info: StudyInfo, run: str) -> EventAccumulator:
    return EventAccumulator(str(Path(info.folder) / "tensorboard" / run)).Reload()


def curve(info: StudyInfo, run: str, name: str) -> list[tuple[int, float]]:
    return [(each.step, pytest.approx(each.value)) for each in read(info, run).Scalars(name)]


def closed(tracker: TensorBoardTracker) -> None:
    close(tracker, metrics={"speed_up": 2.5}, tags={"autotune.best_trial": "1"})


def test_a_run_has_its_curve_each_evaluation_once(info: StudyInfo) -> None:
    trial, result, score = make_run(num_evaluations=3)
    tracker = TensorBoardTracker(info)
    tracker.start(trial)
    tracker.evaluate(trial.name, result.evaluations[0])
    tracker.finish(trial, result, score)
    closed(tracker)
    assert tracker.browse == f"tensorboard --logdir {Path(info.folder).parent}"
    assert curve(info, trial.name, "metric") == [
        (each.step, each.metric) for each in result.evaluations
    ]
    assert curve(info, trial.name, "train_seconds") == [
        (each.step, each.train_seconds) for each in result.evaluations
    ]
    assert curve(info, "study", "speed_up") == [(0, 2.5)]


def test_a_run_has_its_row_of_hyperparameters(info: StudyInfo) -> None:
    trial, result, score = make_run(num_evaluations=1)
    tracker = TensorBoardTracker(info)
    tracker.finish(trial, result, score)
    closed(tracker)
    content = (
        read(info, trial.name).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    )
    row = HParamsPluginData.FromString(content).session_start_info.hparams
    assert {key: value.string_value or value.number_value for key, value in row.items()} == {
        "optimizer": "sgd",
        "optimizer.lr": pytest.approx(0.1),
        "phase": "search",
        "outcome": "REACHED",
    }
    assert curve(info, trial.name, "result/score") == [(0, score)]


def test_a_resumed_study_gets_the_runs_that_it_lacks(info: StudyInfo) -> None:
    runs = [make_run(number) for number in range(2)]
    first = TensorBoardTracker(info)
    first.finish(*runs[0])
    closed(first)
    resumed = TensorBoardTracker(info)
    assert resumed.complete >= {"trial-0"}
    resumed.finish(*runs[1])
    closed(resumed)
    for trial, result, _ in runs:
        assert curve(info, trial.name, "metric") == [
            (each.step, each.metric) for each in result.evaluations
        ]


def test_names_that_tensorboard_would_make_one_stay_apart(info: StudyInfo) -> None:
    metrics = {"MAP@k": 1.0, "MAP_k": 2.0, "a b": 3.0, "a_b": 4.0, "/x": 5.0, "x": 6.0}
    trial, result, score = make_run(evaluations=(make_evaluation(1, metrics=metrics),))
    tracker = TensorBoardTracker(info)
    tracker.finish(trial, result, score)
    closed(tracker)
    names = [
        name
        for name in read(info, trial.name).Tags()["scalars"]
        if name.startswith(("MAP", "a_", "x"))
    ]
    assert len(names) == len(metrics)
    assert sorted(
        each.value for name in names for each in read(info, trial.name).Scalars(name)
    ) == list(metrics.values())
