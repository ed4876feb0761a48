"""Draws random points of a search space, without an Optuna study."""

import math
from collections.abc import Sequence

import numpy as np

from autotune.space import Scalar


class RandomTrial:
    """Draws random values, as an Optuna trial with a random sampler does: ``space.suggest(RandomTrial(rng))`` is a point."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False) -> float:
        """Draw a float in [low, high], log-uniform with ``log``."""
        if step is not None:
            return float(low + step * self._rng.integers(0, round((high - low) / step), endpoint=True))
        value = math.exp(self._rng.uniform(math.log(low), math.log(high))) if log else self._rng.uniform(low, high)
        return float(min(max(value, low), high))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Draw a whole number in [low, high], log-uniform with ``log``."""
        if log:
            value = round(math.exp(self._rng.uniform(math.log(low - 0.5), math.log(high + 0.5))))
            return int(min(max(value, low), high))
        return int(low + step * self._rng.integers(0, (high - low) // step, endpoint=True))

    def suggest_categorical(self, name: str, choices: Sequence[Scalar]) -> Scalar:
        """Draw one of the choices, all equally likely."""
        return choices[int(self._rng.integers(len(choices)))]
