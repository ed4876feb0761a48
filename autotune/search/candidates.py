"""New points for a sampler that models a search: drawn by chance, and in a finite space none that was tried already."""

import math
from collections.abc import Iterator

import numpy as np

from autotune.search.random_sampler import RandomTrial
from autotune.space import Choice, Float, Int, Parameter, PowerOfTwo, SearchSpace, Suggestion

_MOST_LISTED = 4096
"""Points of a space that are listed where chance draws none that is new; in a larger one it soon does."""
_MOST_REMEMBERED = 1_000_000
"""Points of a space above which one is not drawn twice."""


class Candidates:
    """Draws points of a space that were not tried."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._size = num_points(space)
        self._tried: set[tuple[str, ...]] = set()

    def tried(self, point: Suggestion) -> None:
        """A point is no candidate any more."""
        if self._size <= _MOST_REMEMBERED:
            self._tried.add(point.key)

    @property
    def are_exhausted(self) -> bool:
        """Whether every point of the space was tried."""
        return len(self._tried) >= self._size

    def draw(self, rng: np.random.Generator, count: int) -> list[Suggestion]:
        """At most so many points, by chance and perhaps some of them twice; none only where every point of the space was tried."""
        by_chance = RandomTrial(rng)
        drawn = [self._space.suggest(by_chance) for _ in range(count)]
        if self._size > _MOST_REMEMBERED:
            return drawn
        new = [point for point in drawn if point.key not in self._tried]
        if new or self._size > _MOST_LISTED:
            return new
        left = [point for point in points(self._space) if point.key not in self._tried]
        return [left[int(index)] for index in rng.permutation(len(left))[:count]]


def num_points(space: SearchSpace) -> float:
    """How many points a space has; infinite where a parameter is a real number without a step."""
    return math.prod(map(_num_values, space.parameters.values()))


def _num_values(parameter: Parameter) -> float:
    if isinstance(parameter, Choice):
        return sum(num_points(beneath) for _, beneath in parameter.options)
    low, high = parameter.ends()
    if isinstance(parameter, PowerOfTwo):
        return float((high // low).bit_length())
    if isinstance(parameter, Float) and parameter.step is None:
        return 1.0 if low == high else math.inf
    return float(round((high - low) / (parameter.step or 1)) + 1)


def points(space: SearchSpace) -> Iterator[Suggestion]:
    """Every point of a finite space."""
    made: list[dict[str, object]] = [{}]
    for key, parameter in space.parameters.items():
        if isinstance(parameter, Choice):
            opened = [{key: value, **point.values} for value, beneath in parameter.options for point in points(beneath)]
        else:
            opened = [{key: value} for value in _values(parameter)]
        made = [{**before, **after} for before in made for after in opened]
    yield from map(Suggestion, made)


def _values(parameter: Float | Int | PowerOfTwo) -> list[float]:
    low, high = parameter.ends()
    if isinstance(parameter, PowerOfTwo):
        return [low * 2**doublings for doublings in range(round(_num_values(parameter)))]
    if isinstance(parameter, Int):
        return list(range(low, high + 1, parameter.step))
    step = parameter.step or 0.0
    return [float(low + index * step) for index in range(round(_num_values(parameter)))]
