"""Comparison of two configurations by pairs of runs: the ratio of their expected scores, with a 95%
confidence interval.

Confirmation, ``autotune.compare`` and the benchmarks all compare in this way. The expected score of
a configuration is the cost of one success when it is trained again and again until it reaches the
target: the total score of its runs, misses included, divided by the number of runs that reached the
target (expected running time). The two runs of a pair share their seed and are neighbours in time,
and pairs alternate in which side goes first, so the machine affects both runs of a pair alike and
their ratio stays. Whole pairs are therefore resampled, never the runs of one side alone.

The number of pairs decides which interval is used:

* From twelve pairs on: the bootstrap over pairs. Its plain percentiles are too narrow (with ten
  pairs they contain the true ratio 90% of the time instead of 95%), so they are moved outwards by
  the factor that makes a mean's interval as wide as Student's.
* With fewer pairs: Student's t over the pairs, on the logarithm of the ratio. No resampling is
  honest with so few: even the interval from the lowest to the highest pair contains the true ratio
  half of the time for two pairs and three times out of four for three.

Welch's interval, which takes the sides to be independent, is not used: if a machine's speed drifts
by 30% between pairs that vary by 7%, it is three times as wide for three pairs and four times for
ten.

The claim of a race is looked at while it goes on: ``autotune.confirm.sequential`` has its interval.

In simulations with such a drift, with independent noise of 10% and with skewed times, the intervals
of both kinds of ratio contained the true ratio 93% to 99% of the time, for 2, 3, 5, 7, 8, 10, 20
and 40 pairs (2,000 simulations each, 600 from eight pairs on). Intervals of expected scores with
independent noise of 5, 15 and 30% contained it 94 to 96% of the time for 4 to 24 pairs (3,000
each), and 94 to 99% if one run in five misses the target: too wide rather than too narrow.

Source: Hansen et al., COCO: performance assessment (2016), on expected running time; Efron and
Tibshirani, An Introduction to the Bootstrap (1993), section 13.3; Hesterberg, What Teachers Should
Know About the Bootstrap (The American Statistician 69, 2015), on expanded percentiles.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betaincinv, ndtr, stdtrit

_CONFIDENCE = 0.95
_FEWEST_RESAMPLED = 12
_NUM_RESAMPLES = 10_000
_INFINITE_LOGARITHM = 700.0
"""Logarithm that stands for that of an infinite ratio, and its negative for that of zero."""

_Array = np.ndarray[Any, np.dtype[np.float64]]


class Claim(StrEnum):
    """Whether a ratio is measured or a bound: the score of a side that never reached the target
    is only bounded from below by its runs.
    """

    MEASURED = "measured"
    """Both sides reached the target, each at least once."""
    AT_LEAST = "at least"
    """The numerator's side never reached the target: the ratio is a lower bound, and its
    interval has no upper end."""
    AT_MOST = "at most"
    """The denominator's side never reached the target: the ratio is an upper bound, and its
    interval has no lower end."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Score of one side divided by the score of the other, with a 95% confidence interval."""

    ratio: float
    low: float
    """Lower end of the interval; 0 if nothing bounds the ratio from below."""
    high: float
    """Upper end of the interval; infinite if nothing bounds the ratio from above, as with a
    single pair."""
    num_pairs: int
    """Number of pairs of runs that the ratio is computed from."""
    claim: Claim = Claim.MEASURED
    num_pairs_lacking: int | None = None
    """About how many further pairs would resolve a ratio that is not; None if that is not known, or
    if they are too many."""

    @property
    def is_resolved(self) -> bool:
        """Whether the two sides are shown to differ: the interval does not contain 1, as it does
        with a single pair.

        A ratio that is not resolved is never told as a result, only with its interval as a detail.
        """
        return not self.low <= 1 <= self.high

    @property
    def is_gain(self) -> bool:
        """Whether the denominator's side is shown to be the better one."""
        return self.low > 1

    def __str__(self) -> str:
        words = "" if self.claim is Claim.MEASURED else f"{self.claim} "
        return f"{words}{self.ratio:.4g} [{self.low:.4g}, {self.high:.4g}] (n={self.num_pairs})"


class RunScore(NamedTuple):
    """Score of one run, and whether it reached the target."""

    score: float | None
    """What the run spent until it reached the target or ended, in the unit of the objective;
    None if unknown, as for a run that crashed before its first evaluation."""
    reached: bool
    seconds: float = 0.0
    """Seconds that the run takes from the budget of a race."""


def in_turns(num_configurations: int, num_rounds: int) -> Iterator[tuple[int, int]]:
    """Yield configuration and round of every run in the order of execution: each round begins with
    another configuration, so two of them go A B B A.
    """
    for number in range(num_rounds):
        for turn in range(num_configurations):
            yield (turn + number) % num_configurations, number


def expected_score(runs: Sequence[RunScore]) -> float | None:
    """Expected score of a configuration: the total score of its runs divided by the number of runs
    that reached the target.

    This is the cost of one success when the configuration is trained again and again until it
    reaches the target. A run with an unknown score counts with the mean of the known scores.

    Returns:
        The expected score; infinite if no run reached the target, None if no score is known.

    Source: Hansen et al., COCO: performance assessment (2016), expected running time.
    """
    scores = [run.score for run in runs if run.score is not None]
    if not scores:
        return None
    num_reached = sum(run.reached for run in runs)
    return math.fsum(scores) / len(scores) * len(runs) / num_reached if num_reached else math.inf


def reach_rate_interval(num_reached: int, num_runs: int) -> tuple[float, float]:
    """95% confidence interval of the probability that a run of a configuration reaches the target.

    Source: Clopper and Pearson (Biometrika 26, 1934).
    """
    tail = (1 - _CONFIDENCE) / 2
    low = float(betaincinv(num_reached, num_runs - num_reached + 1, tail)) if num_reached else 0.0
    high = (
        float(betaincinv(num_reached + 1, num_runs - num_reached, 1 - tail))
        if num_reached < num_runs
        else 1.0
    )
    return low, high


def ratio_of_expected_scores(
    numerators: Sequence[RunScore], denominators: Sequence[RunScore]
) -> Ratio | None:
    """Ratio of the expected scores of two sides over pairs of runs.

    ``Claim`` says if it is a bound.

    Runs at the same index are a pair. A crashed run counts as one that did not reach the target; it
    is never left out.

    Returns:
        The ratio; None if neither side reached the target, or if a score is not above 0 (a custom
        objective may give such scores).

    Raises:
        ValueError: the sides have different numbers of runs.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} and {len(denominators)} runs; a ratio needs pairs")
    above, below = _side(numerators), _side(denominators)
    if above is None or below is None or not (above[1].any() or below[1].any()):
        return None
    if not above[1].any():
        bound = _ratio(_all_reached(above[0]), below)
        return replace(bound, high=math.inf, claim=Claim.AT_LEAST)
    if not below[1].any():
        return replace(_ratio(above, _all_reached(below[0])), low=0.0, claim=Claim.AT_MOST)
    return _ratio(above, below)


def ratio_of_pairs(
    numerators: Mapping[int, RunScore], denominators: Mapping[int, RunScore]
) -> Ratio | None:
    """Ratio of the expected scores of two configurations over the rounds in which both ran.

    Args:
        numerators: runs of one configuration, by number of the round.
        denominators: runs of the other one.
    """
    rounds = sorted(numerators.keys() & denominators.keys())
    return ratio_of_expected_scores(
        [numerators[number] for number in rounds], [denominators[number] for number in rounds]
    )


def deviation_of_pairs(numerators: Sequence[RunScore], denominators: Sequence[RunScore]) -> float:
    """Standard deviation of one pair's part in the logarithm of ``ratio_of_expected_scores``.

    0 if the pairs do not tell it.
    """
    above, below = _side(numerators), _side(denominators)
    if above is None or below is None or len(numerators) < 2:
        return 0.0
    if not (above[1].any() and below[1].any()):
        return 0.0
    return float((_residuals(above) - _residuals(below)).std(ddof=1))


def _side(runs: Sequence[RunScore]) -> _Array | None:
    """The runs of one side ``[2, pairs]``: scores, and 1 for each run that reached the target.

    An unknown score is the mean of the known ones. None if no score is known or one is not above 0.
    """
    known = [run.score for run in runs if run.score is not None]
    if not known or min(known) <= 0:
        return None
    mean = math.fsum(known) / len(known)
    scores = [mean if run.score is None else run.score for run in runs]
    return np.array([scores, [run.reached for run in runs]], dtype=np.float64)


def _all_reached(scores: _Array) -> _Array:
    return np.stack([scores, np.ones_like(scores)])


def _residuals(side: _Array) -> _Array:
    """Part of each pair in the logarithm of a side's expected score, to first order ``[pairs]``."""
    scores, reached = side
    residuals: _Array = scores / scores.mean() - reached / reached.mean()
    return residuals


def _ratio(above: _Array, below: _Array) -> Ratio:
    """Ratio of the expected scores of two sides, each with a run that reached the target."""
    one, other = (side[0].mean() / side[1].mean() for side in (above, below))
    ratio, num_pairs = float(one / other), above.shape[1]
    if num_pairs < _FEWEST_RESAMPLED:
        return student_interval(ratio, math.log(ratio), _residuals(above) - _residuals(below))
    drawn = resampled(num_pairs)
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may be without a success
        one, other = (
            side[0, drawn].mean(axis=1) / side[1, drawn].mean(axis=1) for side in (above, below)
        )
        ratios = one / other
    return bootstrap_interval(ratio, ratios[~np.isnan(ratios)], num_pairs)


def student_interval(ratio: float, centre: float, residuals: _Array) -> Ratio:
    """A ratio with Student's interval around the logarithm ``centre``.

    Args:
        residuals: residuals of the pairs' logarithms ``[pairs]``.
    """
    num_pairs = len(residuals)
    if num_pairs == 1:
        return Ratio(ratio=ratio, low=0.0, high=math.inf, num_pairs=1)
    half_width = student(num_pairs) * float(residuals.std(ddof=1)) / math.sqrt(num_pairs)
    with np.errstate(over="ignore"):
        low, high = (float(np.exp(centre + sign * half_width)) for sign in (-1, 1))
    return Ratio(ratio=ratio, low=min(low, ratio), high=max(high, ratio), num_pairs=num_pairs)


def bootstrap_interval(ratio: float, drawn_ratios: _Array, num_pairs: int) -> Ratio:
    """A ratio with the interval of expanded percentiles."""
    tail = float(ndtr(-student(num_pairs) * math.sqrt(num_pairs / (num_pairs - 1))))
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
def resampled(num_pairs: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Indices of the pairs in each resample ``[resamples, pairs]``.

    They are the same on every call, so that equal data give equal intervals.
    """
    return np.random.default_rng(0).integers(num_pairs, size=(_NUM_RESAMPLES, num_pairs))


def student(num_pairs: int) -> float:
    """Half the width of a mean's 95% interval by Student's t, in standard errors."""
    return float(stdtrit(num_pairs - 1, (1 + _CONFIDENCE) / 2))
