"""The files of a study's folder: a Pareto front as table and lines, and the trace of a search."""

import csv
import time
from pathlib import Path

from autotune.measurement import Evaluation, Target, TrialResult
from autotune.objective import AmortisedTime, Cost, DeviceSeconds, Pareto
from autotune.outcome import Outcome
from autotune.reporting.study_files import COLUMNS, Front, TraceFile, describe_front, make_front, write_front

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=60.0)
TIME, DEVICES = AmortisedTime(num_trainings=1), DeviceSeconds(num_trainings=1)
COST = Cost(num_trainings=1, price_per_hour={"cpu": 3.6, "NVIDIA H200": 36.0}, currency="EUR")
PREFERENCES = {"balanced": {"time": 1.0, "devices": 1.0}, "quick": {"time": 5.0, "devices": 1.0}, "thrifty": {"devices": 1.0}}


def ended(trial: int, seconds: float, num_workers: int, outcome: Outcome = Outcome.REACHED, kind: str = "cpu") -> TrialResult:
    evaluation = Evaluation(
        step=1, epoch=1.0, samples=1, build_seconds=0.0, prepare_seconds=0.0, train_seconds=seconds, evaluate_seconds=0.0, metric=0.95,
        loss=0.1, samples_per_second=1.0, peak_memory_bytes=None, energy_joules=None, num_workers=num_workers, device_kind=kind,
    )  # fmt: skip
    return TrialResult(
        trial=trial, values={"workers": num_workers}, overrides=(), seed=0, outcome=outcome, evaluations=(evaluation,), started_at=0.0,
        stopped_at=1.0, fingerprint={},
    )  # fmt: skip


RESULTS = [
    ended(0, 40.0, 1),
    ended(1, 12.0, 4),
    ended(2, 30.0, 2),
    ended(3, 25.0, 2),
    ended(4, 7.0, 8),
    ended(5, 60.0, 1),
    ended(6, 1.0, 1, Outcome.CAPPED),
    ended(7, 13.0, 4),
]


def front_by(**objectives: AmortisedTime | DeviceSeconds | Cost) -> Front:
    weights = {name: dict.fromkeys(objectives, 1.0) for name in ("balanced",)}
    preferences = PREFERENCES if "devices" in objectives else {**weights, "cheap": {"cost": 1.0}}
    found = make_front(Pareto(objectives=objectives, preferences=preferences, search_for="balanced"), RESULTS)
    assert found is not None
    return found


def test_only_trials_that_reached_the_target_are_on_the_front() -> None:
    front = front_by(time=TIME, devices=DEVICES)
    assert front.members == (4, 1, 0)
    assert set(front.points) == {0, 1, 2, 3, 4, 5, 7}
    assert front.picks == {"balanced": 4, "quick": 4, "thrifty": 0}


def test_a_study_in_which_nothing_reached_has_no_front() -> None:
    objective = Pareto(objectives={"time": TIME, "devices": DEVICES}, preferences=PREFERENCES, search_for="quick")
    assert make_front(objective, [ended(0, 1.0, 1, Outcome.MISSED)]) is None


def test_the_table_has_a_row_a_trial_of_the_front(tmp_path: Path) -> None:
    write_front(tmp_path / "front.csv", front_by(time=TIME, devices=DEVICES), {each.trial: each for each in RESULTS})
    with (tmp_path / "front.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["trial", "time (s)", "devices (device-s)", "picked_by", "overrides"],
        ["4", "7.0", "56.0", "balanced quick", "workers=8"],
        ["1", "12.0", "48.0", "", "workers=4"],
        ["0", "40.0", "40.0", "thrifty", "workers=1"],
    ]


def test_the_front_is_told_with_what_each_preference_picks() -> None:
    assert describe_front(front_by(time=TIME, devices=DEVICES)) == [
        "Pareto front: 3 of 7 trials that reached the target, by time, devices",
        "  balanced  picks trial 4: time 7.00 s, devices 56 device-s",
        "  quick     picks trial 4: time 7.00 s, devices 56 device-s",
        "  thrifty   picks trial 0: time 40.0 s, devices 40 device-s",
    ]


def evaluation(train_seconds: float) -> Evaluation:
    return Evaluation(
        step=1, epoch=1.0, samples=1, build_seconds=3.0, prepare_seconds=0.5, train_seconds=train_seconds, evaluate_seconds=0.0, metric=0.5,
        loss=0.1, samples_per_second=1.0, peak_memory_bytes=None, energy_joules=None,
    )  # fmt: skip


def result(trial: int, outcome: Outcome) -> TrialResult:
    return TrialResult(
        trial=trial, values={}, overrides=(), seed=0, outcome=outcome, evaluations=(), started_at=0.0, stopped_at=0.0, fingerprint={}
    )


def rows(path: Path) -> list[tuple[str, ...]]:
    with path.open(newline="") as file:
        return [tuple(row[name] for name in COLUMNS if not name.startswith("st")) for row in csv.DictReader(file)]


def test_a_row_for_each_stretch_and_none_for_a_trial_that_waits(tmp_path: Path) -> None:
    path, began_at = tmp_path / "trace.csv", time.time()
    first = TraceFile(path, began_at=began_at)
    first.trial_started(0, ())
    first.trial_started(1, ())
    first.evaluated(0, evaluation(1.0))
    first.trial_paused(0)
    first.trial_started(2, ())
    first.evaluated(2, evaluation(4.0))
    first.trial_finished(result(2, Outcome.REACHED), 4.5)
    after = TraceFile(path, began_at=began_at)  # of another process: what trial 1 was doing is lost
    after.trial_started(0, ())
    after.evaluated(0, evaluation(2.0))
    after.trial_paused(0)
    after.trial_finished(result(0, Outcome.STOPPED), None)
    assert rows(path) == [
        ("0", "0", "0", "0.0", "1.5", "PAUSED"),
        ("1", "2", "0", "0.0", "4.5", "REACHED"),
        ("2", "0", "0", "1.5", "2.5", "PAUSED"),
    ]
    with path.open(newline="") as file:
        assert all(0 <= float(row["started_seconds"]) <= float(row["stopped_seconds"]) < 60 for row in csv.DictReader(file))
