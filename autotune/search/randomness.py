"""Randomness of a study: seeds derived from the study's own, and random points of a search
space, drawn without an Optuna study.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autotune.search.encoding import UnitCube
from autotune.space import (
    Choice,
    Float,
    Int,
    Parameter,
    PowerOfTwo,
    Scalar,
    SearchSpace,
    Suggestion,
)

_MAX_REMEMBERED = 1_000_000
"""Maximum size of a space whose tried points are remembered; in a larger space random draws
hardly repeat one."""


def derived_seed(seed: int, purpose: str) -> int:
    """A seed for one purpose, the same on every machine: 31 bits of a SHA-256 of ``seed`` and
    ``purpose``.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:4]) >> 1


class RandomTrial:
    """Draws random values, as an Optuna trial with a random sampler does:
    ``space.suggest(RandomTrial(rng))`` is a point.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Draw a float in [low, high], log-uniform with ``log``."""
        if step is not None:
            return float(
                low + step * self._rng.integers(0, round((high - low) / step), endpoint=True)
            )
        value = (
            math.exp(self._rng.uniform(math.log(low), math.log(high)))
            if log
            else self._rng.uniform(low, high)
        )
        return float(min(max(value, low), high))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """Draw a whole number in [low, high], log-uniform with ``log``."""
        if log:
            value = round(math.exp(self._rng.uniform(math.log(low - 0.5), math.log(high + 0.5))))
            return int(min(max(value, low), high))
        return int(low + step * self._rng.integers(0, (high - low) // step, endpoint=True))

    def suggest_categorical(self, name: str, choices: Sequence[Scalar]) -> Scalar:
        """Draw one of the choices, all equally likely."""
        return choices[int(self._rng.integers(len(choices)))]


class Candidates:
    """Draws points of a space that have not been tried."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._size = num_points(space)
        self._tried: set[tuple[str, ...]] = set()

    def tried(self, point: Suggestion) -> None:
        """Mark a point as tried, so that it is not drawn again."""
        if self._size <= _MAX_REMEMBERED:
            self._tried.add(point.key)

    def forget(self, point: Suggestion) -> None:
        """Mark a point as not tried: its trial was lost."""
        self._tried.discard(point.key)

    @property
    def is_exhausted(self) -> bool:
        """Whether every point of the space has been tried."""
        return len(self._tried) >= self._size

    def draw(self, rng: np.random.Generator, count: int) -> list[Suggestion]:
        """Draw at most ``count`` random points, maybe with duplicates.

        In a space small enough to list, none only if all were tried.
        """
        by_chance = RandomTrial(rng)
        drawn = [self._space.suggest(by_chance) for _ in range(count)]
        if self._size > _MAX_REMEMBERED:
            return drawn
        new = [point for point in drawn if point.key not in self._tried]
        if new or self._size > 4096:  # random draws soon find one there
            return new
        left = [point for point in points(self._space) if point.key not in self._tried]
        return [left[int(index)] for index in rng.permutation(len(left))[:count]]

    def in_place_of(self, point: Suggestion, rng: np.random.Generator) -> Suggestion:
        """The point itself, or if it was tried one near it that was not, as far as random draws
        find one.
        """
        if point.key not in self._tried:
            return point
        # enough to stay near what the sampler finds promising
        drawn = self.draw(rng, 64) or [point]
        cube = UnitCube(self._space)
        features = cube.features(cube.encode([point, *drawn]))
        return drawn[int(((features[1:] - features[0]) ** 2).sum(axis=1).argmin())]


def num_points(space: SearchSpace) -> float:
    """Number of points in a space; infinite if a parameter is a real number without a step."""
    return math.prod(map(_num_values, space.parameters.values()))


def _num_values(parameter: Parameter) -> float:
    if isinstance(parameter, Choice):
        return sum(num_points(beneath) for _, beneath in parameter.options)
    if isinstance(parameter, PowerOfTwo):
        return float((parameter.high // parameter.low).bit_length())
    if parameter.single():
        return 1.0
    return (
        math.inf
        if parameter.step is None
        else float(round((parameter.high - parameter.low) / parameter.step) + 1)
    )


def points(space: SearchSpace) -> Iterator[Suggestion]:
    """Every point of a finite space."""
    combined: list[dict[str, object]] = [{}]
    for key, parameter in space.parameters.items():
        if isinstance(parameter, Choice):
            opened = [
                {key: value, **point.values}
                for value, beneath in parameter.options
                for point in points(beneath)
            ]
        else:
            opened = [
                {key: _value(parameter, index)} for index in range(round(_num_values(parameter)))
            ]
        combined = [{**before, **after} for before in combined for after in opened]
    yield from map(Suggestion, combined)


def _value(parameter: Float | Int | PowerOfTwo, index: int) -> Any:
    """Value of a parameter at a position, from 0, among its values."""
    return (
        parameter.low * 2**index
        if isinstance(parameter, PowerOfTwo)
        else parameter.low + index * (parameter.step or 0)
    )
