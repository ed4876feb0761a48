"""The Pareto front and the weighted product, against their definitions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.pareto import pareto_front, weighted_product

Points = list[tuple[float, ...]]
FEW = st.integers(0, 4).map(float)
"""Few values, so that ties and equal points are common."""
POINTS = st.integers(1, 4).flatmap(
    lambda size: st.lists(st.tuples(*[st.floats(0, 1e9) | FEW] * size), max_size=30)
)
COARSE_POINTS = st.integers(1, 3).flatmap(
    lambda size: st.lists(st.tuples(*[FEW] * size), max_size=30)
)


def by_brute_force(points: Points) -> set[int]:
    def dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        pairs = list(zip(one, other, strict=True))
        return all(mine <= theirs for mine, theirs in pairs) and any(
            mine < theirs for mine, theirs in pairs
        )

    return {
        place
        for place, point in enumerate(points)
        if not any(dominates(other, point) for other in points)
    }


@given(points=POINTS | COARSE_POINTS)
def test_the_front_is_what_no_point_dominates(points: Points) -> None:
    front = pareto_front(points)
    assert set(front) == by_brute_force(points)
    assert len(front) == len(set(front))
    assert [points[place] for place in front] == sorted(points[place] for place in front)


@pytest.mark.parametrize(
    ("values", "weights", "product"),
    [
        ((2.0, 8.0), (1, 1), 4.0),
        ((2.0, 8.0), (5, 5), 4.0),
        ((16.0, 1.0), (3, 1), 8.0),
        ((7.0, 5.0), (1, 0), 7.0),
        ((0.0, 5.0), (1, 1), 0.0),
    ],
)
def test_a_weighted_product_is_worked_out_by_hand(
    values: tuple[float, ...], weights: tuple[float, ...], product: float
) -> None:
    assert weighted_product(values, weights) == pytest.approx(product)
