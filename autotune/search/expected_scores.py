"""The score to expect of a configuration if it is trained again: a time to target is a random draw,
not a fixed number.

``ExpectedScores`` is a model of expected scores for a sampler, ``running_times`` the plain mean for
a search without a model. A score is the objective of a run, such as seconds; a run that did not
reach the target has spent the objective's lower bound at its last evaluation.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, stdtr
from sklearn.gaussian_process.kernels import Matern

from autotune.measurement import TrialResult
from autotune.objective import BoundedObjective, Objective
from autotune.outcome import Outcome
from autotune.search.points import Array
from autotune.space import Suggestion

Key = tuple[str, ...]
"""Identifies a configuration, the same for all of its trials: ``Suggestion.key``."""

_SURELY_AHEAD = 0.975
"""Chance of being better than the incumbent with which a configuration replaces it after one run:
of Student's t, so the lead has to be large while few repeats have told the noise."""


def spent_by(result: TrialResult, objective: Objective) -> float:
    """The score that a run spent: its objective if it REACHED, else the lower bound at its last
    evaluation, 0 without one.
    """
    if result.outcome is Outcome.REACHED:
        return objective.score(result)
    if result.last is None or not isinstance(objective, BoundedObjective):
        return 0.0
    return objective.lower_bound(result.last)


def running_times(results: Mapping[int, TrialResult], objective: Objective) -> dict[int, float]:
    """Expected running time of its configuration, for every trial that REACHED the target, by
    trial number: the total score that the configuration's runs spent divided by the number that
    reached the target.

    A run that was capped counts as if it had reached the target at the cap: it needs at least as
    much. A run that was stopped, lost or ended by an error does not count.

    Source: expected running time (ERT), Hansen et al., "COCO: a platform for comparing continuous
    optimizers" (2021), section 5.
    """
    keys = {number: Suggestion(result.values).key for number, result in results.items()}
    spent, num_needed = dict.fromkeys(keys.values(), 0.0), Counter[Key]()
    for number, result in results.items():
        is_enough = result.outcome in (Outcome.REACHED, Outcome.CAPPED)
        num_needed[keys[number]] += is_enough
        if is_enough or result.outcome.falls_short:
            spent[keys[number]] += spent_by(result, objective)
    return {
        number: spent[keys[number]] / num_needed[keys[number]]
        for number, result in results.items()
        if result.outcome is Outcome.REACHED
    }


@dataclass
class _Runs:
    """The runs of one configuration."""

    features: Array | None
    can_repeat: bool = False
    num_reached: int = 0
    log_score: float = 0.0
    """Mean of the logarithms of the scores of the runs that reached the target."""
    squares: float = 0.0
    """Sum of the squared distances of these logarithms from their mean."""
    num_failed: int = 0
    """Number of runs that fell short of the target."""
    spent: float = 0.0
    """Sum of the scores that those runs spent."""

    def add_reached(self, spent: float) -> None:
        distance = math.log(max(spent, 1e-12)) - self.log_score
        self.num_reached += 1
        self.log_score += distance / self.num_reached
        self.squares += distance**2 * (1 - 1 / self.num_reached)


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The model's estimates for the configurations that have reached the target, as arrays
    ``[configurations]``.
    """

    keys: list[Key]
    is_inside: Array
    """Whether each configuration lies in the search space."""
    variances: Array
    """Posterior variances of the logarithm of the score."""
    expected: Array
    """Expected scores, repeats that fall short of the target included."""
    believed: Array
    """Whether each configuration has enough runs to be the incumbent, or leads by so much that one
    is enough."""
    noise_variance: float = math.nan
    """Variance of the logarithm of a configuration's score from run to run."""
    num_repeats: float = 0.0
    """Degrees of freedom of the noise's estimate."""
    first_run_weight: float = 1.0
    """Fraction by which a new configuration's first run moves its estimate from the mean of all
    towards the run's own score."""
    incumbent: float = math.inf
    """The incumbent's expected score, on the scale of a run that reaches the target.

    The incumbent has the best expected score among the configurations with several runs, or
    among all if there are none: the best of many first runs is a lucky one. One run is enough for
    a configuration that is surely ahead of them. The incumbent's chance of reaching the target
    counts only by how it differs from that of a configuration with one run, which did.

    Source: the idea of intensification in SMAC (Hutter, Hoos and Leyton-Brown, 2011): a
    would-be incumbent is run again first."""
    first_run_to_win: float = math.inf
    """Score that a new configuration's first run must beat to make it the incumbent. It is below
    the incumbent's, since the estimate after a good first run is pulled towards the mean of all
    configurations."""

    @property
    def best(self) -> Key | None:
        """The configuration that is expected to be the best; None if there is none."""
        return self.keys[int(self.expected.argmin())] if self.keys else None

    @property
    def challenger(self) -> Key | None:
        """``best`` if its first run alone says so and it needs another one, else None."""
        return None if not self.keys or self.believed[self.expected.argmin()] else self.best

    def by_key(self) -> dict[Key, float]:
        """The expected score of every configuration that has reached the target."""
        return dict(zip(self.keys, self.expected.tolist(), strict=True))

    def log_gains_of_repeats(self, least: float = 0.0) -> Iterator[tuple[Key, float]]:
        """Logarithm of the expected gain, per unit of score spent, of running each configuration
        once more, the highest first.

        Configurations with a gain below ``least`` are left out. The gain is the logarithm of the
        ratio by which the configuration picked after the run is better than the one picked now: the
        knowledge gradient, with the noise's variance unknown. Empty with fewer than two
        configurations, which leave nothing to pick from.

        Source: Frazier, Powell and Dayanik, "The knowledge-gradient policy for correlated normal
        beliefs" (2009), for independent beliefs; Chick, Branke and Schmidt, "Sequential sampling to
        myopically maximize the expected value of information" (2010), section 3, for Student's t in
        place of the normal.
        """
        if len(self.keys) < 2:
            return
        values = np.log(self.expected)
        best, second = np.sort(values)[:2]
        gaps = np.where(values == best, second - best, values - best)
        change = self.variances / np.sqrt(self.variances + self.noise_variance)
        gains = change * _expected_excess(gaps / change, self.num_repeats)
        logs = np.log(np.maximum(gains, 1e-300)) - values
        candidates = np.flatnonzero(np.logical_and(self.is_inside, gains >= least))
        for index in candidates[np.argsort(-logs[candidates], kind="stable")]:
            yield self.keys[index], float(logs[index])


_NO_VALUES = np.zeros(0)
_NOTHING_KNOWN = Estimates(
    keys=[],
    is_inside=_NO_VALUES,
    variances=_NO_VALUES,
    expected=_NO_VALUES,
    believed=_NO_VALUES,
)


class ExpectedScores:
    """The expected score of each configuration that has reached the target, learnt from its runs
    and from its neighbours' runs.

    The logarithm of a run's score is a Gaussian process over the configuration's features, plus
    noise. The noise's variance is learnt from repeats, with a prior, so that the more repeats
    differ, the more a lucky run's estimate is pulled towards its neighbours' scores. The expected
    score includes the runs that fall short of the target until one reaches it; that chance is
    learnt from repeats, too.

    Source: the noise's conjugate prior, Gelman et al., "Bayesian data analysis" (2013), section
    3.3.
    """

    def __init__(self) -> None:
        self._runs: dict[Key, _Runs] = {}
        self._cached: Estimates | None = None

    def add(
        self,
        key: Key,
        features: Array | None,
        outcome: Outcome,
        spent: float,
        *,
        can_repeat: bool = True,
    ) -> None:
        """Add a run that ended with an outcome after it had spent a score.

        Args:
            features: features of the configuration's point ``[features]``; None if it lies outside
                the search space and is never repeated.
            can_repeat: whether the configuration can be run again; if not, its only run is enough
                to make it the incumbent.
        """
        if outcome is not Outcome.REACHED and not outcome.falls_short and key not in self._runs:
            return
        runs = self._runs.setdefault(key, _Runs(features))
        runs.can_repeat = can_repeat and features is not None
        if outcome is Outcome.REACHED:
            runs.add_reached(spent)
        elif outcome.falls_short or (outcome is Outcome.CAPPED and runs.num_reached):
            runs.num_failed += 1
            runs.spent += spent
        self._cached = None

    @property
    def estimates(self) -> Estimates:
        """Estimates from all runs so far."""
        if self._cached is None:
            is_known = any(runs.num_reached for runs in self._runs.values())
            self._cached = self._condition() if is_known else _NOTHING_KNOWN
        return self._cached

    def _condition(self) -> Estimates:
        """Condition the process on all runs that reached the target."""
        known = {key: runs for key, runs in self._runs.items() if runs.num_reached}
        table = [
            (runs.num_reached, runs.log_score, runs.num_failed, runs.spent, runs.can_repeat)
            for runs in known.values()
        ]
        num_reached, observed, num_failed, spent, can_repeat = np.array(table, dtype=float).T
        # The noise has a prior standard deviation of 0.1, which counts as two repeats.
        num_repeats = 2.0 + float((num_reached - 1).sum())
        noise = (
            2.0 * 0.1**2 + float(np.array([runs.squares for runs in self._runs.values()]).sum())
        ) / num_repeats
        noises = noise / num_reached
        mean = float(observed.mean())
        # Scores differ between configurations with a prior standard deviation of 0.5, which counts
        # as four of them, and of 0.1 at least.
        squares = 4.0 * 0.5**2 + float(((observed - mean) ** 2).sum()) - float(noises.sum())
        spread = max(squares / (4.0 + len(observed) - 1), 0.1**2)
        alone = spread / (spread + noises)
        means, variances = mean + alone * (observed - mean), np.maximum(spread * (1 - alone), 1e-12)
        # Only the best configurations estimate each other: the work grows with their cube.
        kept = np.sort(np.argsort(observed)[:300])
        all_features = [runs.features for runs in known.values()]
        prior = spread * _correlation([all_features[index] for index in kept])
        gain = np.linalg.solve(prior + np.diag(noises[kept]), prior).T
        means[kept] = mean + gain @ (observed[kept] - mean)
        variances[kept] = np.maximum(np.diag(prior - gain @ prior), 1e-12)
        # A configuration that has reached the target does so again with a prior chance of 0.95,
        # which counts as two repeats.
        chance_of_all = (0.95 * 2.0 + float((num_reached - 1).sum())) / (
            num_repeats + float(num_failed.sum())
        )
        # The chance over all counts as one run of each configuration.
        chances = (num_reached + chance_of_all) / (num_reached + num_failed + 1.0)
        to_target = np.exp(means + (variances + noise) / 2)
        failing = np.where(num_failed > 0, spent / np.maximum(num_failed, 1), to_target)
        expected = to_target + (1 / chances - 1) * failing
        believed = (can_repeat == 0) | (num_reached + num_failed >= 2)
        if believed.any():
            leader = int(np.where(believed, expected, math.inf).argmin())
            leads = math.log(expected[leader]) - np.log(expected)
            ahead = stdtr(num_repeats, leads / np.sqrt(variances + variances[leader]))
            believed |= ahead > _SURELY_AHEAD
        best = float(expected[believed].min() if believed.any() else expected.min())
        incumbent = best * ((1.0 + chance_of_all) / 2.0)
        # Where repeats differ a lot, no first run could be good enough without a least weight, and
        # the lead that it needs is limited.
        weight, log_incumbent = max(spread / (spread + noise), 0.2), math.log(incumbent)
        to_win = mean + (log_incumbent - (1 + weight) * noise / 2 - mean) / weight
        return Estimates(
            keys=list(known),
            is_inside=np.array([features is not None for features in all_features]),
            variances=variances,
            expected=expected,
            believed=believed,
            noise_variance=noise,
            num_repeats=num_repeats,
            first_run_weight=weight,
            incumbent=incumbent,
            first_run_to_win=math.exp(min(log_incumbent, max(to_win, log_incumbent - 1.0))),
        )


def _correlation(features: list[Array | None]) -> Array:
    """Prior correlation ``[configurations, configurations]``: Matern's with a scale of 0.7.

    Zero for a configuration outside the space.
    """
    correlation = np.eye(len(features))
    inside = [index for index, row in enumerate(features) if row is not None]
    if inside:
        of_inside = np.array([features[index] for index in inside])
        correlation[np.ix_(inside, inside)] = Matern(0.7, nu=2.5)(of_inside)
    return correlation


def _expected_excess(least: Array, freedom: float) -> Array:
    """Mean of max(0, t - ``least``) for t drawn from Student's distribution with ``freedom``
    degrees of freedom.
    """
    log_scale = gammaln((freedom + 1) / 2) - gammaln(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(least**2 / freedom))
    excess: Array = (freedom + least**2) / (freedom - 1) * density - least * stdtr(freedom, -least)
    return np.maximum(excess, 0.0)
