"""The Pareto front and the weighted product, against their definitions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.pareto import pareto_front, weighted_product

Points = list[tuple[float, ...]]
FEW = st.integers(0, 4).map(float)
"""Few values, so that ties and equal points are common."""
POINTS = st.integers(1, 4).flatmap(lambda size: st.lists(st.tuples(*[st.floats(0, 1e9) | FEW] * size), max_size=30))
COARSE_POINTS = st.integers(1, 3).flatmap(lambda size: st.lists(st.tuples(*[FEW] * size), max_size=30))


def by_brute_force(points: Points) -> set[int]:
    def dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        pairs = list(zip(one, other, strict=True))
        return all(mine <= theirs for mine, theirs in pairs) and any(mine < theirs for mine, theirs in pairs)

    return {place for place, point in enumerate(points) if not any(dominates(other, point) for other in points)}


@given(points=POINTS | COARSE_POINTS)
def test_the_front_is_what_no_point_dominates(points: Points) -> None:
    front = pareto_front(points)
    assert set(front) == by_brute_force(points)
    assert len(front) == len(set(front))
    assert [points[place] for place in front] == sorted(points[place] for place in front)


@given(points=POINTS.filter(bool), data=st.data())
def test_the_least_weighted_product_is_on_the_front(points: Points, data: st.DataObject) -> None:
    positive = [tuple(value + 1 for value in point) for point in points]
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(points[0]), max_size=len(points[0])))
    products = [weighted_product(point, weights) for point in positive]
    assert min(products) == pytest.approx(min(products[place] for place in pareto_front(positive)), rel=1e-9)


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
def test_a_weighted_product_is_worked_out_by_hand(values: tuple[float, ...], weights: tuple[float, ...], product: float) -> None:
    assert weighted_product(values, weights) == pytest.approx(product)


@given(values=st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), factor=st.floats(1e-3, 1e3))
def test_another_unit_scales_all_products_alike(values: tuple[float, float], factor: float) -> None:
    changed = weighted_product((values[0] * factor, values[1]), (2, 1))
    assert changed / weighted_product(values, (2, 1)) == pytest.approx(math.pow(factor, 2 / 3))
