"""The ratio of pairs of runs: its value, what it claims, and whether its interval holds the
truth as often as it says.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.confirm.statistics import (
    Claim,
    Ratio,
    RunScore,
    expected_score,
    in_turns,
    ratio_of_expected_scores,
    reach_rate_interval,
)
from benchmarks.measuring import median_of_ratios, ratio_of_means

SECONDS = st.floats(1e-3, 1e5)
RATIOS = (ratio_of_means, median_of_ratios)

RatioOf = Callable[[list[float], list[float]], Ratio]


def reached(*seconds: float) -> list[RunScore]:
    return [RunScore(each, reached=True) for each in seconds]


def fell_short(*seconds: float) -> list[RunScore]:
    return [RunScore(each, reached=False) for each in seconds]


CRASHED = [RunScore(None, reached=False)]


def ratio(above: list[RunScore], below: list[RunScore]) -> Ratio:
    found = ratio_of_expected_scores(above, below)
    assert found is not None
    return found


def test_two_arms_go_a_b_b_a() -> None:
    assert list(in_turns(2, 3)) == [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("ratio_of", RATIOS)
@pytest.mark.parametrize("num_pairs", [2, 3, 8, 20])
def test_pairs_that_drift_together_give_an_exact_ratio(ratio_of: RatioOf, num_pairs: int) -> None:
    below = [1.5**number for number in range(num_pairs)]
    found = ratio_of([2 * each for each in below], below)
    assert (found.low, found.ratio, found.high, found.num_pairs) == (2.0, 2.0, 2.0, num_pairs)


@settings(max_examples=30)
@given(
    pairs=st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=13),
    factor=st.floats(1e-2, 1e2),
)
def test_the_interval_holds_the_ratio_whatever_the_unit_and_the_way_round(
    pairs: list[tuple[float, float]], factor: float
) -> None:
    above, below = [list(side) for side in zip(*pairs, strict=True)]
    one = ratio_of_means(above, below)
    for found in (one, median_of_ratios(above, below)):
        assert 0 <= found.low <= found.ratio <= found.high
    assert one == ratio_of_means(above, below), "equal data give equal intervals"
    assert one.ratio == pytest.approx(sum(above) / sum(below))
    other_unit = ratio_of_means(
        [each * factor for each in above], [each * factor for each in below]
    )
    assert math.log1p(other_unit.low) == pytest.approx(math.log1p(one.low), rel=1e-3, abs=1e-6)
    inverse = ratio_of_means(below, above)
    assert one.ratio * inverse.ratio == pytest.approx(1)
    if one.high < 1e100 and len(pairs) < 12:  # the bootstrap is the same only nearly
        assert one.low * inverse.high == pytest.approx(1, rel=1e-6) or one.low == 0


@pytest.mark.parametrize("ratio_of", RATIOS)
@pytest.mark.parametrize("num_pairs", [2, 3, 7, 8, 12])
def test_intervals_hold_the_truth_as_often_as_they_say(ratio_of: RatioOf, num_pairs: int) -> None:
    random = np.random.default_rng(num_pairs)
    num_held, num_trials = 0, 60
    for _ in range(num_trials):
        drift = random.normal(0, 0.3, num_pairs)  # of the machine: in both runs of a pair
        above, below = np.exp(drift + random.normal(0, 0.07, (2, num_pairs)))
        found = ratio_of((2 * above).tolist(), below.tolist())
        num_held += found.low <= 2 <= found.high
    assert 0.85 <= num_held / num_trials <= 1.0
    if num_pairs >= 8:
        assert found.high / found.low < 1.6, "the machine's drift is not in the interval"


@pytest.mark.parametrize("num_pairs", [4, 7, 10, 20])
def test_intervals_of_expected_scores_hold_the_truth_where_runs_miss(num_pairs: int) -> None:
    random = np.random.default_rng(num_pairs)
    num_held, num_trials = 0, 200
    for _ in range(num_trials):
        sides = []
        for rate in (0.8, 0.9):
            spent, hit = np.exp(random.normal(0, 0.1, num_pairs)), random.random(num_pairs) < rate
            sides.append(
                [RunScore(float(each), bool(one)) for each, one in zip(spent, hit, strict=True)]
            )
        found = ratio_of_expected_scores(*sides)
        num_held += found is not None and found.low <= 0.9 / 0.8 <= found.high
    assert 0.85 <= num_held / num_trials <= 1.0


@pytest.mark.parametrize(
    ("runs", "wanted"),
    [
        (reached(2.0, 4.0) + fell_short(9.0), 7.5),
        (fell_short(9.0), math.inf),
        (CRASHED, None),
        ([], None),
        (reached(2.0, 4.0) + CRASHED, 4.5),  # a crash is a miss that costs as much as the others
    ],
)
def test_a_success_costs_what_all_runs_spent_over_those_that_reached(
    runs: list[RunScore], wanted: float | None
) -> None:
    assert expected_score(runs) == wanted


def test_misses_are_in_the_ratio_and_widen_its_interval() -> None:
    found = ratio(reached(4.0, 4.4, 4.2) + fell_short(4.1), reached(2.0, 2.2, 2.1, 2.0))
    assert found.ratio == pytest.approx((16.7 / 3) / (8.3 / 4))
    sure = ratio_of_means([4.0, 4.4, 4.2, 4.1], [2.0, 2.2, 2.1, 2.0])
    assert found.high / found.low > sure.high / sure.low


@pytest.mark.parametrize("num_pairs", [2, 12])
def test_a_side_that_never_reached_leaves_a_bound(num_pairs: int) -> None:
    short, well = fell_short(*[4.0, 8.0] * (num_pairs // 2)), reached(*[2.0] * num_pairs)
    least, most = ratio(short, well), ratio(well, short)
    assert (least.ratio, least.claim, least.high) == (3.0, Claim.AT_LEAST, math.inf)
    assert least.low == ratio_of_means([4.0, 8.0] * (num_pairs // 2), [2.0] * num_pairs).low
    assert (most.ratio, most.claim, most.low) == (pytest.approx(1 / 3), Claim.AT_MOST, 0.0)
    assert math.isfinite(most.high)


def test_resamples_in_which_a_side_never_reached_open_the_interval() -> None:
    found = ratio(reached(2.0) + fell_short(*[2.0] * 13), reached(*[1.0] * 14))
    assert (found.ratio, found.claim, found.high) == (pytest.approx(28.0), Claim.MEASURED, math.inf)


@pytest.mark.parametrize(
    ("num_reached", "num_runs", "low", "high"),
    [(7, 8, 0.473, 0.997), (8, 8, 0.631, 1.0), (0, 8, 0.0, 0.369)],
)
def test_a_reach_rate_has_its_interval(
    num_reached: int, num_runs: int, low: float, high: float
) -> None:
    assert reach_rate_interval(num_reached, num_runs) == pytest.approx((low, high), abs=1e-3)


@pytest.mark.parametrize(
    ("above", "below"),
    [
        (fell_short(4.0), fell_short(2.0)),
        (CRASHED, reached(1.0)),
        (reached(-1.0), reached(1.0)),
        (reached(1.0), reached(0.0)),
        ([], []),
    ],
)
def test_where_nothing_can_be_said_there_is_no_ratio(
    above: list[RunScore], below: list[RunScore]
) -> None:
    assert ratio_of_expected_scores(above, below) is None
