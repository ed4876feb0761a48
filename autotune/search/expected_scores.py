"""The score to expect of a configuration if it is trained again: a time to target is a random draw, not a fixed number.

``ExpectedScores`` is a model of expected scores for a sampler, ``running_times`` the plain mean for a search without a model. A score is
the objective of a run, such as seconds; a run that did not reach the target has spent the objective's lower bound at its last
evaluation.
"""

import math
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.special import gammaln, stdtr

from autotune.measurement import TrialResult
from autotune.objective import BoundedObjective, Objective
from autotune.outcome import Outcome
from autotune.search.curve_model import wait_for_scikit_learn
from autotune.search.encoding import Array, Indices
from autotune.space import Suggestion

FloatOrArray = TypeVar("FloatOrArray", float, Array)

Key = tuple[str, ...]
"""Identifies a configuration, the same for all of its trials: ``Suggestion.key``."""

_NOISE = 0.1
"""Prior standard deviation of the logarithm of a configuration's score from run to run, before any configuration is repeated."""
_NOISE_RUNS = 2.0
"""Weight of ``_NOISE`` in the estimate of the noise, as a number of repeats."""
_SPREAD = 0.5
"""Prior standard deviation of the logarithm of scores between configurations, before any run has ended."""
_SPREAD_CONFIGURATIONS = 4.0
_MIN_SPREAD = 0.1
_LENGTH_SCALE = 0.7
"""Distance in the unit cube at which one point says little about another, as in ``RateModel``."""
_CHANCE, _CHANCE_RUNS = 0.95, 2.0
"""Prior chance that a configuration which has reached the target does so again, and its weight as a number of repeats."""
_RUNS_TO_BELIEVE = 2
"""Runs that a configuration needs to be the incumbent: the best of many first runs is a lucky one."""
_MIN_WEIGHT = 0.2
"""Minimum weight of a new configuration's first run: without it, where repeats differ a lot, no first run could be good enough."""
_MAX_BELOW = 1.0
"""Upper limit on how much better than the incumbent a new configuration's first run must be, as the logarithm of a ratio."""
_MIX = 1.0
"""Weight of the chance over all configurations beside a configuration's own runs, as a number of runs."""

_MAX_CONFIGURATIONS = 300
"""Maximum number of configurations that estimate each other: the work grows with its cube. Others are estimated by their own runs alone."""

_FELL_SHORT = (Outcome.MISSED, Outcome.TIMED_OUT, Outcome.DIVERGED, Outcome.OUT_OF_MEMORY)
"""Outcomes short of the target that follow from the training itself and not from a decision of the search."""


def spent_by(result: TrialResult, objective: Objective) -> float:
    """The score that a run spent: its objective if it REACHED, else the lower bound at its last evaluation, 0 without one."""
    if result.outcome is Outcome.REACHED:
        return objective.score(result)
    if result.last is None or not isinstance(objective, BoundedObjective):
        return 0.0
    return objective.lower_bound(result.last)


class RunningTime:
    """A configuration's expected running time: the total score that its runs spent divided by the number that reached the target.

    A run that was capped counts as if it had reached the target at the cap: it needs at least as much. A run that was stopped, lost or
    ended by an error does not count.

    Source: expected running time (ERT), Hansen et al., "COCO: a platform for comparing continuous optimizers" (2021), section 5.
    """

    def __init__(self) -> None:
        self._spent, self._num_reached, self._num_capped = 0.0, 0, 0

    def add(self, outcome: Outcome, spent: float) -> None:
        """Add a run that ended with an outcome after it had spent a score."""
        if outcome in (Outcome.REACHED, Outcome.CAPPED, *_FELL_SHORT):
            self._spent += spent
        self._num_reached += outcome is Outcome.REACHED
        self._num_capped += outcome is Outcome.CAPPED

    @property
    def expected(self) -> float:
        """Expected running time, in the objective's unit; infinite if no run reached the target."""
        return self._spent / (self._num_reached + self._num_capped) if self._num_reached else math.inf


def running_times(results: Mapping[int, TrialResult], objective: Objective) -> dict[int, float]:
    """Expected running time of its configuration, for every trial that REACHED the target, by trial number."""
    times: dict[Key, RunningTime] = {}
    keys = {number: Suggestion(result.values).key for number, result in results.items()}
    for number, result in results.items():
        times.setdefault(keys[number], RunningTime()).add(result.outcome, spent_by(result, objective))
    return {number: times[keys[number]].expected for number, result in results.items() if result.outcome is Outcome.REACHED}


class _Column(IntEnum):
    """What is kept of each configuration's runs: columns of a table, so that no decision looks at every run again."""

    REACHED = 0
    """Number of runs that reached the target."""
    LOG_SCORE = 1
    """Mean of the logarithms of their scores."""
    SQUARES = 2
    """Sum of the squared distances of these logarithms from their mean."""
    FAILED = 3
    """Number of runs that fell short of the target."""
    SPENT = 4
    """Sum of the scores that those runs spent."""
    CAN_REPEAT = 5
    IS_INSIDE = 6
    """Whether the configuration lies in the search space."""


class _Known(NamedTuple):
    """The model's estimates for the configurations that have reached the target, as arrays ``[configurations]``."""

    keys: list[Key]
    is_inside: Array
    """Whether each configuration lies in the search space."""
    means: Array
    """Posterior means of the logarithm of the score."""
    variances: Array
    """Posterior variances of ``means``."""
    expected: Array
    """Expected scores, repeats that fall short of the target included."""
    believed: Array
    """Whether each configuration has enough runs to be the incumbent."""
    middle: float
    """Mean of the logarithm of the score over all configurations."""
    weight: float
    """Fraction by which a new configuration's first run moves its estimate from ``middle`` towards the run's own score."""


class ExpectedScores:
    """The expected score of each configuration that has reached the target, learnt from its runs and from its neighbours' runs.

    The logarithm of a run's score is a Gaussian process over the configuration's features, plus noise. The noise's variance is learnt from
    repeats, with a prior, so that the more repeats differ, the more a lucky run's estimate is pulled towards its neighbours' scores.
    The expected score includes the runs that fall short of the target until one reaches it; that chance is learnt from repeats, too.

    Source: the noise's conjugate prior, Gelman et al., "Bayesian data analysis" (2013), section 3.3.
    """

    def __init__(self) -> None:
        self._rows: dict[Key, int] = {}
        """Row of each configuration in the table, in the order of their first runs."""
        self._features: list[Array | None] = []
        self._table = np.zeros((64, len(_Column)))
        """``[rows, columns]``, of which the first ``len(_rows)`` rows are used."""
        self._cached: _Known | None = None
        self._cached_noise: tuple[float, float] | None = None
        self._cached_to_win: float | None = None

    def add(self, key: Key, features: Array | None, outcome: Outcome, spent: float, *, can_repeat: bool = True) -> None:
        """Add a run that ended with an outcome after it had spent a score.

        Args:
            features: features of the configuration's point ``[features]``; None if it lies outside the search space and is never repeated.
            can_repeat: whether the configuration can be run again; if not, its only run is enough to make it the incumbent.
        """
        is_told = outcome is Outcome.REACHED or outcome in _FELL_SHORT
        if not is_told and key not in self._rows:
            return
        row = self._row(key, features)
        row[_Column.CAN_REPEAT] = can_repeat and features is not None
        if outcome is Outcome.REACHED:
            distance = math.log(max(spent, 1e-12)) - row[_Column.LOG_SCORE]
            row[_Column.REACHED] += 1
            row[_Column.LOG_SCORE] += distance / row[_Column.REACHED]
            row[_Column.SQUARES] += distance**2 * (1 - 1 / row[_Column.REACHED])
        elif outcome in _FELL_SHORT or (outcome is Outcome.CAPPED and row[_Column.REACHED]):
            row[_Column.FAILED] += 1
            row[_Column.SPENT] += spent
        else:
            return
        self._cached = self._cached_noise = self._cached_to_win = None

    def _row(self, key: Key, features: Array | None) -> Array:
        """The table's row of a configuration, which is new if the configuration is."""
        if key not in self._rows:
            self._rows[key] = len(self._rows)
            self._features.append(features)
            if len(self._rows) > len(self._table):
                self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._table[self._rows[key], _Column.IS_INSIDE] = features is not None
        row: Array = self._table[self._rows[key]]
        return row

    def has_reached(self, key: Key) -> bool:
        """Whether a run of the configuration has reached the target."""
        return key in self._rows and bool(self._table[self._rows[key], _Column.REACHED])

    def by_key(self) -> dict[Key, float]:
        """The expected score of every configuration that has reached the target."""
        known = self._known
        return dict(zip(known.keys, known.expected.tolist(), strict=True))

    @property
    def incumbent(self) -> float:
        """The incumbent's expected score, on the scale of a run that reaches the target; infinite without an incumbent.

        The incumbent has the best expected score among the configurations with several runs, or among all if there are none: the best
        of many first runs is a lucky one. Its chance of reaching the target counts only by how it differs from that of a configuration
        with one run, which did.

        Source: the idea of intensification in SMAC (Hutter, Hoos and Leyton-Brown, 2011): a would-be incumbent is run again first.
        """
        known = self._known
        if not known.keys:
            return math.inf
        best = known.expected[known.believed].min() if known.believed.any() else known.expected.min()
        return float(best) * _chance(1, 1, self._chance_of_all())

    @property
    def best(self) -> Key | None:
        """The configuration that is expected to be the best; None before any has reached the target."""
        known = self._known
        return known.keys[int(known.expected.argmin())] if known.keys else None

    @property
    def challenger(self) -> Key | None:
        """``best`` if its first run alone says so and it needs another one, else None."""
        known, best = self._known, self.best
        return None if best is None or known.believed[known.keys.index(best)] else best

    @property
    def first_run_to_win(self) -> float:
        """Score that a new configuration's first run must beat to make it the incumbent; infinite without an incumbent.

        The score is below the incumbent's, since the estimate after a good first run is pulled towards the mean of all configurations.
        """
        if self._cached_to_win is None:
            self._cached_to_win = self._find_first_run_to_win()
        return self._cached_to_win

    def _find_first_run_to_win(self) -> float:
        known = self._known
        if not known.keys:
            return math.inf
        noise, _ = self._noise_variance()
        log_incumbent = math.log(self.incumbent)
        better = (log_incumbent - (1 + known.weight) * noise / 2 - known.middle) / known.weight
        return math.exp(min(log_incumbent, max(known.middle + better, log_incumbent - _MAX_BELOW)))

    @property
    def first_run_weight(self) -> float:
        """Fraction of the logarithm of a first run's improvement that a new configuration is expected to keep."""
        return self._known.weight

    @property
    def noise(self) -> float:
        """Standard deviation of the logarithm of a configuration's score from run to run."""
        return math.sqrt(self._noise_variance()[0])

    def log_gains_of_repeats(self, least: float = 0.0) -> Iterator[tuple[Key, float]]:
        """Logarithm of the expected gain, per unit of score spent, of running each configuration once more, the highest first.

        Configurations with a gain below ``least`` are left out. The gain is the logarithm of the ratio by which the configuration picked
        after the run is better than the one picked now: the knowledge gradient, with the noise's variance unknown. Empty with fewer than
        two configurations, which leave nothing to pick from.

        Source: Frazier, Powell and Dayanik, "The knowledge-gradient policy for correlated normal beliefs" (2009), for independent beliefs;
        Chick, Branke and Schmidt, "Sequential sampling to myopically maximize the expected value of information" (2010), section 3, for
        Student's t in place of the normal.
        """
        known = self._known
        if len(known.keys) < 2:
            return
        noise, num_runs = self._noise_variance()
        values = np.log(known.expected)
        best, second = np.sort(values)[:2]
        gaps = np.where(values == best, second - best, values - best)
        change = known.variances / np.sqrt(known.variances + noise)
        gains = change * _expected_excess(gaps / change, num_runs)
        logs = np.log(np.maximum(gains, 1e-300)) - values
        candidates = np.flatnonzero(np.logical_and(known.is_inside, gains >= least))
        for index in candidates[np.argsort(-logs[candidates], kind="stable")]:
            yield known.keys[index], float(logs[index])

    def _noise_variance(self) -> tuple[float, float]:
        """Variance of the logarithm of a configuration's score from run to run, and the estimate's degrees of freedom."""
        if self._cached_noise is None:
            self._cached_noise = self._learn_noise_variance()
        return self._cached_noise

    def _learn_noise_variance(self) -> tuple[float, float]:
        table = self._table[: len(self._rows)]
        squares, repeats = float(table[:, _Column.SQUARES].sum()), float(np.maximum(table[:, _Column.REACHED] - 1, 0).sum())
        return (_NOISE_RUNS * _NOISE**2 + squares) / (_NOISE_RUNS + repeats), _NOISE_RUNS + repeats

    def _chance_of_all(self) -> float:
        """Chance that a configuration which has reached the target does so again, over all configurations."""
        reached = self._table[self._table[:, _Column.REACHED] > 0]
        num_reached_again = float(reached[:, _Column.REACHED].sum()) - len(reached)
        num_repeats = num_reached_again + float(reached[:, _Column.FAILED].sum())
        return (_CHANCE * _CHANCE_RUNS + num_reached_again) / (_CHANCE_RUNS + num_repeats)

    @property
    def _known(self) -> _Known:
        if self._cached is None:
            self._cached = self._condition()
        return self._cached

    def _condition(self) -> _Known:
        """Condition the process on all runs that reached the target."""
        rows = np.flatnonzero(self._table[:, _Column.REACHED])
        num_reached, observed, _, num_failed, spent, can_repeat, is_inside = self._table[rows].T
        if not len(rows):
            return _Known([], is_inside > 0, np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, dtype=bool), 0.0, 1.0)
        noise, _ = self._noise_variance()
        noises = noise / num_reached
        mean = float(observed.mean())
        squares = _SPREAD_CONFIGURATIONS * _SPREAD**2 + float(((observed - mean) ** 2).sum()) - float(noises.sum())
        spread = max(squares / (_SPREAD_CONFIGURATIONS + len(observed) - 1), _MIN_SPREAD**2)
        alone = spread / (spread + noises)
        means, variances = mean + alone * (observed - mean), np.maximum(spread * (1 - alone), 1e-12)
        kept = _best_and_last(observed)
        prior = spread * _correlation([self._features[row] for row in rows[kept]])
        gain = np.linalg.solve(prior + np.diag(noises[kept]), prior).T
        means[kept] = mean + gain @ (observed[kept] - mean)
        variances[kept] = np.maximum(np.diag(prior - gain @ prior), 1e-12)
        chances = _chance(num_reached, num_reached + num_failed, self._chance_of_all())
        to_target = np.exp(means + (variances + noise) / 2)
        failing = np.where(num_failed > 0, spent / np.maximum(num_failed, 1), to_target)
        weight = max(spread / (spread + noise), _MIN_WEIGHT)
        believed = (can_repeat == 0) | (num_reached + num_failed >= _RUNS_TO_BELIEVE)
        keys = list(self._rows)
        return _Known(
            [keys[row] for row in rows], is_inside > 0, means, variances, to_target + (1 / chances - 1) * failing, believed, mean, weight
        )


def _best_and_last(observed: Array) -> Indices:
    """Indices, in order, of the configurations that estimate each other: half of them the best, the others the last ones."""
    if len(observed) <= _MAX_CONFIGURATIONS:
        return np.arange(len(observed))
    best = np.argsort(observed)[: _MAX_CONFIGURATIONS // 2]
    rest = np.setdiff1d(np.arange(len(observed)), best)
    return np.sort(np.concatenate([best, rest[-(_MAX_CONFIGURATIONS // 2) :]]))


def _chance(reached: FloatOrArray, runs: FloatOrArray, of_all: float) -> FloatOrArray:
    """Chance that a configuration reaches the target, given how many of its runs did and the chance over all configurations."""
    return (reached + _MIX * of_all) / (runs + _MIX)


def _correlation(features: list[Array | None]) -> Array:
    """Prior correlation ``[configurations, configurations]``, zero for a configuration outside the search space."""
    wait_for_scikit_learn()
    from sklearn.gaussian_process.kernels import Matern  # noqa: PLC0415  # takes seconds

    correlation = np.eye(len(features))
    inside = [index for index, row in enumerate(features) if row is not None]
    if inside:
        rows = np.array([features[index] for index in inside])
        correlation[np.ix_(inside, inside)] = Matern(_LENGTH_SCALE, nu=2.5)(rows) if rows.shape[1] else 1.0
    return correlation


def _expected_excess(least: Array, freedom: float) -> Array:
    """Mean of max(0, t - ``least``) for t drawn from Student's distribution with ``freedom`` degrees of freedom."""
    log_scale = gammaln((freedom + 1) / 2) - gammaln(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(least**2 / freedom))
    excess: Array = (freedom + least**2) / (freedom - 1) * density - least * stdtr(freedom, -least)
    return np.maximum(excess, 0.0)
