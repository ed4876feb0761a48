"""What further trials are expected to bring and to cost."""

import math
from pathlib import Path

import pytest

from autotune.objective import AmortisedTime, DeviceSeconds, Pareto
from autotune.policy import Done
from autotune.search.outlook import FACTOR, Outlook, outlook
from autotune.search.samplers import quiet_optuna
from tests.search.test_scheduler import end_next, journal_study, policy_over
from tests.support.records import make_evaluation

TIME = AmortisedTime(num_trainings=1)


def outlook_of(scores: dict[int, float], *, num_trials: int = 20) -> Outlook:
    """The outlook of a search whose trials all spent 10 s, some of which reached the target."""
    found = outlook(TIME, {trial: make_evaluation(10.0) for trial in range(num_trials)}, scores)
    assert found is not None
    return found


def test_the_outlook_follows_its_formula() -> None:
    found = outlook_of({19: 4.0})
    assert found.gain == pytest.approx(1 - math.exp(-FACTOR)), (
        "the last trial is the first and best: a doubling brings the whole factor"
    )
    assert found.saving == pytest.approx(4 * found.gain)
    assert found.cost == found.device_seconds == pytest.approx(200)
    assert found.num_trainings == pytest.approx(200 / found.saving)
    early, late = outlook_of({0: 9.0, 19: 4.0}), outlook_of({0: 9.0, 79: 4.0}, num_trials=80)
    assert early.gain > late.gain > 0


def test_nothing_is_expected_before_the_target_is_reached_or_of_scores_that_are_no_costs() -> None:
    objectives = {"time": TIME, "device_seconds": DeviceSeconds(num_trainings=1)}
    several = Pareto(objectives=objectives, preferences={"even": {"time": 1.0}}, search_for="even")
    assert outlook(TIME, {0: make_evaluation(1.0)}, {}) is None
    assert outlook(several, {0: make_evaluation(1.0)}, {0: 1.0}) is None


@pytest.mark.parametrize(("trainings", "num_trials"), [(1, 20), (10_000, 60)])
def test_a_search_ends_when_its_cost_exceeds_what_it_saves(
    trainings: int, num_trials: int, tmp_path: Path
) -> None:
    quiet_optuna()
    policy = policy_over(journal_study(tmp_path), num_trials=60, expected_trainings=trainings)
    while policy.num_trials_left:
        end_next(policy, seconds=10.0)
    assert len(policy.results) == num_trials
    assert policy.suggest() == Done("not worth" if num_trials < 60 else "budget")
    again = policy_over(journal_study(tmp_path), num_trials=60, expected_trainings=trainings)
    assert again.num_trials_left == 0, "another process finds the same"
    assert again.outlook == policy.outlook
    for changed in (100_000, None):
        assert (
            policy_over(
                journal_study(tmp_path), num_trials=70, expected_trainings=changed
            ).num_trials_left
            == 70 - num_trials
        )
