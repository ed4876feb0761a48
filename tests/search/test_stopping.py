"""Stopping rules: which trials go on, and at how many seconds a worker ends one itself."""

import math
from dataclasses import replace

import pytest

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, TrialResult
from autotune.objective import AmortisedTime, DeviceSeconds, Objective
from autotune.policy import Decision
from autotune.search.stopping import CapAtIncumbent
from tests.support.records import make_evaluation


def evaluated(train_seconds: float, build_seconds: float = 10.0) -> Evaluation:
    return make_evaluation(
        train_seconds, build_seconds=build_seconds, prepare_seconds=1.0, evaluate_seconds=1.0
    )


class FinalLoss:
    """An objective that says nothing before the end."""

    def score(self, result: TrialResult) -> float:
        assert result.last is not None
        return result.last.loss


def capped_at(score: float, objective: Objective, cap_margin: float = 1.0) -> CapAtIncumbent:
    """The rule where a trial must beat a score."""
    rule = CapAtIncumbent(objective=objective, cap_margin=cap_margin)
    rule.score_to_beat = lambda trial: score
    return rule


def test_a_trial_is_capped_once_its_bound_is_past_the_best_score() -> None:
    rule = capped_at(7.0, AmortisedTime(num_trainings=10))
    assert rule.observe(1, evaluated(5.0)) is Decision.CONTINUE
    assert rule.observe(1, evaluated(5.001)) is Decision.CAP
    assert rule.observe(1, evaluated(0.0, build_seconds=61.0)) is Decision.CAP


@pytest.mark.parametrize("num_workers", [1, 4])
def test_device_seconds_are_capped_by_what_all_workers_took(num_workers: int) -> None:
    rule = capped_at(8.0, DeviceSeconds(num_trainings=10**9))
    assert rule.cap_seconds(1) == 8.0, (
        "no fewer than one device is busy, so no winner takes more seconds than that"
    )
    seen = [
        rule.observe(1, replace(evaluated(seconds), num_workers=num_workers))
        for seconds in (0.9, 1.1, 6.9, 7.1)
    ]
    num_on = 3 if num_workers == 1 else 1
    assert seen == [Decision.CONTINUE] * num_on + [Decision.CAP] * (4 - num_on)


def test_an_objective_without_a_bound_caps_nothing() -> None:
    rule = capped_at(1e-3, FinalLoss())
    assert rule.observe(1, evaluated(1e9)) is Decision.CONTINUE
    assert rule.cap_seconds(1) == math.inf


@pytest.mark.parametrize("cap_margin", [0.99, 0, -1, math.nan])
def test_a_margin_below_one_is_refused(cap_margin: float) -> None:
    with pytest.raises(
        ConfigError, match=r"stopping\.cap_margin: found .*, must be a number from 1"
    ):
        capped_at(1.0, AmortisedTime(num_trainings=1), cap_margin)
