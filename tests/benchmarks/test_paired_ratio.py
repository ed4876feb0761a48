import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.measuring import paired_ratio

SECONDS = st.floats(min_value=1e-3, max_value=1e3)


def test_ratio_of_pairs_that_drift_together_is_exact():
    ratio = paired_ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])

    assert (ratio.low, ratio.median, ratio.high) == (2.0, 2.0, 2.0)
    assert ratio.num_pairs == 3


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=8))
def test_interval_holds_the_median_and_lies_within_the_pairs(pairs):
    ratio = paired_ratio([above for above, _ in pairs], [below for _, below in pairs])
    ratios = [above / below for above, below in pairs]

    assert min(ratios) <= ratio.low <= ratio.median * (1 + 1e-9)
    assert ratio.median * (1 - 1e-9) <= ratio.high <= max(ratios)


def test_a_number_without_its_partner_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio([1.0, 2.0], [1.0])


def test_no_pair_is_refused():
    with pytest.raises(ValueError, match="no pair"):
        paired_ratio([], [])
