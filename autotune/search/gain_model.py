"""What training a point or a waiting trial is expected to gain per second, by models of learning
curves and of seconds per step.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import log_ndtr

from autotune.search.curve_model import GaussianProcess, scaled_shortfalls
from autotune.search.points import Array, Indices
from autotune.search.trial_history import WIN, TrialHistory
from autotune.search.warm_start import WarmStart
from autotune.space import Suggestion

_PENDING_QUANTILE = 0.25
"""Quantile of the values seen that a running trial is taken to have before its first one."""


class GainModel:
    """Predicts expected gains from the evaluations of a search and from earlier studies."""

    def __init__(self, history: TrialHistory, earlier: WarmStart) -> None:
        self._history, self._earlier = history, earlier
        self._has_lengths = history.has_lengths
        self._curves = GaussianProcess(history.cube.num_features, of_curves=True)
        self._rates = GaussianProcess(history.cube.num_features)
        self._num_learnt_of = 0
        """Number of trials seen when the models' hyperparameters were last learnt."""

    @property
    def uses_prior_means(self) -> bool:
        """Whether what earlier studies expect of points has a part in the model of curves."""
        return self._curves.uses_prior_means

    def learn(self, rng: np.random.Generator) -> None:
        """Condition the models of curves and of seconds per step on the evaluations of trials
        seen so far.

        A running trial without an evaluation counts as one that did badly, so that several workers
        do not all try the same region at once.

        Source: the constant liar (Ginsbourger, Le Riche and Carraro, "Kriging is well-suited to
        parallelize optimization", 2010).
        """
        seen = self._history.seen
        if self._has_lengths != self._history.has_lengths:
            self._has_lengths, self._curves = (
                False,
                GaussianProcess(self._history.cube.num_features, of_curves=True),
            )
        rows = [
            (index, *trial.curve[place][:3])
            for index, trial in enumerate(seen)
            for place in trial.representative_indices
        ]
        indices, steps, _, shortfalls = (np.array(column) for column in zip(*rows, strict=True))
        values = scaled_shortfalls(shortfalls, np.array([trial.least_shortfall for trial in seen]))
        most = 300  # more takes a decision too long
        kept = _best_and_random(values, most, rng)
        has_grown = len(seen) >= 1.06 * self._num_learnt_of
        if has_grown:
            self._num_learnt_of = len(seen)
        features = np.array([trial.features for trial in seen])
        numbers = np.array(
            [number for number, trial in self._history.trials.items() if trial.curve], dtype=float
        )
        of_rows = indices[kept].astype(int)
        positions = self._positions(
            np.log(steps[kept]), np.array([trial.log_length for trial in seen])[of_rows]
        )
        curve_rows = np.column_stack([features[of_rows], positions, numbers[of_rows]])
        curve_values = values[kept]
        prior_means = np.array([trial.prior_means for trial in seen])[of_rows]
        if pending := self._history.pending:
            position, value = np.median(positions), np.quantile(curve_values, _PENDING_QUANTILE)
            pending_rows = [
                [*trial.features, position, number] for number, trial in pending.items()
            ]
            curve_rows = np.vstack([curve_rows, pending_rows])
            curve_values = np.append(curve_values, np.full(len(pending), value))
            prior_means = np.vstack(
                [prior_means, *(trial.prior_means for trial in pending.values())]
            )
        self._curves.fit(
            curve_rows,
            curve_values,
            _sample_to_learn(len(kept), rng) if has_grown else None,
            prior_means,
        )
        rates = np.array(
            [math.log(trial.curve[-1].seconds / trial.curve[-1].step) for trial in seen[-most:]]
        )
        self._rates.fit(
            features[-most:], rates, _sample_to_learn(len(rates), rng) if has_grown else None
        )

    def _positions(self, log_steps: Array, log_lengths: Array) -> Array:
        """Log steps or, where schedules differ in length, logs of the fraction of the schedule:
        metrics improve as the schedule ends.
        """
        return log_steps - log_lengths if self._has_lengths else log_steps

    def log_gains(
        self,
        drawn: Sequence[Suggestion],
        waiting: Sequence[int],
        running: int | None,
        left: float = math.inf,
    ) -> tuple[Array, Array, Array]:
        """For each point and waiting trial: the logarithm of its expected gain per second, its
        chance to win soon, and to win ever.

        Args:
            drawn: new points.
            waiting: numbers of waiting trials, among them the running one.
            running: number of the running trial, which need not be resumed; None without one.
            left: score, in the history's unit, that a trial may still spend. What takes more gains
                nothing, unless everything does.
        """
        history = self._history
        log_smallest = math.log(smallest_step := min(trial.curve[0].step for trial in history.seen))
        trials = [history.trials[number] for number in waiting]
        of_drawn = history.cube.features(drawn)
        features = np.vstack([of_drawn, *(trial.features for trial in trials)])
        prior_means = np.vstack(
            [self._earlier.prior_means(of_drawn), *(trial.prior_means for trial in trials)]
        )
        log_lengths = np.array(
            [history.log_length(point) for point in drawn] + [trial.log_length for trial in trials]
        )
        log_rates, rate_deviations = self._rates.predict(features)
        spent, soonest, resume_seconds = np.zeros((3, len(features)))
        for row, (number, trial) in enumerate(zip(waiting, trials, strict=True), start=len(drawn)):
            step, spent[row] = trial.curve[-1][:2]
            soonest[row] = history.next_seconds(trial)
            resume_seconds[row] = 0.0 if number == running else trial.resume_seconds
            log_rates[row], rate_deviations[row] = math.log(spent[row] / step), 0.02
        has_best = math.isfinite(history.best)
        best = min(history.best, history.limit)
        last = best * WIN if has_best else best
        first = (
            last * 0.1
            if has_best
            else max(last * 0.01, min(last * 0.02, float(np.exp(log_rates.min()))))
        )
        # The highest of many chances is most often one that is too high, which favours short
        # schedules and new trials.
        weight, num_times = (2, 6) if history.may_all_miss else (1, 12)
        # Chances of winning are computed for some times to target, none past the end of a trial's
        # schedule. [times, points]
        times = np.minimum(
            np.geomspace(first, last, num_times)[:, None], np.exp(log_rates + log_lengths)
        )
        log_steps = np.log(times) - log_rates
        positions = self._positions(np.maximum(log_steps, log_smallest), log_lengths)
        numbers = np.array([-1.0] * len(drawn) + list(waiting))
        rows = [np.column_stack([features, position, numbers]) for position in positions]
        predicted = self._curves.predict(
            np.concatenate(rows), np.tile(prior_means, (len(times), 1))
        )
        means, deviations = (values.reshape(times.shape) for values in predicted)
        log_reached = log_ndtr(means / deviations)
        log_evaluated = log_ndtr((log_steps - log_smallest + 0.05) / (rate_deviations + 0.05))
        gains = (
            history.estimates.first_run_weight * np.log(best / times) + 0.05
            if has_best
            else np.ones(times.shape)
        )
        cost = np.maximum(times - spent, np.exp(log_rates) * smallest_step * 0.5) + resume_seconds
        log_chances = log_reached + log_evaluated
        log_gains = weight * log_chances + np.log(gains) - np.log(cost)
        is_possible = (times > spent * 1.001) & (times >= soonest * 0.999)
        if (is_in_time := is_possible & (times - spent + resume_seconds <= left)).any():
            is_possible = is_in_time
        chances = np.exp(log_chances)
        soon = chances[is_possible.argmax(axis=0), np.arange(len(features))]
        ever = np.where(is_possible, chances, 0.0).max(axis=0)
        best_log_gains = np.where(is_possible, log_gains, -np.inf).max(axis=0)
        best_log_gains[: len(drawn)] += history.feasibility.log_chances(features[: len(drawn)])
        return best_log_gains, np.where(is_possible.any(axis=0), soon, 0.0), ever


def _best_and_random(values: Array, most: int, rng: np.random.Generator) -> Indices:
    """Indices of at most ``most`` rows: one half those with the highest values, the other half
    drawn at random from the rest.
    """
    if len(values) <= most:
        return np.arange(len(values))
    order = np.argsort(-values)
    best, rest = order[: most // 2], order[most // 2 :]
    return np.concatenate([best, rng.choice(rest, most - len(best), replace=False)])


def _sample_to_learn(count: int, rng: np.random.Generator) -> Indices:
    """Indices of the rows, at most 160, that hyperparameters are learnt from."""
    return np.arange(count) if count <= 160 else rng.choice(count, 160, replace=False)
