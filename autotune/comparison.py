"""Comparing two configurations by repeated runs: the ratio of their mean times, with an interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times faster one configuration is than another, with a 95% confidence interval."""

    ratio: float
    low: float
    high: float


def ratio_of_means(slower: Sequence[float], faster: Sequence[float]) -> Ratio:
    """Ratio of two mean times, ``slower`` over ``faster``.

    The interval is Welch's on the logarithm of the ratio (delta method). With one run on a side there is no deviation to go
    by, and the interval is from 0 to infinity.

    Args:
        slower: seconds of each run, above 0.
        faster: seconds of each run, above 0.

    Raises:
        ValueError: a side has no run.
    """
    if not slower or not faster:
        raise ValueError(f"{len(slower)} and {len(faster)} runs; a ratio needs at least one on each side")
    ratio = fmean(slower) / fmean(faster)
    if len(slower) == 1 or len(faster) == 1:
        return Ratio(ratio=ratio, low=0.0, high=math.inf)
    errors = [variance(side) / len(side) / fmean(side) ** 2 for side in (slower, faster)]
    error = sum(errors)
    if error == 0:
        return Ratio(ratio=ratio, low=ratio, high=ratio)
    from scipy.stats import t  # noqa: PLC0415  # half a second to import, wanted once a study

    freedom = error**2 / sum(each**2 / (len(side) - 1) for each, side in zip(errors, (slower, faster), strict=True))
    reach = float(t.ppf(0.975, freedom)) * math.sqrt(error)
    return Ratio(ratio=ratio, low=ratio * math.exp(-reach), high=ratio * math.exp(reach))
