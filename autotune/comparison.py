"""Comparing two configurations by pairs of runs: how many times as long one takes as the other, with a 95% interval.

Confirmation, ``autotune.compare`` and the benchmarks all compare in this way. The two runs of a pair share their seed and are
neighbours in time, and pairs alternate in which side goes first, so what a machine does to one run it does to the other and
the ratio stays. Whole pairs are therefore what is resampled, never the runs of one side alone.

Which interval is decided by the number of pairs:

* From eight pairs on, the bootstrap over pairs. Its plain percentiles are too narrow (they hold the true ratio 90% of the time
  for ten pairs instead of 95%), so they are taken further out, by the factor that makes a mean's interval as wide as Student's.
* With fewer, Student's t over the pairs, on the logarithm of the ratio. No resampling can be honest there: even from the lowest
  to the highest pair, an interval holds the truth half of the time for two pairs and three times out of four for three.

Welch's interval, which takes the sides for independent, is used nowhere: where a machine's speed drifts by 30% between pairs that
vary by 7%, it is three times as wide for three pairs and four times for ten.

In simulations with such a drift, with independent noise of 10% and with skewed times, the intervals of both ratios held the true
one 93% to 99% of the time, for 2, 3, 5, 7, 8, 10, 20 and 40 pairs (2,000 simulations each, 600 from eight pairs on).

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3; Hesterberg, What Teachers Should Know About
the Bootstrap (The American Statistician 69, 2015), on expanded percentiles.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

_CONFIDENCE = 0.95
_FEWEST_RESAMPLED = 8
_NUM_RESAMPLES = 10_000

_Array = np.ndarray[Any, np.dtype[np.float64]]


class Claim(StrEnum):
    """What a ratio says where some runs ended short of the target: their seconds are a lower bound of what they would need."""

    MEASURED = "measured"
    """Every run has its time."""
    AT_LEAST = "at least"
    """Runs of the numerator fell short, so the ratio is at least this; its interval has no upper end."""
    AT_MOST = "at most"
    """Runs of the denominator fell short, so the ratio is at most this; its interval has no lower end."""
    WHERE_BOTH_REACHED = "where both reached"
    """Runs of both sides fell short, or one has no time, which bounds nothing: only pairs whose runs both reached are counted."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as long one side takes as the other, with a 95% confidence interval."""

    ratio: float
    low: float
    """0 where nothing bounds the ratio from below."""
    high: float
    """Infinite where nothing bounds the ratio from above, as with a single pair."""
    num_pairs: int
    """Pairs that the ratio is made of."""
    claim: Claim = Claim.MEASURED

    def __str__(self) -> str:
        words = "" if self.claim is Claim.MEASURED else f"{self.claim} "
        return f"{words}{self.ratio:.4g} [{self.low:.4g}, {self.high:.4g}] (n={self.num_pairs})"


class RunTime(NamedTuple):
    """One run as a comparison sees it."""

    seconds: float | None
    """To the target, or spent without reaching it; None where the run has no time, such as one that crashed."""
    reached: bool


def in_turns(num_arms: int, num_rounds: int) -> Iterator[tuple[int, int]]:
    """Arm and round of every run, in the order to make them: each round begins with another arm, so two arms go A B B A."""
    for number in range(num_rounds):
        for turn in range(num_arms):
            yield (turn + number) % num_arms, number


def ratio_of_times(numerators: Sequence[RunTime], denominators: Sequence[RunTime]) -> Ratio | None:
    """Ratio of two mean times to target over pairs of runs, told for no more than it is: see ``Claim``.

    Runs at the same place are a pair. A pair of which a run has no time at all has no part in the ratio, and the claim says so.

    Returns:
        None where no pair says anything, or a number is not above 0, as the score of an objective of one's own may be.

    Raises:
        ValueError: a run without its partner.
    """
    every = list(zip(numerators, denominators, strict=True))
    pairs = [(above, below) for above, below in every if above.seconds is not None and below.seconds is not None]
    is_above_short = not all(above.reached for above, _ in pairs)
    is_below_short = not all(below.reached for _, below in pairs)
    if is_above_short != is_below_short:
        claim = Claim.AT_LEAST if is_above_short else Claim.AT_MOST
    else:
        claim = Claim.WHERE_BOTH_REACHED if is_above_short or len(pairs) < len(every) else Claim.MEASURED
        pairs = [(above, below) for above, below in pairs if above.reached and below.reached]
    numbers = [(above.seconds or 0.0, below.seconds or 0.0) for above, below in pairs]
    if not numbers or min(map(min, numbers)) <= 0:
        return None
    found = ratio_of_means([above for above, _ in numbers], [below for _, below in numbers])
    low, high = 0.0 if claim is Claim.AT_MOST else found.low, math.inf if claim is Claim.AT_LEAST else found.high
    return replace(found, low=low, high=high, claim=claim)


def ratio_of_means(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Ratio of two mean times over pairs: what many trainings of one side take, over what as many of the other do.

    Args:
        numerators: seconds, or any other positive measure, of one side; its partner stands at the same place of the other.

    Raises:
        ValueError: no pair, a number without its partner, or one that is not above 0.
    """
    above, below = _checked(numerators, denominators)
    ratio = float(above.mean() / below.mean())
    if len(above) < _FEWEST_RESAMPLED:
        residuals = above / above.mean() - below / below.mean()  # of the logarithm of the ratio, to first order
        return _with_student(ratio, math.log(ratio), residuals)
    drawn = _resampled(len(above))
    return _with_bootstrap(ratio, above[drawn].mean(axis=1) / below[drawn].mean(axis=1), len(above))


def median_of_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Median over pairs of numerator / denominator: for benchmarks on a shared machine, where one burst must not decide.

    With fewer than eight pairs the interval is that of the ratios' geometric mean.

    Raises:
        ValueError: as ``ratio_of_means``.
    """
    above, below = _checked(numerators, denominators)
    ratios = above / below
    ratio = float(np.median(ratios))
    if len(ratios) < _FEWEST_RESAMPLED:
        logarithms = np.log(ratios)
        return _with_student(ratio, float(logarithms.mean()), logarithms - logarithms.mean())
    return _with_bootstrap(ratio, np.median(ratios[_resampled(len(ratios))], axis=1), len(ratios))


def _checked(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[_Array, _Array]:
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"{len(numerators)} and {len(denominators)} runs; a ratio needs pairs, and at least one")
    above, below = np.array(numerators, dtype=np.float64), np.array(denominators, dtype=np.float64)
    if not (above.min() > 0 and below.min() > 0):
        raise ValueError(f"found {min(above.min(), below.min())}, a ratio needs numbers above 0")
    return above, below


def _with_student(ratio: float, centre: float, residuals: _Array) -> Ratio:
    """Student's interval around ``centre``, the ratio's logarithm, from the pairs' residuals of it."""
    num_pairs = len(residuals)
    if num_pairs == 1:
        return Ratio(ratio=ratio, low=0.0, high=math.inf, num_pairs=1)
    reach = _student(num_pairs) * float(residuals.std(ddof=1)) / math.sqrt(num_pairs)
    with np.errstate(over="ignore"):
        low, high = float(np.exp(centre - reach)), float(np.exp(centre + reach))
    return Ratio(ratio=ratio, low=min(low, ratio), high=max(high, ratio), num_pairs=num_pairs)


def _with_bootstrap(ratio: float, drawn_ratios: _Array, num_pairs: int) -> Ratio:
    from scipy.special import ndtr  # noqa: PLC0415  # as in _student

    tail = float(ndtr(-_student(num_pairs) * math.sqrt(num_pairs / (num_pairs - 1))))
    low, high = np.exp(np.quantile(np.log(drawn_ratios), [tail, 1 - tail]))
    return Ratio(ratio=ratio, low=min(float(low), ratio), high=max(float(high), ratio), num_pairs=num_pairs)


@lru_cache(maxsize=4)
def _resampled(num_pairs: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which pairs each resample takes, [resamples, pairs]: the same ones every time, so that equal data give equal intervals."""
    return np.random.default_rng(0).integers(num_pairs, size=(_NUM_RESAMPLES, num_pairs))


def _student(num_pairs: int) -> float:
    """How many standard errors reach to the ends of a mean's interval."""
    from scipy.special import stdtrit  # noqa: PLC0415  # a third of a second to import, wanted once a study

    return float(stdtrit(num_pairs - 1, (1 + _CONFIDENCE) / 2))
