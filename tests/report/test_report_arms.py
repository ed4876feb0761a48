"""Confirmation arms and how their speed-up is put into words."""

import math

import pytest

from autotune.comparison import Claim, Ratio, RunScore
from autotune.report.arms import ArmScores, describe_arm, describe_ratio, describe_reached
from autotune.report.score_format import format_seconds


def arm(*runs: tuple[float | None, bool]) -> ArmScores:
    return ArmScores(label="trial 7", runs=[RunScore(*run) for run in runs])


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (Ratio(ratio=2.0, low=1.8, high=2.2, num_pairs=3), "2.00x (interval 1.80x to 2.20x)"),
        (Ratio(ratio=2.0, low=0.0, high=math.inf, num_pairs=1), "2.00x (one pair, no interval)"),
        (Ratio(ratio=3.1, low=2.9, high=math.inf, num_pairs=3, claim=Claim.AT_LEAST), "at least 3.10x (interval from 2.90x)"),
        (Ratio(ratio=0.5, low=0.0, high=0.6, num_pairs=3, claim=Claim.AT_MOST), "at most 0.50x (interval to 0.60x)"),
        (None, "not measured"),
    ],
)
def test_a_ratio_is_told_with_its_interval_and_for_no_more_than_it_claims(ratio: Ratio | None, words: str) -> None:
    assert describe_ratio(ratio) == words


def test_misses_are_told_beside_what_a_success_costs() -> None:
    assert describe_arm(arm((10.0, True), (60.0, False))) == "70.0 s (reached in 1 of 2 runs: in 1% to 99% of all)"
    assert describe_arm(arm((60.0, False), (70.0, False))) == "at least 65.0 s (reached in 0 of 2 runs: in 0% to 84% of all)"
    assert describe_reached(arm((10.0, True))) == "reached in 1 of 1 runs"
    assert describe_arm(arm((10.0, True), (12.0, True))) == "11.0 s (mean of 2 runs)"
    assert describe_arm(arm()) == "no confirmation runs"


def test_a_run_without_a_time_is_a_run_that_did_not_reach() -> None:
    crashed = arm((None, False), (3.0, True))
    assert (crashed.num_runs, crashed.num_reached, crashed.all_reached, crashed.mean_spent, crashed.expected_score) == (
        2,
        1,
        False,
        3.0,
        6.0,
    )


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
