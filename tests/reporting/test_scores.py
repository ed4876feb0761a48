"""How scores, and the arms of a confirmation, are told in words."""

import math

import pytest

from autotune.confirm.statistics import Claim, Ratio, RunScore
from autotune.measurement import Target, TrialResult
from autotune.objective import AmortisedTime, Cost, DeviceSeconds
from autotune.outcome import Outcome
from autotune.reporting.scores import (
    SECONDS,
    ConfigurationScores,
    ScoreFormat,
    describe_ratio,
    describe_reached,
    describe_scores,
    format_seconds,
    run_score,
    score_format_of,
)
from autotune.reporting.study_files import scores_json
from tests.support.records import make_evaluation, make_result

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=60.0)
COST = Cost(num_trainings=1, price_per_hour={"cpu": 3.6}, currency="EUR")
MONEY = score_format_of(COST)


class FinalLoss:
    """An objective of the user's own, which says nothing of itself."""

    def score(self, result: TrialResult) -> float:
        return 0.0


def ended(outcome: Outcome) -> TrialResult:
    evaluation = make_evaluation(9.0, prepare_seconds=1.0, num_workers=2, device_kind="cpu")
    return make_result(1, outcome, evaluation)


@pytest.mark.parametrize(
    ("scale", "score", "words"),
    [
        (SECONDS, 12.34, "12.3 s"),
        (score_format_of(AmortisedTime(num_trainings=1)), 754.0, "12 min 34 s"),
        (score_format_of(DeviceSeconds(num_trainings=1)), 75432.1, "75,432 device-s"),
        (MONEY, 0.000123456, "0.000123 EUR"),
        (score_format_of(FinalLoss()), 0.25, "0.25"),
        (MONEY, float("inf"), "unknown"),
    ],
)
def test_a_score_is_told_in_its_objectives_unit(
    scale: ScoreFormat, score: float, words: str
) -> None:
    assert scale.format(score) == words


def test_a_trial_that_fell_short_is_told_at_what_it_spent_in_the_same_unit() -> None:
    assert run_score(ended(Outcome.CAPPED), COST) == RunScore(pytest.approx(0.02), reached=False)
    assert run_score(ended(Outcome.CAPPED), FinalLoss()).score is None


def test_axes_and_files_name_quantity_and_unit() -> None:
    assert [each.axis_label for each in (SECONDS, MONEY, score_format_of(FinalLoss()))] == [
        "Time to target (s)",
        "Cost to target (EUR)",
        "Score",
    ]
    arm = ConfigurationScores(
        label="a", runs=[RunScore(0.5, reached=True), RunScore(0.75, reached=False)], scale=MONEY
    )
    found = scores_json(arm)
    assert found.pop("reach_rate_interval") == pytest.approx((0.0126, 0.9874), abs=1e-4)
    assert found == {
        "unit": "EUR",
        "scores": [0.5],
        "lower_bounds": [0.75],
        "num_runs": 2,
        "num_reached": 1,
        "expected_score": 1.25,
    }
    assert describe_scores(arm) == "1.25 EUR (reached in 1 of 2 runs: in 1% to 99% of all)"


def arm(*runs: tuple[float | None, bool]) -> ConfigurationScores:
    return ConfigurationScores(label="trial 7", runs=[RunScore(*run) for run in runs])


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (Ratio(ratio=2.0, low=1.8, high=2.2, num_pairs=3), "2.00x (interval 1.80x to 2.20x)"),
        (Ratio(ratio=4.55, low=0.0, high=15083.54, num_pairs=2), "not shown"),
        (
            Ratio(ratio=3.1, low=2.9, high=math.inf, num_pairs=3, claim=Claim.AT_LEAST),
            "at least 3.10x (interval from 2.90x)",
        ),
        (
            Ratio(ratio=0.5, low=0.0, high=0.6, num_pairs=3, claim=Claim.AT_MOST),
            "at most 0.50x (interval to 0.60x)",
        ),
        (None, "not measured"),
    ],
)
def test_a_ratio_is_told_with_its_interval_and_for_no_more_than_it_claims(
    ratio: Ratio | None, words: str
) -> None:
    assert describe_ratio(ratio) == words


def test_misses_are_told_beside_what_a_success_costs() -> None:
    assert (
        describe_scores(arm((10.0, True), (60.0, False)))
        == "70.0 s (reached in 1 of 2 runs: in 1% to 99% of all)"
    )
    assert (
        describe_scores(arm((60.0, False), (70.0, False)))
        == "at least 65.0 s (reached in 0 of 2 runs: in 0% to 84% of all)"
    )
    assert describe_reached(arm((10.0, True))) == "reached in 1 of 1 runs"
    assert describe_scores(arm((10.0, True), (12.0, True))) == "11.0 s (mean of 2 runs)"
    assert describe_scores(arm()) == "no confirmation runs"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.1234, "0.123 s"),
        (9.876, "9.88 s"),
        (59.99, "60.0 s"),
        (725.2, "12 min 05 s"),
        (7199.7, "2 h 00 min"),
        (math.nan, "unknown"),
    ],
)
def test_durations_read_well(seconds: float, words: str) -> None:
    assert format_seconds(seconds) == words
