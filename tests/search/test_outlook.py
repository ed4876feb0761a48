"""What further trials are expected to bring and to cost."""

import math
from pathlib import Path

import pytest

from autotune.objective import AmortisedTime, DeviceSeconds, Pareto
from autotune.search.outlook import FACTOR, SearchHistory
from autotune.search.samplers import quiet_optuna
from tests.policies import evaluation
from tests.search.test_policy import end_next, journal_study, policy_over

TIME = AmortisedTime(num_trainings=1)


def history(scores: dict[int, float], *, num_trials: int = 20, spent: float = 10.0) -> SearchHistory:
    """A search whose trials all spent the same, some of which reached the target."""
    made = SearchHistory(TIME)
    for trial in range(num_trials):
        made.evaluated(trial, evaluation(spent))
    for trial, score in scores.items():
        made.reached(trial, score)
    return made


def test_the_outlook_follows_its_formula() -> None:
    outlook = history({19: 4.0}).outlook()
    assert outlook is not None
    assert outlook.gain == pytest.approx(1 - math.exp(-FACTOR)), "the last trial is the first and best: a doubling brings the whole factor"
    assert outlook.saving == pytest.approx(4 * outlook.gain)
    assert outlook.cost == outlook.device_seconds == pytest.approx(200)
    assert outlook.num_trainings == pytest.approx(200 / outlook.saving)


def test_less_is_expected_late_in_a_search() -> None:
    early, late = history({0: 9.0, 19: 4.0}).outlook(), history({0: 9.0, 79: 4.0}, num_trials=80).outlook()
    assert early is not None
    assert late is not None
    assert early.gain > late.gain > 0


def test_a_training_on_several_devices_costs_the_seconds_of_each() -> None:
    made = SearchHistory(DeviceSeconds(num_trainings=1))
    made.evaluated(0, evaluation(10.0, num_workers=4))
    made.reached(0, 40.0)
    outlook = made.outlook(1)
    assert outlook is not None
    assert outlook.cost == outlook.device_seconds == pytest.approx(40)


def test_nothing_is_expected_before_the_target_is_reached_or_of_scores_that_are_no_costs() -> None:
    assert history({}).outlook() is None
    objectives = {"time": TIME, "device_seconds": DeviceSeconds(num_trainings=1)}
    several = SearchHistory(Pareto(objectives=objectives, preferences={"even": {"time": 1.0}}, search_for="even"))
    several.evaluated(0, evaluation(1.0))
    several.reached(0, 1.0)
    assert not several.has_costs
    assert several.outlook() is None


@pytest.mark.parametrize(("trainings", "num_trials"), [(1, 20), (10_000, 60)])
def test_a_search_ends_when_its_cost_exceeds_what_it_saves(trainings: int, num_trials: int, tmp_path: Path) -> None:
    quiet_optuna()
    policy = policy_over(journal_study(tmp_path), num_trials=60, expected_trainings=trainings)
    while policy.num_trials_left:
        end_next(policy, seconds=10.0)
    assert len(policy.results) == num_trials
    assert policy.suggest() is None
    assert policy.is_not_worth_more is (num_trials < 60)
    again = policy_over(journal_study(tmp_path), num_trials=60, expected_trainings=trainings)
    assert again.num_trials_left == 0, "another process finds the same"
    assert again.outlook == policy.outlook
    for changed in (100_000, None):
        assert policy_over(journal_study(tmp_path), num_trials=70, expected_trainings=changed).num_trials_left == 70 - num_trials
