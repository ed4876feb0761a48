"""Minimising several objectives at once: the Pareto front, and the weighted product that makes one
score of several objectives.

The weighted product is x1^w1 * x2^w2 * ..., with weights that sum to one. Units drop out of its
ratios: 5% less of one objective is worth as much as 5% less of another with the same weight, so no
objective has to be scaled by a range or a reference point. It grows with each objective, so the
point with the least product is on the front, and lower bounds of the objectives give a lower bound
of it. It cannot pick a point of the front in a dent, above the straight line between two others on
logarithmic axes.

Source: the weighted product method (Miller and Starr, Executive Decisions and Operations Research,
1969); it is the weighted sum of logarithms.
"""

import math
from collections.abc import Sequence


def pareto_front(points: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the points that no other point dominates, in order of their first coordinate.

    A point dominates another one if it is nowhere higher and somewhere lower; equal points are on
    the front together.
    """
    front: list[int] = []
    # a point's dominators come before it
    for index in sorted(range(len(points)), key=lambda index: tuple(points[index])):
        if not any(_dominates(points[member], points[index]) for member in front):
            front.append(index)
    return front


def weighted_product(values: Sequence[float], weights: Sequence[float]) -> float:
    """Product of non-negative values, each raised to the power of its share of the sum of
    weights.
    """
    return math.prod(
        math.pow(value, weight / sum(weights))
        for value, weight in zip(values, weights, strict=True)
    )


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(
        value <= other_value for value, other_value in zip(one, other, strict=True)
    ) and tuple(one) != tuple(other)
