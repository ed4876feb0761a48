"""Looking at a comparison again and again: how often it decides wrongly, and the interval then."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import t as student_t

from autotune.confirm.sequential import Estimate, Looks

AT = (2, 3, 4, 6, 8)


def looked_at(pairs: Sequence[float]) -> tuple[bool, float, tuple[float, float, float]]:
    """Whether pairs of deviation 1 are decided, by which mean, and their interval."""
    looks = Looks()
    for num_pairs in AT:
        mean = float(np.mean(pairs[:num_pairs]))
        estimate = Estimate(mean, 1 / math.sqrt(num_pairs), 1e9)
        if is_decided := looks.decides(num_pairs, AT[-1], estimate.z_score()):
            break
    return is_decided, mean, looks.interval(estimate, num_pairs)


@pytest.mark.parametrize("truth", [0.0, 0.7, 1.5])
def test_all_looks_together_err_one_time_in_twenty(truth: float) -> None:
    rng, num_studies = np.random.default_rng(0), 1000
    found = [looked_at(rng.normal(truth, 1, AT[-1])) for _ in range(num_studies)]
    held = sum(low <= truth <= high for _, _, (low, _, high) in found)
    assert 0.93 <= held / num_studies <= 0.97
    below = sum(middle < truth for _, _, (_, middle, _) in found)
    assert 0.46 <= below / num_studies <= 0.54, "the estimate is median-unbiased"
    if truth == 0:
        assert sum(is_decided for is_decided, _, _ in found) / num_studies <= 0.065
        plain = sum(
            any(abs(np.mean(row[:n])) > 1.96 / math.sqrt(n) for n in AT)
            for row in rng.normal(0, 1, (num_studies, AT[-1]))
        )
        assert plain / num_studies > 0.1, "as who stops at the first plain interval would err"
    if truth == 1.5:
        assert sum(is_decided for is_decided, _, _ in found) / num_studies > 0.9


def test_a_decided_interval_leaves_out_no_difference() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        is_decided, mean, (low, middle, high) = looked_at(rng.normal(0.8, 1, AT[-1]))
        assert low < middle < high
        assert is_decided == (not low <= 0 <= high)
        assert not is_decided or middle * mean > 0


def test_a_single_look_is_students_interval() -> None:
    looks, estimate = Looks(), Estimate(0.4, 0.1, 3.0)
    assert looks.decides(4, 4, estimate.z_score())
    half_width = 0.1 * student_t.ppf(0.975, 3)
    assert looks.interval(estimate, 4) == pytest.approx((0.4 - half_width, 0.4, 0.4 + half_width))


def test_what_was_given_up_has_the_interval_of_all_looks() -> None:
    looks, estimate = Looks(), Estimate(0.01, 0.1, 1e9)
    assert not looks.decides(6, 40, estimate.z_score())
    low, middle, high = looks.interval(estimate, 6)
    assert (middle, high - middle) == (0.01, pytest.approx(middle - low))
    assert high - middle > 0.1 * 1.96
    assert estimate.chance_of_decision(30, 40) < 0.1 < estimate.chance_of_decision(6, 40)
    assert estimate.chance_of_decision(6, 6) == 0


def test_a_look_that_may_spend_nothing_has_an_interval_of_use() -> None:
    looks, estimate = Looks(), Estimate(0.1, 0.3, 4.0)
    assert not looks.decides(4, 8, estimate.z_score())
    assert not looks.decides(6, 100, estimate.z_score()), "more are planned now"
    low, _, high = looks.interval(estimate, 6)
    assert -3 < low < 0 < high < 3
