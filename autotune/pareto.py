"""Several things to minimise at once: which points none beats in all, and one number for a point by weights.

The number is the weighted product, x1^w1 * x2^w2 * ..., with weights that sum to one. Units drop out of its ratios: 5% less of one
objective is worth as much as 5% less of another of the same weight, so nothing needs a range or a reference point to be scaled by. It
grows with each objective, so its least point is on the front, and bounds of the objectives bound it. What it cannot pick is a point of the
front in a dent, above the straight line between two others on logarithmic axes.

Source: the weighted product method (Miller and Starr, Executive Decisions and Operations Research, 1969); it is the weighted sum of
logarithms.
"""

import math
from collections.abc import Sequence


def pareto_front(points: Sequence[Sequence[float]]) -> list[int]:
    """Places of the points that no other point dominates, in order of their first coordinate.

    A point dominates another one if it is nowhere higher and somewhere lower; equal points are on the front together.
    """
    front: list[int] = []
    for place in sorted(range(len(points)), key=lambda place: tuple(points[place])):  # what dominates a point comes before it
        if not any(_dominates(points[member], points[place]) for member in front):
            front.append(place)
    return front


def weighted_product(values: Sequence[float], weights: Sequence[float]) -> float:
    """The product of values from 0 on, each to the power of its share of the weights."""
    return math.prod(math.pow(value, weight / sum(weights)) for value, weight in zip(values, weights, strict=True))


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(mine <= theirs for mine, theirs in zip(one, other, strict=True)) and tuple(one) != tuple(other)
