"""Confirmation arms and how their speed-up is put into words."""

import math

import pytest

from autotune.report.arms import ArmTimes, describe_arm, describe_ratio, format_seconds

BASELINE = ArmTimes(label="baseline", times_seconds=[20.0, 22.0], reached=[True, True])
NEVER = ArmTimes(label="baseline", times_seconds=[60.0, 60.0], reached=[False, False])
BEST = ArmTimes(label="trial 7", times_seconds=[10.0, 11.0], reached=[True, True])


def test_a_ratio_is_told_with_its_interval() -> None:
    assert describe_ratio(BASELINE, BEST, 2.0, 1.8, 2.2) == "2.00x (interval 1.80x to 2.20x)"


def test_a_baseline_that_never_reached_makes_the_ratio_a_lower_bound() -> None:
    assert describe_ratio(NEVER, BEST, 3.1, None, None) == "at least 3.10x"


def test_a_best_that_missed_the_target_claims_nothing() -> None:
    assert "0 of 2 runs of trial 7" in describe_ratio(
        BASELINE, ArmTimes(label="trial 7", times_seconds=[5, 5], reached=[False] * 2), 4.0, 3, 5
    )


@pytest.mark.parametrize("ratio", [None, math.nan, math.inf])
def test_a_ratio_that_is_no_number_was_not_measured(ratio: float | None) -> None:
    assert describe_ratio(BASELINE, BEST, ratio, None, None) == "not measured"


def test_an_arm_with_a_missed_run_is_a_lower_bound() -> None:
    arm = ArmTimes(label="a", times_seconds=[10.0, 60.0], reached=[True, False])
    assert describe_arm(arm) == "at least 35.0 s (mean of 2 runs, 1 reached the target)"
    assert describe_arm(ArmTimes(label="a", times_seconds=[], reached=[])) == "no confirmation runs"


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
