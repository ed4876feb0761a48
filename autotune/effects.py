"""Records of what each parameter of a search space does to the time to target, and to its two
parts: steps and seconds a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MIN_TRIALS = 8
"""Minimum number of evaluated trials; with fewer, effects are noise."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its 90% interval."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What one parameter does to a quantity."""

    name: str
    """The parameter's qualified name, such as ``optimizer=sgd/optimizer.lr``."""
    share: Interval
    """Part of the quantity's variance, in logarithms and over the whole search space, that goes
    with the parameter; shares sum to 1."""
    values: Sequence[Any]
    """Values of the parameter, in order: the options of a choice, some of very many, else a few
    numbers from the lowest to the highest."""
    factors: Sequence[Interval]
    """For each of ``values``, the quantity over its geometric mean in the search space, averaged
    over all other parameters."""


@dataclass(frozen=True, kw_only=True)
class Effects:
    """What all parameters do to one quantity."""

    quantity: str
    """The quantity, such as ``steps to target``."""
    num_trials: int
    """Number of trials that the estimates are made from, censored trials among them."""
    effects: Sequence[Effect]
    """The parameters that varied, the most important one first."""
