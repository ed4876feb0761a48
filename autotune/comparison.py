"""Comparing two configurations by pairs of runs: how many times the score of one is the score of the other, with a 95% interval.

Confirmation, ``autotune.compare`` and the benchmarks all compare in this way. The score of a configuration is what a success of it is
expected to cost when it is trained anew until it reaches the target: all that its runs spent, misses included, over the number of runs
that reached (expected running time). The two runs of a pair share their seed and are neighbours in time, and pairs alternate in which
side goes first, so what a machine does to one run it does to the other and the ratio stays. Whole pairs are therefore what is
resampled, never the runs of one side alone.

Which interval is decided by the number of pairs:

* From twelve pairs on (eight for a median), the bootstrap over pairs. Its plain percentiles are too narrow (they hold the true ratio 90%
  of the time for ten pairs instead of 95%), so they are taken further out, by the factor that makes a mean's interval as wide as Student's.
* With fewer, Student's t over the pairs, on the logarithm of the ratio. No resampling can be honest with a few: even from the lowest
  to the highest pair, an interval holds the truth half of the time for two pairs and three times out of four for three.

Welch's interval, which takes the sides for independent, is used nowhere: where a machine's speed drifts by 30% between pairs that
vary by 7%, it is three times as wide for three pairs and four times for ten.

In simulations with such a drift, with independent noise of 10% and with skewed times, the intervals of both ratios held the true
one 93% to 99% of the time, for 2, 3, 5, 7, 8, 10, 20 and 40 pairs (2,000 simulations each, 600 from eight pairs on). Of expected scores
with independent noise of 5, 15 and 30% they held it 94 to 96% of the time for 4 to 24 pairs (3,000 each), and where one run in five
misses 94 to 99%: too wide rather than too narrow.

Source: Hansen et al., COCO: performance assessment (2016), on expected running time; Efron and Tibshirani, An Introduction to the
Bootstrap (1993), section 13.3; Hesterberg, What Teachers Should Know About the Bootstrap (The American Statistician 69, 2015), on
expanded percentiles.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

_CONFIDENCE = 0.95
_FEWEST_RESAMPLED = 12
_FEWEST_RATIOS_RESAMPLED = 8
_NUM_RESAMPLES = 10_000
_INFINITE_LOGARITHM = 700.0
"""Of a ratio that stands for an infinite one."""

_Array = np.ndarray[Any, np.dtype[np.float64]]


class Claim(StrEnum):
    """What a ratio says where a side never reached the target: what its runs spent is a lower bound of what a success costs."""

    MEASURED = "measured"
    """Both sides reached the target, each at least once."""
    AT_LEAST = "at least"
    """The numerator never reached it, so the ratio is at least this; its interval has no upper end."""
    AT_MOST = "at most"
    """The denominator never reached it, so the ratio is at most this; its interval has no lower end."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times the score of one side is that of the other, with a 95% confidence interval."""

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


class RunScore(NamedTuple):
    """One run as a comparison sees it."""

    score: float | None
    """What the run spent, in the unit of the objective, up to the target or without reaching it; None where that is not known, as of
    a run that crashed before its first evaluation."""
    reached: bool


def in_turns(num_arms: int, num_rounds: int) -> Iterator[tuple[int, int]]:
    """Arm and round of every run, in the order to make them: each round begins with another arm, so two arms go A B B A."""
    for number in range(num_rounds):
        for turn in range(num_arms):
            yield (turn + number) % num_arms, number


def expected_score(runs: Sequence[RunScore]) -> float | None:
    """What a success costs when the configuration is trained anew until it reaches: all that was spent over the number of successes.

    A run whose spending is not known counts as one that spent as much as the others do on average.

    Returns:
        Infinite where no run reached the target; None where nothing is known of what the runs spent.

    Source: Hansen et al., COCO: performance assessment (2016), expected running time.
    """
    spent = [run.score for run in runs if run.score is not None]
    if not spent:
        return None
    num_reached = sum(run.reached for run in runs)
    return math.fsum(spent) / len(spent) * len(runs) / num_reached if num_reached else math.inf


def reach_rate_interval(num_reached: int, num_runs: int) -> tuple[float, float]:
    """The 95% interval of a configuration's chance of reaching the target, from how many of its runs did.

    Source: Clopper and Pearson (Biometrika 26, 1934).
    """
    from scipy.special import betaincinv  # noqa: PLC0415  # as in _student

    tail = (1 - _CONFIDENCE) / 2
    low = float(betaincinv(num_reached, num_runs - num_reached + 1, tail)) if num_reached else 0.0
    high = float(betaincinv(num_reached + 1, num_runs - num_reached, 1 - tail)) if num_reached < num_runs else 1.0
    return low, high


def ratio_of_expected_scores(numerators: Sequence[RunScore], denominators: Sequence[RunScore]) -> Ratio | None:
    """Ratio of two expected scores over pairs of runs, told for no more than it is: see ``Claim``.

    Runs at the same place are a pair. A run that crashed is one that did not reach the target, and never left out.

    Returns:
        None where neither side reached the target, or a score is not above 0, as that of an objective of one's own may be.

    Raises:
        ValueError: a run without its partner.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} and {len(denominators)} runs; a ratio needs pairs")
    above, below = _Side.of(numerators), _Side.of(denominators)
    if above is None or below is None or not (above.reached.any() or below.reached.any()):
        return None
    claim = Claim.MEASURED
    if not above.reached.any():
        claim, above = Claim.AT_LEAST, replace(above, reached=np.ones_like(above.reached))
    elif not below.reached.any():
        claim, below = Claim.AT_MOST, replace(below, reached=np.ones_like(below.reached))
    found = _ratio(above, below)
    low, high = 0.0 if claim is Claim.AT_MOST else found.low, math.inf if claim is Claim.AT_LEAST else found.high
    return replace(found, low=low, high=high, claim=claim)


def ratio_where_both_reached(numerators: Sequence[RunScore], denominators: Sequence[RunScore]) -> Ratio | None:
    """Ratio of two mean scores over the pairs whose runs both reached the target: it describes those pairs and judges neither side.

    Returns:
        None where there is no such pair.
    """
    pairs = [(a.score, b.score) for a, b in zip(numerators, denominators, strict=True) if a.reached and b.reached]
    scores = [(above, below) for above, below in pairs if above is not None and below is not None and min(above, below) > 0]
    return ratio_of_means([above for above, _ in scores], [below for _, below in scores]) if scores else None


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The runs of one side of a comparison, as arrays ``[pairs]``."""

    spent: _Array
    """Scores; the mean of the others where one is not known."""
    reached: _Array
    """1 where a run reached the target, 0 where it did not."""

    @staticmethod
    def of(runs: Sequence[RunScore]) -> "_Side | None":
        """None where no score is known, or one is not above 0."""
        known = [run.score for run in runs if run.score is not None]
        if not known or min(known) <= 0:
            return None
        mean = math.fsum(known) / len(known)
        spent = np.array([mean if run.score is None else run.score for run in runs])
        return _Side(spent=spent, reached=np.array([float(run.reached) for run in runs]))

    @property
    def expected(self) -> float:
        """The expected score."""
        return float(self.spent.mean() / self.reached.mean())

    @property
    def residuals(self) -> _Array:
        """Each pair's part in the logarithm of the expected score, to first order ``[pairs]``."""
        residuals: _Array = self.spent / self.spent.mean() - self.reached / self.reached.mean()
        return residuals

    def expected_in(self, drawn: np.ndarray[Any, np.dtype[np.int64]]) -> _Array:
        """The expected score of each resample ``[resamples]`` of the pairs ``drawn`` ``[resamples, pairs]``."""
        ratios: _Array = self.spent[drawn].mean(axis=1) / self.reached[drawn].mean(axis=1)
        return ratios


def ratio_of_means(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Ratio of two mean times over pairs: what many trainings of one side take, over what as many of the other do.

    Args:
        numerators: seconds, or any other positive measure, of one side; its partner stands at the same place of the other.

    Raises:
        ValueError: no pair, a number without its partner, or one that is not above 0.
    """
    above, below = _checked(numerators, denominators)
    return _ratio(_Side(spent=above, reached=np.ones_like(above)), _Side(spent=below, reached=np.ones_like(below)))


def median_of_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Median over pairs of numerator / denominator: for benchmarks on a shared machine, where one burst must not decide.

    With fewer than eight pairs the interval is that of the ratios' geometric mean.

    Raises:
        ValueError: as ``ratio_of_means``.
    """
    above, below = _checked(numerators, denominators)
    ratios = above / below
    ratio = float(np.median(ratios))
    if len(ratios) < _FEWEST_RATIOS_RESAMPLED:
        logarithms = np.log(ratios)
        return _with_student(ratio, float(logarithms.mean()), logarithms - logarithms.mean())
    return _with_bootstrap(ratio, np.median(ratios[_resampled(len(ratios))], axis=1), len(ratios))


def _ratio(above: _Side, below: _Side) -> Ratio:
    """The ratio of two sides of which each reached the target at least once."""
    ratio, num_pairs = above.expected / below.expected, len(above.spent)
    if num_pairs < _FEWEST_RESAMPLED:
        return _with_student(ratio, math.log(ratio), above.residuals - below.residuals)
    drawn = _resampled(num_pairs)
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample without a success has no finite expected score
        ratios = above.expected_in(drawn) / below.expected_in(drawn)
    return _with_bootstrap(ratio, ratios[~np.isnan(ratios)], num_pairs)


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
    with np.errstate(divide="ignore"):
        logarithms = np.clip(np.log(drawn_ratios), -_INFINITE_LOGARITHM, _INFINITE_LOGARITHM)
    low, high = np.quantile(logarithms, [tail, 1 - tail])
    return Ratio(
        ratio=ratio,
        low=min(float(np.exp(low)), ratio) if low > -_INFINITE_LOGARITHM else 0.0,
        high=max(float(np.exp(high)), ratio) if high < _INFINITE_LOGARITHM else math.inf,
        num_pairs=num_pairs,
    )


@lru_cache(maxsize=4)
def _resampled(num_pairs: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which pairs each resample takes, [resamples, pairs]: the same ones every time, so that equal data give equal intervals."""
    return np.random.default_rng(0).integers(num_pairs, size=(_NUM_RESAMPLES, num_pairs))


def _student(num_pairs: int) -> float:
    """How many standard errors reach to the ends of a mean's interval."""
    from scipy.special import stdtrit  # noqa: PLC0415  # a third of a second to import, wanted once a study

    return float(stdtrit(num_pairs - 1, (1 + _CONFIDENCE) / 2))
