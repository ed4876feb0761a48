"""Looking at a comparison again and again while it goes on: when it is decided, and the interval
that is honest then.

Whoever looks after every few pairs of runs, and stops at the first interval without 1, is wrong far
more often than one time in twenty. Here the error of 5% is spent over the looks, a part at each;
what was crossed, or not, at the earlier looks is part of the interval.

Source: Lan and DeMets, Discrete sequential boundaries for clinical trials (Biometrika 70, 1983), on
spending the error, with the function that resembles Pocock's; Armitage, McPherson and Rowe,
Repeated significance tests on accumulating data (JRSS A 132, 1969), on the integration; Tsiatis,
Rosner and Mehta, Exact confidence intervals following a group sequential test (Biometrics 40,
1984), on the order of the outcomes by which the interval is made; Jennison and Turnbull, Group
Sequential Methods (2000), section 4.4, on Student's t in place of the normal.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri, stdtr, stdtrit

_ERROR = 0.05
"""Chance of an interval that does not hold the truth."""
_FARTHEST = 8.0
"""Standard errors that stand for an infinite bound."""
_MOST_OF_ALL_LOOKS = 3.0
"""Bound, in standard errors, that holds for all of some ten looks together: nothing is spent at a
look after which more pairs are planned than before, and its own bound is infinite."""
_LAST_BOUND = 2.1
"""About the bound of the last look."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)

_Array = np.ndarray[Any, np.dtype[np.float64]]


class Looks:
    """The looks at a comparison so far, each after some pairs of runs, and what they may decide."""

    def __init__(self) -> None:
        self.num_pairs: list[int] = []
        """Number of pairs at each look."""
        self._spent: list[float] = []
        self._was_given_up = True

    def decides(self, num_pairs: int, max_pairs: int, z: float) -> bool:
        """Take a look, and return whether the comparison is decided by it.

        Args:
            num_pairs: pairs of runs that are known now.
            max_pairs: pairs at the last look, as planned now; all of the error may be spent then.
            z: estimate over its standard error, as a standard normal deviate.
        """
        self.num_pairs.append(num_pairs)
        fraction = min(num_pairs / max_pairs, 1.0)
        spent = _ERROR * math.log1p((math.e - 1) * fraction)
        self._spent.append(max([spent, *self._spent]))
        is_decided = abs(z) > self._bounds[-1]
        self._was_given_up = not is_decided and num_pairs < max_pairs
        return is_decided

    @property
    def _bounds(self) -> tuple[float, ...]:
        return _bounds(tuple(self.num_pairs), tuple(self._spent))

    def interval(self, estimate: "Estimate", num_pairs: int) -> tuple[float, float, float]:
        """Lower end of the 95% interval after the last look, the median-unbiased estimate, and the
        upper end.

        Of a comparison that was given up though it could go on, these are the ends that hold at all
        looks together, so that it does no harm that the estimate made it end.

        Args:
            num_pairs: pairs of the estimate: those of the last look, or more, where further ones
                were made at the same time.
        """
        if self._was_given_up:
            bound = min(self._bounds[-1], _MOST_OF_ALL_LOOKS)
            reach = estimate.error * float(stdtrit(estimate.freedom, ndtr(bound)))
            return estimate.mean - reach, estimate.mean, estimate.mean + reach
        looks, earlier = (*self.num_pairs[:-1], num_pairs), self._bounds[:-1]
        step = num_pairs - (looks[-2] if earlier else 0)

        from scipy.optimize import brentq  # noqa: PLC0415  # takes long to import

        def higher(mean: float) -> float:
            """Chance of an outcome that is higher than this one, if ``mean`` is the true one."""
            drift = mean / estimate.error / math.sqrt(num_pairs)
            above, nodes, weights = _before_last(looks, earlier, drift)
            seen = drift * num_pairs + estimate.z_score(mean) * math.sqrt(num_pairs)
            return above + float(weights @ ndtr((nodes + drift * step - seen) / math.sqrt(step)))

        def true_mean(chance: float) -> float:
            reach = estimate.error
            for _ in range(40):
                low, high = estimate.mean - reach, estimate.mean + reach
                if higher(low) < chance < higher(high):
                    return float(brentq(lambda mean: higher(mean) - chance, low, high))
                reach *= 2
            return math.copysign(math.inf, chance - 0.5)

        return true_mean(_ERROR / 2), true_mean(0.5), true_mean(1 - _ERROR / 2)


class Estimate(NamedTuple):
    """Mean of some pairs, such as the logarithm of a ratio."""

    mean: float
    error: float
    """Standard error."""
    freedom: float
    """Degrees of freedom of the standard error."""

    def z_score(self, mean: float = 0.0) -> float:
        """Distance from a mean: Student's t as the standard normal deviate that is as rare."""
        t = (self.mean - mean) / self.error
        tail = max(float(stdtr(self.freedom, -abs(t))), 1e-300)
        return math.copysign(-float(ndtri(tail)), t)

    def chance_of_decision(self, num_pairs: int, max_pairs: int) -> float:
        """Chance that the last look decides, by what the pairs so far say.

        Source: Spiegelhalter, Freedman and Blackburn, Monitoring clinical trials: conditional or
        predictive power? (Controlled Clinical Trials 7, 1986).
        """
        step, drift = max_pairs - num_pairs, self.mean / self.error / math.sqrt(num_pairs)
        if step <= 0:
            return 0.0
        edge, expected = _LAST_BOUND * math.sqrt(max_pairs), drift * max_pairs
        deviation = math.sqrt(step + step**2 / num_pairs)
        return float(ndtr((expected - edge) / deviation) + ndtr((-expected - edge) / deviation))


@lru_cache(maxsize=256)
def _bounds(looks: tuple[int, ...], spent: tuple[float, ...]) -> tuple[float, ...]:
    """Distance of the estimate from 0, in standard errors, at which each look decides.

    Args:
        looks: numbers of pairs, increasing.
        spent: error that may have been spent by the end of each look.
    """
    found: list[float] = []
    for index, error in enumerate(spent):
        _, nodes, weights = _before_last(looks[: index + 1], tuple(found), 0.0)
        before, spent_before = (looks[index - 1], spent[index - 1]) if index else (0, 0.0)
        deviation, wanted = math.sqrt(looks[index] - before), (error - spent_before) / 2
        found.append(_bound(looks[index], nodes / deviation, weights, deviation, wanted))
    return tuple(found)


def _bound(
    num_pairs: int, nodes: _Array, weights: _Array, deviation: float, wanted: float
) -> float:
    """The bound that a sum of pairs exceeds with the chance ``wanted``.

    Args:
        nodes: sums at the look before, in deviations of what has been added since.
        weights: their weights.
    """
    from scipy.optimize import brentq  # noqa: PLC0415  # takes long to import

    def excess(bound: float) -> float:
        edge = bound * math.sqrt(num_pairs) / deviation
        return float(weights @ ndtr(nodes - edge)) - wanted

    is_reachable = wanted > 0 and excess(_FARTHEST) < 0 < excess(0.0)
    return float(brentq(excess, 0.0, _FARTHEST)) if is_reachable else _FARTHEST


def _before_last(
    looks: Sequence[int], earlier_bounds: Sequence[float], drift: float
) -> tuple[float, _Array, _Array]:
    """Chance that an earlier look decided upwards, and the sum of pairs where none decided: nodes
    and weights of its distribution at the last but one look.

    Args:
        drift: true mean of a pair, in its standard deviations.
    """
    nodes, weights, above, before = np.zeros(1), np.ones(1), 0.0, 0
    for num_pairs, bound in zip(looks[:-1], earlier_bounds, strict=True):
        step, edge = num_pairs - before, bound * math.sqrt(num_pairs)
        expected, deviation = nodes + drift * step, math.sqrt(step)
        above += float(weights @ ndtr((expected - edge) / deviation))
        nodes = edge * _NODES
        distances = (nodes[:, None] - expected) / deviation
        density = np.exp(-(distances**2) / 2) @ weights / (deviation * math.sqrt(2 * math.pi))
        weights, before = edge * _WEIGHTS * density, num_pairs
    return above, nodes, weights
