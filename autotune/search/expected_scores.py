"""What a configuration needs to reach the target if it is trained again: a time to target is a draw, not a number.

``ExpectedScores`` is a model of it for a sampler, ``running_times`` the plain account for a search that has no model. Scores are what
the objective says of a trial, such as seconds; a run that did not reach the target has spent what the objective says of its last
evaluation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln, stdtr
from sklearn.gaussian_process.kernels import Matern

from autotune.measurement import TrialResult
from autotune.objective import BoundedObjective, Objective
from autotune.outcome import Outcome
from autotune.search.encoding import Array
from autotune.space import Suggestion

Key = tuple[str, ...]
"""What is the same for trials of one configuration: ``Suggestion.key``."""

_NOISE = 0.1
"""Standard deviation of the logarithm of a configuration's score from run to run, before any was repeated."""
_NOISE_RUNS = 2.0
"""How many repeats that counts as."""
_SPREAD = 0.5
"""Standard deviation of the logarithm of scores between configurations, before there are some."""
_SPREAD_CONFIGURATIONS = 4.0
_LEAST_SPREAD = 0.1
_LENGTH_SCALE = 0.7
"""Distance of two points in the unit cube at which they say little of each other, as in ``RateModel``."""
_CHANCE, _CHANCE_RUNS = 0.95, 2.0
"""Chance that a configuration which has reached the target does so again, before any was repeated; how many repeats that counts as."""
_RUNS_TO_BELIEVE = 2
"""Runs of a configuration that make it the incumbent: the best of many first draws is a lucky one."""
_LEAST_WEIGHT = 0.2
"""Of one run of a new configuration: where repeats differ as much as configurations do, a draw would have to be without measure."""
_MOST_BELOW = 1.0
"""Logarithm of the ratio by which a new configuration's draw must be better at most."""
_MIX = 1.0
"""Runs that what is known of all configurations counts as, beside a configuration's own."""

_IS_RUN_OUT = (Outcome.MISSED, Outcome.TIMED_OUT, Outcome.DIVERGED, Outcome.OUT_OF_MEMORY)
"""Ends short of the target that a search did not choose."""


def spent_by(result: TrialResult, objective: Objective) -> float:
    """The score of a result that REACHED, else the objective's bound at its last evaluation; 0 before the first one."""
    if result.outcome is Outcome.REACHED:
        return objective.score(result)
    if result.last is None or not isinstance(objective, BoundedObjective):
        return 0.0
    return objective.lower_bound(result.last)


class RunningTime:
    """A configuration's own expected running time: the score that all its runs spent over the number that reached the target.

    A run that was capped counts as one that reached it there and then: that is the least it can have needed. A run that was stopped,
    lost or at fault says nothing.

    Source: expected running time (ERT), Hansen et al., "COCO: a platform for comparing continuous optimizers" (2021), section 5.
    """

    def __init__(self) -> None:
        self._spent, self._num_reached, self._num_capped = 0.0, 0, 0

    def add(self, outcome: Outcome, spent: float) -> None:
        """A run ended, after spending a score."""
        if outcome in (Outcome.REACHED, Outcome.CAPPED, *_IS_RUN_OUT):
            self._spent += spent
        self._num_reached += outcome is Outcome.REACHED
        self._num_capped += outcome is Outcome.CAPPED

    @property
    def expected(self) -> float:
        """Expected running time; infinite where no run reached the target."""
        return self._spent / (self._num_reached + self._num_capped) if self._num_reached else math.inf


def running_times(results: Mapping[int, TrialResult], objective: Objective) -> dict[int, float]:
    """The expected running time of the configuration of every trial that REACHED the target, by trial number."""
    times: dict[Key, RunningTime] = {}
    keys = {number: Suggestion(result.values).key for number, result in results.items()}
    for number, result in results.items():
        times.setdefault(keys[number], RunningTime()).add(result.outcome, spent_by(result, objective))
    return {number: times[keys[number]].expected for number, result in results.items() if result.outcome is Outcome.REACHED}


@dataclass
class _Configuration:
    features: Array | None
    log_scores: list[float] = field(default_factory=list)
    """Of the runs that reached the target."""
    failed: list[float] = field(default_factory=list)
    """What each run that did not reach it has spent."""
    can_repeat: bool = True

    @property
    def is_believed(self) -> bool:
        return not self.can_repeat or len(self.log_scores) + len(self.failed) >= _RUNS_TO_BELIEVE


class _Known(NamedTuple):
    """What is known of the configurations that have reached the target, as arrays ``[configurations]``."""

    keys: list[Key]
    means: Array
    """Of the logarithm of the score."""
    variances: Array
    """Of those means."""
    expected: Array
    """Expected scores."""
    believed: Array
    """Whether a configuration can be the incumbent."""
    middle: float
    """The mean of all."""
    weight: float
    """How much of its distance from the middle one run of a new configuration is believed."""


class ExpectedScores:
    """The score to expect of each configuration that has reached the target, learnt from its runs and from its neighbours'.

    The logarithm of a run's score is a Gaussian process over the configuration's features, plus noise. The noise's variance is learnt from
    repeats, about a prior, so that a lucky draw is drawn back to what its neighbours needed by as much as repeats have been seen to differ.
    The expected score is what a run spends on the mean over the chance that it reaches the target, which is learnt from repeats too.

    Source: the noise's conjugate prior, Gelman et al., "Bayesian data analysis" (2013), section 3.3.
    """

    def __init__(self) -> None:
        self._configurations: dict[Key, _Configuration] = {}
        self._cached: _Known | None = None

    def add(self, key: Key, features: Array | None, outcome: Outcome, spent: float, *, can_repeat: bool = True) -> None:
        """A run ended after it had spent a score.

        Args:
            features: of its point ``[features]``; None where it lies outside the search space, and is never run again.
            can_repeat: whether it can be run again; where not, its one run is believed.
        """
        configuration = self._configurations.setdefault(key, _Configuration(features))
        configuration.can_repeat = can_repeat and features is not None
        if outcome is Outcome.REACHED:
            configuration.log_scores.append(math.log(max(spent, 1e-12)))
        elif outcome in _IS_RUN_OUT or (outcome is Outcome.CAPPED and configuration.log_scores):
            configuration.failed.append(spent)
        else:
            return
        self._cached = None

    def has_reached(self, key: Key) -> bool:
        """Whether a run of the configuration has reached the target."""
        return key in self._configurations and bool(self._configurations[key].log_scores)

    def by_key(self) -> dict[Key, float]:
        """The expected score of every configuration that has reached the target."""
        known = self._known
        return dict(zip(known.keys, known.expected.tolist(), strict=True))

    @property
    def incumbent(self) -> float:
        """What the configuration with the best expected score spends on a run that reaches the target; infinite without one.

        It is one of those that were run more than once, where there are some: the best of many first draws is a lucky one. Its chance of
        reaching the target counts as far as it is another than that of a configuration with one run, which did.

        Source: the idea of intensification in SMAC (Hutter, Hoos and Leyton-Brown, 2011): what would be the incumbent is run again first.
        """
        known = self._known
        if not known.keys:
            return math.inf
        best = known.expected[known.believed].min() if known.believed.any() else known.expected.min()
        return float(best) * _chance(1, 1, self._chance_of_all())

    @property
    def challenger(self) -> Key | None:
        """The configuration that is expected to be the best by its first run alone, and waits for another; None without one."""
        known = self._known
        best = int(known.expected.argmin()) if known.keys else None
        return None if best is None or known.believed[best] else known.keys[best]

    @property
    def winning_draw(self) -> float:
        """The score by which the one run of a new configuration makes it the incumbent; infinite without one.

        It lies below what the incumbent is expected to need, since a good draw is drawn back to the mean of all.
        """
        known = self._known
        if not known.keys:
            return math.inf
        noise, _ = self._noise_variance()
        log_incumbent = math.log(self.incumbent)
        better = (log_incumbent - (1 + known.weight) * noise / 2 - known.middle) / known.weight
        return math.exp(min(log_incumbent, max(known.middle + better, log_incumbent - _MOST_BELOW)))

    @property
    def weight_of_run(self) -> float:
        """How much of the logarithm by which its one run is better a new configuration is expected to be better."""
        return self._known.weight

    @property
    def noise(self) -> float:
        """Standard deviation of the logarithm of a configuration's score from run to run."""
        return math.sqrt(self._noise_variance()[0])

    def log_gains_of_repeats(self, least: float = 0.0) -> dict[Key, float]:
        """Of running each configuration once more: the logarithm of what is expected to be won for each unit of score that it takes.

        Those that win less than ``least`` in all are left out. What is won is the logarithm of the ratio by which the configuration then
        picked is better than the one that would be picked now: the knowledge gradient, with the noise's variance unknown. Fewer than two
        configurations leave nothing to pick from.

        Source: Frazier, Powell and Dayanik, "The knowledge-gradient policy for correlated normal beliefs" (2009), for independent beliefs;
        Chick, Branke and Schmidt, "Sequential sampling to myopically maximize the expected value of information" (2010), section 3, for
        Student's t in place of the normal.
        """
        known = self._known
        if len(known.keys) < 2:
            return {}
        noise, num_runs = self._noise_variance()
        values = np.log(known.expected)
        best, second = np.sort(values)[:2]
        gaps = np.where(values == best, second - best, values - best)
        change = known.variances / np.sqrt(known.variances + noise)
        gains = change * _expected_excess(gaps / change, num_runs)
        logs = np.log(np.maximum(gains, 1e-300)) - values
        can = [self._configurations[key].features is not None and gain >= least for key, gain in zip(known.keys, gains, strict=True)]
        return {key: float(log) for key, log, is_candidate in zip(known.keys, logs, can, strict=True) if is_candidate}

    def _noise_variance(self) -> tuple[float, float]:
        """Variance of the logarithm of a configuration's score from run to run, and the degrees of freedom it is known by."""
        runs = [each.log_scores for each in self._configurations.values() if len(each.log_scores) > 1]
        squares = sum(float(np.var(each)) * len(each) for each in runs)
        repeats = sum(len(each) - 1 for each in runs)
        return (_NOISE_RUNS * _NOISE**2 + squares) / (_NOISE_RUNS + repeats), _NOISE_RUNS + repeats

    def _chance_of_all(self) -> float:
        """Chance that a configuration which has reached the target does so again."""
        own = [each for each in self._configurations.values() if each.log_scores]
        again = sum(len(each.log_scores) - 1 for each in own)
        others = again + sum(len(each.failed) for each in own)
        return (_CHANCE * _CHANCE_RUNS + again) / (_CHANCE_RUNS + others)

    @property
    def _known(self) -> _Known:
        if self._cached is None:
            self._cached = self._condition()
        return self._cached

    def _condition(self) -> _Known:
        """Condition the process on all runs that reached the target."""
        reached = {key: each for key, each in self._configurations.items() if each.log_scores}
        if not reached:
            return _Known([], np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, dtype=bool), 0.0, 1.0)
        own = np.array([np.mean(each.log_scores) for each in reached.values()])
        noise, _ = self._noise_variance()
        noises = np.array([noise / len(each.log_scores) for each in reached.values()])
        mean = float(own.mean())
        squares = _SPREAD_CONFIGURATIONS * _SPREAD**2 + float(((own - mean) ** 2).sum()) - float(noises.sum())
        spread = max(squares / (_SPREAD_CONFIGURATIONS + len(own) - 1), _LEAST_SPREAD**2)
        prior = spread * _alike([each.features for each in reached.values()])
        gain = np.linalg.solve(prior + np.diag(noises), prior).T
        means = mean + gain @ (own - mean)
        variances = np.maximum(np.diag(prior - gain @ prior), 1e-12)
        of_all = self._chance_of_all()
        chances = np.array([_chance(len(each.log_scores), len(each.log_scores) + len(each.failed), of_all) for each in reached.values()])
        to_target = np.exp(means + (variances + noise) / 2)
        failing = np.array(
            [np.mean(each.failed) if each.failed else seconds for each, seconds in zip(reached.values(), to_target, strict=True)]
        )
        weight = max(spread / (spread + noise), _LEAST_WEIGHT)
        believed = np.array([each.is_believed for each in reached.values()])
        return _Known(list(reached), means, variances, to_target + (1 / chances - 1) * failing, believed, mean, weight)


def _chance(reached: int, runs: int, of_all: float) -> float:
    """Chance that a configuration reaches the target, of which so many runs did."""
    return (reached + _MIX * of_all) / (runs + _MIX)


def _alike(features: list[Array | None]) -> Array:
    """Correlation of configurations ``[configurations, configurations]``; one outside the space is like no other."""
    alike = np.eye(len(features))
    inside = [index for index, each in enumerate(features) if each is not None]
    if inside:
        rows = np.array([features[index] for index in inside])
        alike[np.ix_(inside, inside)] = Matern(_LENGTH_SCALE, nu=2.5)(rows) if rows.shape[1] else 1.0
    return alike


def _expected_excess(least: Array, freedom: float) -> Array:
    """Mean of what a draw of Student's t exceeds ``least`` by, and zero where it does not."""
    log_scale = gammaln((freedom + 1) / 2) - gammaln(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(least**2 / freedom))
    excess: Array = (freedom + least**2) / (freedom - 1) * density - least * stdtr(freedom, -least)
    return np.maximum(excess, 0.0)
