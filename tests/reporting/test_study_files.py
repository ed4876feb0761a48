"""The files of a study's folder: a Pareto front as table and lines, and the trace of a search."""

import csv
import time
from pathlib import Path

from autotune.api import TuneResult
from autotune.measurement import Target, TrialResult
from autotune.objective import AmortisedTime, DeviceSeconds, Pareto
from autotune.outcome import Outcome
from autotune.reporting.study_files import COLUMNS, StudyTables, make_front
from autotune.space import SearchSpace
from tests.support.records import make_evaluation, make_result

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=60.0)
TIME, DEVICES = AmortisedTime(num_trainings=1), DeviceSeconds(num_trainings=1)
PREFERENCES = {
    "balanced": {"time": 1.0, "devices": 1.0},
    "quick": {"time": 5.0, "devices": 1.0},
    "thrifty": {"devices": 1.0},
}


def ended(
    trial: int,
    seconds: float,
    num_workers: int,
    outcome: Outcome = Outcome.REACHED,
    kind: str = "cpu",
) -> TrialResult:
    evaluation = make_evaluation(seconds, metric=0.95, num_workers=num_workers, device_kind=kind)
    return make_result(trial, outcome, evaluation, values={"workers": num_workers})


RESULTS = [
    ended(0, 40.0, 1),
    ended(1, 12.0, 4),
    ended(3, 25.0, 2),
    ended(4, 7.0, 8),
    ended(6, 1.0, 1, Outcome.CAPPED),
    ended(7, 13.0, 4),
]


def test_the_front_is_a_table_and_told_with_what_each_preference_picks() -> None:
    objective = Pareto(
        objectives={"time": TIME, "devices": DEVICES},
        preferences=PREFERENCES,
        search_for="balanced",
    )
    front = make_front(objective, {each.trial: each for each in RESULTS})
    assert front is not None
    assert front.header == ["trial", "time (s)", "devices (device-s)", "picked_by", "overrides"]
    assert front.rows == [
        [4, 7.0, 56.0, "balanced quick", "workers=8"],
        [1, 12.0, 48.0, "", "workers=4"],
        [0, 40.0, 40.0, "thrifty", "workers=1"],
    ]
    assert front.lines == [
        "Pareto front: 3 of 5 trials that reached the target, by time, devices",
        "  balanced  picks trial 4: time 7.00 s, devices 56 device-s",
        "  quick     picks trial 4: time 7.00 s, devices 56 device-s",
        "  thrifty   picks trial 0: time 40.0 s, devices 40 device-s",
    ]
    assert make_front(objective, {0: ended(0, 1.0, 1, Outcome.MISSED)}) is None


def test_a_further_metric_is_a_column_from_the_first_trial_on_that_reports_it(
    tmp_path: Path,
) -> None:
    space = SearchSpace.from_mapping({"training.x": [1, 2]}, "space")
    tables = StudyTables(tmp_path, space, [], {})
    names: list[dict[str, float]] = [{}, {"MAP@k": 0.25}, {"MAP@k": 0.5, "d_loss": 0.125}, {}]
    for trial, metrics in enumerate(names):
        evaluations = [
            make_evaluation(metrics=metrics),
            make_evaluation(metrics=dict([*metrics.items()][:1])),
        ]
        tables.trial_finished(
            make_result(trial, Outcome.MISSED, *evaluations, values={"training.x": 1}), None
        )
    frame = TuneResult("any", tmp_path).trials_dataframe()
    assert [*frame.columns[-4:]] == ["metrics.MAP@k", "metrics.d_loss", "error", "training.x"]
    assert frame["metrics.MAP@k"].dropna().to_dict() == {1: 0.25, 2: 0.5}
    assert frame["metrics.d_loss"].dropna().to_dict() == {2: 0.125}
    assert [*frame["training.x"]] == [1, 1, 1, 1]


def result(trial: int, outcome: Outcome) -> TrialResult:
    return make_result(trial, outcome, started_at=time.time(), stopped_at=time.time())


def rows(path: Path) -> list[tuple[str, ...]]:
    with path.open(newline="") as file:
        return [
            tuple(row[name] for name in COLUMNS if not name.startswith("st"))
            for row in csv.DictReader(file)
        ]


def test_a_row_for_each_stretch_and_none_for_a_trial_that_waits(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    first = StudyTables(tmp_path, SearchSpace(), [], {})
    first.trial_started(0, ())
    first.trial_started(1, ())
    first.evaluated(0, ended(0, 1.5, 1).evaluations[0])
    first.trial_paused(0)
    first.trial_started(2, ())
    first.evaluated(2, ended(0, 4.5, 1).evaluations[0])
    first.trial_finished(result(2, Outcome.REACHED), 4.5)
    after = StudyTables(
        tmp_path, SearchSpace(), [result(2, Outcome.REACHED)], {2: 4.5}
    )  # of another process: what trial 1 was doing is lost
    after.trial_started(0, ())
    after.evaluated(0, ended(0, 2.5, 1).evaluations[0])
    after.trial_paused(0)
    after.trial_finished(result(0, Outcome.STOPPED), None)
    assert rows(path) == [
        ("0", "0", "0", "0.0", "1.5", "PAUSED"),
        ("1", "2", "0", "0.0", "4.5", "REACHED"),
        ("2", "0", "0", "1.5", "2.5", "PAUSED"),
    ]
    with (tmp_path / "trials.csv").open(newline="") as file:
        assert [(row["trial"], row["outcome"], row["score"]) for row in csv.DictReader(file)] == [
            ("2", "REACHED", "4.5"),
            ("0", "STOPPED", ""),
        ]
