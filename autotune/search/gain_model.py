"""What training a point or a waiting trial is expected to gain per second, by models of learning curves and of seconds per step."""

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np
from scipy.special import log_ndtr

from autotune.search.curve_model import CurveModel, Indices, RateModel, scaled_shortfalls
from autotune.search.encoding import Array
from autotune.search.known_trials import representative_indices
from autotune.search.trial_history import WIN, TrialHistory
from autotune.search.warm_start import WarmStart
from autotune.space import Suggestion

_MAX_ROWS = 300
"""Maximum number of evaluations that the model is conditioned on."""
_QUICK_SECONDS = 0.25
"""Mean training seconds of a trial below which a decision takes about as long as a trial, so that it uses fewer evaluations."""
_MAX_ROWS_IF_QUICK = 80
_MAX_ROWS_TO_LEARN = 160
"""Maximum number of evaluations that the model's hyperparameters are learnt from."""
_LEARN_ON = 1.06
"""Factor by which the number of trials grows before hyperparameters are learnt a little further."""
_NUM_TIMES = 6
"""Number of candidate times to target at which a trial's chance of winning is computed."""
_KNOWN_RATE = 0.02
"""Standard deviation of the logarithm of seconds per step, for a trial whose steps have been timed."""


class GainModel:
    """Predicts expected gains from the evaluations of a search and from earlier studies."""

    def __init__(self, history: TrialHistory, earlier: WarmStart) -> None:
        self._history, self._earlier = history, earlier
        self._curves = CurveModel(history.cube.num_features, has_lengths=history.has_lengths)
        self.rates = RateModel(history.cube.num_features)
        self.num_learnt_of = 0
        """Number of trials seen when the models' hyperparameters were last learnt."""

    @property
    def uses_prior_means(self) -> bool:
        """Whether what earlier studies expect of points has a part in the model of curves."""
        return self._curves.uses_prior_means

    def learn(self, rng: np.random.Generator) -> None:
        """Condition the models of curves and of seconds per step on the evaluations of trials seen so far."""
        seen = self._history.seen
        if self._curves.has_lengths != self._history.has_lengths:  # the training does not report its epochs
            self._curves = CurveModel(self._history.cube.num_features)
        rows = [(index, *trial.curve[place]) for index, trial in enumerate(seen) for place in representative_indices(trial)]
        trial_indices, steps, _, shortfalls = (np.array(column) for column in zip(*rows, strict=True))
        values = self.goodness(shortfalls, np.array([trial.curve[trial.best_index].shortfall for trial in seen]))
        most = _MAX_ROWS if fmean(trial.curve[-1].seconds for trial in seen) >= _QUICK_SECONDS else _MAX_ROWS_IF_QUICK
        kept = _best_and_random(values, most, rng)
        features = np.array([trial.features for trial in seen])
        numbers = np.array([number for number, trial in self._history.trials.items() if trial.curve], dtype=float)
        has_grown = len(seen) >= _LEARN_ON * self.num_learnt_of
        if has_grown:
            self.num_learnt_of = len(seen)
        prior_means = np.array([trial.prior_means for trial in seen])
        picked = trial_indices[kept].astype(int)
        self._curves.fit(
            features[picked],
            np.log(steps[kept]),
            numbers[picked],
            values[kept],
            prior_means=prior_means[picked],
            log_lengths=np.array([trial.log_length for trial in seen])[picked],
            learn=_sample(len(kept), _MAX_ROWS_TO_LEARN, rng) if has_grown else None,
        )
        rates = np.array([math.log(trial.curve[-1].seconds / trial.curve[-1].step) for trial in seen[-most:]])
        learn = _sample(len(rates), _MAX_ROWS_TO_LEARN, rng) if has_grown else None
        self.rates.fit(features[-most:], rates, learn=learn)

    def goodness(self, shortfalls: Array, least: Array) -> Array:
        """What the model of curves predicts in place of shortfalls: higher is better."""
        return scaled_shortfalls(shortfalls, least)

    def log_gains(self, drawn: Sequence[Suggestion], waiting: Sequence[int], running: int | None) -> tuple[Array, Array, Array]:
        """For each point and waiting trial: the logarithm of its expected gain per second, its chance to win soon, and to win ever.

        Args:
            drawn: new points.
            waiting: numbers of waiting trials, among them the running one.
            running: number of the running trial, which need not be resumed; None without one.
        """
        history = self._history
        smallest_step = min(trial.curve[0].step for trial in history.seen)
        trials = [history.trials[number] for number in waiting]
        points = history.cube.encode(drawn)
        features = np.concatenate([history.cube.features(points), *(trial.features[None] for trial in trials)])
        prior_means = np.concatenate([self._earlier.prior_means(points), *(trial.prior_means[None] for trial in trials)])
        log_lengths = np.array([history.log_length(point) for point in drawn] + [trial.log_length for trial in trials])
        log_rates, rate_deviations = self.rates.predict(features)
        spent, soonest, resume_seconds = np.zeros(len(features)), np.zeros(len(features)), np.zeros(len(features))
        for row, (number, trial) in enumerate(zip(waiting, trials, strict=True), start=len(drawn)):
            step, spent[row], _ = trial.curve[-1]
            soonest[row] = history.next_seconds(trial)
            resume_seconds[row] = 0.0 if number == running else trial.resume_seconds
            log_rates[row], rate_deviations[row] = math.log(spent[row] / step), _KNOWN_RATE
        has_best = math.isfinite(history.best)
        best = min(history.best, history.limit)
        last = best * WIN if has_best else best
        first = last * 0.1 if has_best else max(last * 0.01, min(last * 0.02, float(np.exp(log_rates.min()))))
        # No trial is trained past the end of its schedule, so the chance of winning is not counted at later times.
        times = np.minimum(np.geomspace(first, last, _NUM_TIMES)[:, None], np.exp(log_rates + log_lengths))  # [times, points]
        log_steps = np.log(times) - log_rates
        steps, numbers = np.maximum(log_steps, math.log(smallest_step)), np.array([-1.0] * len(drawn) + list(waiting))
        means, deviations = self._curves.predict(features, steps, numbers, prior_means=prior_means, log_lengths=log_lengths)
        log_reached = log_ndtr(means / deviations)
        log_evaluated = log_ndtr((log_steps - math.log(smallest_step) + 0.05) / (rate_deviations + 0.05))
        gains = history.expected.first_run_weight * np.log(best / times) + 0.05 if has_best else np.ones(times.shape)
        cost = np.maximum(times - spent, np.exp(log_rates) * smallest_step * 0.5) + resume_seconds
        log_gains = log_reached + log_evaluated + np.log(gains) - np.log(cost)
        is_possible = (times > spent * 1.001) & (times >= soonest * 0.999)
        chances = np.exp(log_reached + log_evaluated)
        soon = chances[is_possible.argmax(axis=0), np.arange(len(features))]
        ever = np.where(is_possible, chances, 0.0).max(axis=0)
        best_log_gains = np.where(is_possible, log_gains, -np.inf).max(axis=0)
        best_log_gains[: len(drawn)] += history.feasibility.log_chances(features[: len(drawn)])
        return best_log_gains, np.where(is_possible.any(axis=0), soon, 0.0), ever


def _best_and_random(values: Array, most: int, rng: np.random.Generator) -> Indices:
    """Indices of at most ``most`` rows: one half those with the highest values, the other half drawn at random from the rest."""
    if len(values) <= most:
        return np.arange(len(values))
    order = np.argsort(-values)
    best, rest = order[: most // 2], order[most // 2 :]
    return np.concatenate([best, rng.choice(rest, most - len(best), replace=False)])


def _sample(count: int, most: int, rng: np.random.Generator) -> Indices:
    return np.arange(count) if count <= most else rng.choice(count, most, replace=False)
