"""Points of a search space: encoded as numbers for models and distances, drawn at random, and
listed; and the seeds of a study, all derived from its own.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from autotune.space import (
    Choice,
    Parameter,
    PowerOfTwo,
    Scalar,
    SearchSpace,
    Suggestion,
    override_text,
)

Array = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int_]]

_CATEGORY_SCALE = 0.7
"""Value of the one-hot feature of a point's category: points of two categories are then a
distance of about one apart."""
MAX_ONE_HOT = 32
"""Maximum number of features of a category; learning takes memory and time by the number of
features, times the square of the trials."""
_NOT_OPEN = 0.5
"""Feature of a number whose branch is not open: the middle of [0, 1], which tells the model
nothing."""
_MAX_REMEMBERED = 1_000_000
"""Maximum size of a space whose tried points are remembered; in a larger space random draws
hardly repeat one."""


def derived_seed(seed: int, purpose: str) -> int:
    """A seed for one purpose, the same on every machine: 31 bits of a SHA-256 of ``seed`` and
    ``purpose``.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:4]) >> 1


class UnitCube:
    """A search space as a unit cube with a coordinate for each parameter of each branch.

    A number is scaled to [0, 1], in log where the space says log; a choice of numbers is encoded by
    the option's rank. Any other choice is a category: its coordinate is the option's index, which
    says only whether two points have the same option. A parameter whose branch is not open is NaN.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._coordinates = [
            _Coordinate(
                key,
                parameter,
                frozenset((choice, override_text(value)) for choice, value in chosen.items()),
                _encoded_options(parameter) if isinstance(parameter, Choice) else {},
            )
            for _, key, parameter, chosen in space.walk()
        ]
        self._choices = {key for each in self._coordinates for key, _ in each.branch}
        """Config keys of the choices that open branches."""
        self.num_options = [coordinate.num_options for coordinate in self._coordinates]
        """Number of options of each coordinate that is a category, 0 for a coordinate that is a
        number."""
        of_features = [
            (index, option if count else np.nan)
            for index, count in enumerate(self.num_options)
            for option in range(min(MAX_ONE_HOT, max(1, count)))
        ]
        indices, options = np.array(of_features).reshape(-1, 2).T
        self._feature_indices, self._feature_options = indices.astype(int), options
        """Coordinate of each feature, and the option that a one-hot feature is about; NaN for a
        number."""

    def encode(self, points: Sequence[Suggestion]) -> Array:
        """Coordinates ``[points, parameters]`` of points, NaN where a parameter's branch is not
        open.
        """
        encoded = np.full((len(points), len(self._coordinates)), np.nan)
        for row, point in zip(encoded, points, strict=True):
            values = point.values
            options = {(key, override_text(values[key])) for key in self._choices if key in values}
            for index, coordinate in enumerate(self._coordinates):
                if coordinate.key in values and coordinate.branch <= options:
                    row[index] = coordinate.encode(values[coordinate.key])
        return encoded

    def features(self, points: Sequence[Suggestion]) -> Array:
        """A model's features ``[points, features]``: coordinates without NaN, and with categories
        one-hot.

        A category of more than ``MAX_ONE_HOT`` options has that many features, with signs drawn at
        random for each option, which are about as far from each other as one-hot features are.
        """
        encoded = self.encode(points)
        spread = encoded[:, self._feature_indices]
        is_number = np.isnan(self._feature_options)
        numbers = np.where(np.isnan(spread), _NOT_OPEN, spread)
        features: Array = np.where(
            is_number, numbers, np.where(spread == self._feature_options, _CATEGORY_SCALE, 0.0)
        )
        for index, num_options in enumerate(self.num_options):
            if num_options > MAX_ONE_HOT:
                is_open = ~np.isnan(encoded[:, index])
                codes = _random_codes(num_options)[:, encoded[is_open, index].astype(int)].T
                features[np.ix_(is_open, self._feature_indices == index)] = codes
        return features

    @property
    def num_features(self) -> int:
        """Number of features of a point."""
        return len(self._feature_indices)


@cache
def _random_codes(num_options: int) -> Array:
    """Features ``[features, options]`` of the options of a category: any two differ by about the
    distance of one-hot features.
    """
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(num_options, MAX_ONE_HOT)).T
    return _CATEGORY_SCALE / math.sqrt(MAX_ONE_HOT) * signs


@dataclass(frozen=True)
class _Coordinate:
    """The coordinate of a parameter."""

    key: str
    parameter: Parameter
    branch: frozenset[tuple[str, str]]
    """Keys and options, by their texts, of the choices that open the parameter's branch."""
    codes: Mapping[str, float]
    """Encoded value of each option of a choice, by the option's text."""

    @property
    def num_options(self) -> int:
        """Number of options of a category, 0 for a number."""
        is_number = not isinstance(self.parameter, Choice) or is_ranked(self.parameter)
        return 0 if is_number else len(self.codes)

    def encode(self, value: Any) -> float:
        if isinstance(self.parameter, Choice):
            return self.codes[override_text(value)]
        low, high = self.parameter.low, self.parameter.high
        if high == low:
            return _NOT_OPEN
        if self.parameter.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return float(min(1.0, max(0.0, (value - low) / (high - low))))


def _encoded_options(choice: Choice) -> dict[str, float]:
    """The encoded value of each option of a choice, by its text: among numbers the rank scaled
    to [0, 1], else the index.
    """
    values, scale = [value for value, _ in choice.options], 1
    if is_ranked(choice):
        values, scale = sorted(values), max(1, len(values) - 1)
    return {override_text(value): index / scale for index, value in enumerate(values)}


def is_ranked(choice: Choice) -> bool:
    """Whether all of a choice's values are numbers that have an order, which NaN has not."""
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        for value, _ in choice.options
    )


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


class NearbyTrial(RandomTrial):
    """Draws values near those of a point: ``space.suggest(NearbyTrial(rng, params))`` differs from
    it in about half of its parameters, numbers by a tenth of their range.

    A parameter of a branch that the point does not open is drawn at random.

    Args:
        params: the point as the sampler's parameters, by qualified name.
    """

    def __init__(self, rng: np.random.Generator, params: Mapping[str, Any]) -> None:
        super().__init__(rng)
        self._params = params

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """The point's float, or one near it in [low, high]."""
        value = self._params.get(name)
        if value is None or low == high:
            return super().suggest_float(name, low, high, step=step, log=log)
        value = self._moved(value, low, high, log=log)
        if step is not None:
            value = low + step * round((value - low) / step)
        return float(min(max(value, low), high))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """The point's whole number, or one near it in [low, high]."""
        value = self._params.get(name)
        if value is None or low == high:
            return super().suggest_int(name, low, high, step=step, log=log)
        moved = self._moved(value, low, high, log=log)
        if moved != value:  # by a step at least
            away = max(abs(moved - value), step)
            moved = low + step * round((value + math.copysign(away, moved - value) - low) / step)
        return int(min(max(moved, low), low + (high - low) // step * step))

    def suggest_categorical(self, name: str, choices: Sequence[Scalar]) -> Scalar:
        """The point's choice, or in one of four cases any."""
        is_kept = name in self._params and self._rng.random() < 0.75
        return self._params[name] if is_kept else super().suggest_categorical(name, choices)

    def _moved(self, value: float, low: float, high: float, *, log: bool) -> float:
        if self._rng.random() < 0.5:
            return value
        if log:
            return math.exp(self._step_from(math.log(value), math.log(low), math.log(high)))
        return self._step_from(value, low, high)

    def _step_from(self, value: float, low: float, high: float) -> float:
        moved = value + self._rng.normal(0, 0.1) * (high - low)
        return float(min(max(moved, low), high))


class Candidates:
    """Draws points of a space that have not been tried; with ``may_repeat`` it remembers none."""

    def __init__(self, space: SearchSpace, *, may_repeat: bool = False) -> None:
        self._space = space
        self._size = math.inf if may_repeat else num_points(space)
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

    def draw(
        self, rng: np.random.Generator, count: int, near: Sequence[Suggestion] = ()
    ) -> list[Suggestion]:
        """Draw at most ``count`` random points, maybe with duplicates; half of them near some
        points that were tried, if there are any, and none the same as these.

        In a space small enough to list, none only if all were tried.
        """
        by_chance = RandomTrial(rng)
        nearby = [NearbyTrial(rng, self._space.params_of(point)) for point in near]
        drawn = [
            self._space.suggest(
                nearby[index // 2 % len(nearby)] if nearby and index % 2 else by_chance
            )
            for index in range(count)
        ]
        if self._size > _MAX_REMEMBERED:
            given = [point.values for point in near]  # keys take longer
            return [point for point in drawn if point.values not in given]
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
        features = UnitCube(self._space).features([point, *drawn])
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
            low, step = parameter.low, parameter.step or 0
            opened = [
                {key: low * 2**index if isinstance(parameter, PowerOfTwo) else low + index * step}
                for index in range(round(_num_values(parameter)))
            ]
        combined = [{**before, **after} for before in combined for after in opened]
    yield from map(Suggestion, combined)
