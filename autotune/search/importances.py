"""How much each parameter decides the time to target, split into steps to target and seconds a step, from all trials of a study.

A search stops most trials early; those that reached the target are few, and only good ones. A stopped trial says as much about seconds a
step as any other. The steps that it would have needed follow from how far it came: curves of a space look much alike but for a factor on
their steps, so what is left from a metric to the target is learnt from the trials that went that way.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from sklearn.isotonic import IsotonicRegression
from threadpoolctl import threadpool_limits

from autotune.effects import MIN_TRIALS, Effect, Effects, Interval
from autotune.measurement import Target
from autotune.recording import RecordedTrial, Recording
from autotune.search.encoding import Array, Indices, UnitCube, is_ranked
from autotune.search.randomness import RandomTrial, num_points, points
from autotune.space import Choice, Parameter, SearchSpace, Suggestion

_MAX_TRIALS = 250
"""Maximum number of trials that the models are conditioned on."""
_MAX_TRIALS_TO_LEARN = 125
"""Maximum number of trials that the models' hyperparameters are learnt from, which takes many times as long as conditioning them."""
_MAX_ITERATIONS = 30
"""Maximum number of optimizer iterations in which hyperparameters are learnt: as many as curves that are not mere noise take."""
_MIN_REACHED = 4
"""Minimum number of trials that reached the target; with fewer, the best metric that as many trials reached takes its place."""
_NUM_SWEEPS = 30
_SHRINKAGE = 0.3
"""Weight of the common curve in the estimate of a trial's own factor, as a number of evaluations."""
_NUM_POINTS, _NUM_PAIRS, _NUM_DRAWS = 1000, 96, 300
_NUM_COPIES = 4
"""Number of times that what an option opens is drawn anew for one pair of points."""
_NUM_VALUES = 7
"""Number of values at which the effect of a number is computed."""
_MAX_OPTIONS = 48
"""Maximum number of a choice's options whose effect is computed."""
_NUM_ROWS = 672
"""Number of points at which the effect of one parameter is computed, over all of its values."""


def time_effects(recording: Recording) -> list[Effects]:
    """Effects on the time to target, the steps to target and the seconds a step; empty if fewer than MIN_TRIALS trials were evaluated.

    If fewer than four trials reached the target, the best metric that four trials reached takes its place, and is named.

    Source: shares are Sobol's total indices by Jansen's estimator, in Saltelli et al., "Variance based sensitivity analysis of model
    output" (2010), of Gaussian processes: Oakley and O'Hagan, "Probabilistic sensitivity analysis of complex models" (2004).
    """
    trials = [trial for trial in recording.trials if trial.suggestion.values and _is_usable(trial)]
    trials = [trials[int(index)] for index in np.linspace(0, len(trials) - 1, min(len(trials), _MAX_TRIALS))]
    if len(trials) < MIN_TRIALS:
        return []
    target, rng, cube = _reachable(trials, recording.target), np.random.default_rng(0), UnitCube(recording.space)
    goal = "target" if target is recording.target else f"{target.metric} {target.value:.4g}"
    encoded = cube.encode([trial.suggestion for trial in trials])
    drawn = cube.encode([recording.space.suggest(RandomTrial(rng)) for _ in range(_NUM_POINTS)])
    parameters = _varied(recording.space, encoded)
    with threadpool_limits(1):
        steps = _fitted(cube.features(encoded), log_steps_to_target(trials, target))
        rate = _fitted(cube.features(encoded), np.array([math.log(_train_seconds(trial) / trial.steps[-1]) for trial in trials]))
        parts = {f"time to {goal}": [steps, rate], f"steps to {goal}": [steps], "seconds a step": [rate]}
        return [
            Effects(quantity=quantity, num_trials=len(trials), effects=_effects(models, parameters, cube, drawn))
            for quantity, models in parts.items()
        ]


def log_steps_to_target(trials: Sequence[RecordedTrial], target: Target) -> Array:
    """Logarithm of each trial's steps to the target ``[trials]``: measured if it reached the target, else estimated from its curve.

    The logarithm of the step at which a trial has come as far as a metric is a function of the metric, common to all trials, plus the
    trial's own offset. An estimate is never below the trial's last step.
    """
    shortfalls = [np.array([target.shortfall(metric) for metric in trial.metrics]) for trial in trials]
    ends = [trial.index_of_target(target) for trial in trials]
    rows = [(index, at) for index, curve in enumerate(shortfalls) for at in _records(curve, ends[index])]
    owners, log_steps = np.array([index for index, _ in rows]), np.log([trials[index].steps[at] for index, at in rows])
    goodness = np.minimum([-shortfalls[index][at] for index, at in rows], 0.0)
    counts, offsets, common = np.bincount(owners), np.zeros(len(trials)), IsotonicRegression(out_of_bounds="clip")
    for _ in range(_NUM_SWEEPS):
        residuals = log_steps - common.fit(goodness, log_steps - offsets[owners]).predict(goodness)
        offsets = np.bincount(owners, residuals) / (counts + _SHRINKAGE)
    farthest = np.full(len(trials), -np.inf)
    np.maximum.at(farthest, owners, goodness)
    left = common.predict([0.0])[0] - common.predict(farthest)
    last = np.log([trial.steps[-1 if end is None else end] for trial, end in zip(trials, ends, strict=True)])
    return np.where([end is None for end in ends], last + left, last)


def _records(shortfalls: Array, end: int | None) -> list[int]:
    """Indices of the evaluations that came closer to the target than all before, up to the one that reached it."""
    best, found = math.inf, []
    for index, shortfall in enumerate(shortfalls[: None if end is None else end + 1]):
        if shortfall < best:
            best = float(shortfall)
            found.append(index)
    return found


def _is_usable(trial: RecordedTrial) -> bool:
    """Whether a trial tells its seconds a step and how far it came: it took a step, and did not diverge."""
    return bool(trial.steps) and all(map(math.isfinite, trial.metrics)) and trial.steps[0] > 0 and _train_seconds(trial) > 0


def _train_seconds(trial: RecordedTrial) -> float:
    return trial.train_seconds[-1] - (trial.prepare_seconds[-1] if trial.prepare_seconds else 0.0)


def _reachable(trials: Sequence[RecordedTrial], target: Target) -> Target:
    """The target, or the nearest one that a few trials reached."""
    if sum(trial.index_of_target(target) is not None for trial in trials) >= _MIN_REACHED:
        return target
    best = sorted(min(target.shortfall(metric) for metric in trial.metrics) for trial in trials)
    shortfall = max(best[_MIN_REACHED - 1], 0.0)
    return replace(target, value=target.value - shortfall if target.mode == "max" else target.value + shortfall)


@dataclass(frozen=True)
class _Column:
    """A parameter of an encoded search space: its coordinate, and those of all that it opens, itself among them."""

    name: str
    parameter: Parameter
    index: int
    opened: Indices


def _varied(space: SearchSpace, encoded: Array) -> list[_Column]:
    """The parameters that have several values among encoded points."""
    items = list(space.items())
    return [
        _Column(
            name, parameter, index, np.array([i for i, (other, _, _) in enumerate(items) if i == index or other.startswith(f"{name}=")])
        )
        for index, (name, _, parameter) in enumerate(items)
        if len(set(encoded[~np.isnan(encoded[:, index]), index])) > 1
    ]


def _fitted(features: Array, values: Array) -> GaussianProcessRegressor:
    kernel = ConstantKernel(1.0, (0.01, 100)) * Matern(np.ones(features.shape[1]), (0.1, 100), nu=2.5) + WhiteKernel(0.1, (1e-4, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a parameter that does nothing has the longest length scale
        rows = np.linspace(0, len(values) - 1, min(len(values), _MAX_TRIALS_TO_LEARN)).astype(int)
        learnt = GaussianProcessRegressor(kernel, optimizer=_minimized, normalize_y=True).fit(features[rows], values[rows]).kernel_
    return GaussianProcessRegressor(learnt, optimizer=None, normalize_y=True).fit(features, values)


def _minimized(loss: Callable[[Array], tuple[float, Array]], theta: Array, bounds: Array) -> tuple[Array, float]:
    """The lowest loss that a few iterations find, as scikit-learn asks an optimizer for it: where it is, and what it is."""
    solution = minimize(loss, theta, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": _MAX_ITERATIONS})
    return solution.x, solution.fun


def _predicted(models: Sequence[GaussianProcessRegressor], features: Array) -> tuple[Array, Array]:
    """Mean and covariance of the sum of independent models, without the noise of single trials."""
    means, covariances = zip(*(model.predict(features, return_cov=True) for model in models), strict=True)
    noise = sum(model.kernel_.k2.noise_level * model._y_train_std**2 for model in models)  # noqa: SLF001  # scikit-learn hides the scale
    return sum(means), sum(covariances) - (noise - 1e-9) * np.eye(len(features))


def _effects(models: Sequence[GaussianProcessRegressor], columns: Sequence[_Column], cube: UnitCube, drawn: Array) -> list[Effect]:
    rng = np.random.default_rng(1)
    variances = [_variances(models, column, cube, drawn, rng) for column in columns]
    total = sum(float(np.median(draws)) for draws in variances) or 1.0
    effects = []
    for column, draws in zip(columns, variances, strict=True):
        quantiles = np.quantile(draws, (0.05, 0.5, 0.95))
        low, middle, high = quantiles / np.maximum(total - quantiles[1] + quantiles, 1e-300)  # beside the others' medians: at most 1
        values, factors = _factors(models, column, cube, drawn, rng)
        share = Interval(middle=float(middle), low=float(low), high=float(high))
        effects.append(Effect(name=column.name, share=share, values=values, factors=factors))
    return sorted(effects, key=lambda effect: -effect.share.middle)


def _variances(
    models: Sequence[GaussianProcessRegressor], column: _Column, cube: UnitCube, drawn: Array, rng: np.random.Generator
) -> Array:
    """Draws of the variance that goes with a parameter: half the mean square of what changes with its value alone, where it is open.

    What an option opens is drawn anew a few times on both sides of a pair. The product of two such changes holds the option's own effect.
    """
    is_open = ~np.isnan(drawn[:, column.index])
    base, others = drawn[rng.choice(np.flatnonzero(is_open), (2, _NUM_PAIRS))]
    num_copies = 1 if len(column.opened) == 1 else _NUM_COPIES
    rows = [
        _with_values(base, side[:, column.index], column, drawn, rng) for side in (others, base) for _ in range(num_copies)
    ]  # [sides x copies] of [pairs, coordinates]
    mean, covariance = _predicted(models, cube.features(np.concatenate(rows)))
    count = num_copies * _NUM_PAIRS
    contrast = np.hstack([np.eye(count), -np.eye(count)])
    covariance = contrast @ covariance @ contrast.T
    changes = rng.multivariate_normal(contrast @ mean, covariance, _NUM_DRAWS, check_valid="ignore", method="eigh")
    changes = changes.reshape(_NUM_DRAWS, num_copies, _NUM_PAIRS)
    squares = (changes**2).sum(axis=1)
    if num_copies > 1:
        squares = (changes.sum(axis=1) ** 2 - squares) / (num_copies - 1)
    return is_open.mean() * np.maximum((squares / num_copies).mean(axis=1), 0.0) / 2  # type: ignore[no-any-return]  # NumPy says Any


def _with_values(rows: Array, coordinates: Array, column: _Column, drawn: Array, rng: np.random.Generator) -> Array:
    """Copy of points with other values of a parameter, ``[rows]``; what an option opens is drawn at random."""
    changed = rows.copy()
    if isinstance(column.parameter, Choice):
        for option in np.unique(coordinates):
            has_option = np.flatnonzero(coordinates == option)
            drawn_with_it = np.flatnonzero(drawn[:, column.index] == option)
            if len(drawn_with_it):  # else it is one of so many that what it opens stays as it is
                sources = rng.choice(drawn_with_it, len(has_option))
                changed[np.ix_(has_option, column.opened)] = drawn[np.ix_(sources, column.opened)]
    changed[:, column.index] = coordinates
    return changed


def _factors(
    models: Sequence[GaussianProcessRegressor], column: _Column, cube: UnitCube, drawn: Array, rng: np.random.Generator
) -> tuple[list[Any], list[Interval]]:
    """Values of a parameter with what each multiplies the quantity by."""
    values = _values(column.parameter)
    coordinates = UnitCube(SearchSpace({"it": column.parameter})).encode([Suggestion({"it": value}) for value in values])[:, 0]
    count = max(4, _NUM_ROWS // len(values))
    base = drawn[rng.choice(np.flatnonzero(~np.isnan(drawn[:, column.index])), count)]
    rows = [_with_values(base, np.full(count, coordinate), column, drawn, rng) for coordinate in coordinates]
    mean, covariance = _predicted(models, cube.features(np.concatenate(rows)))
    averages = np.kron(np.eye(len(values)), np.full(count, 1 / count))
    contrast = averages - averages.mean(axis=0)
    logs, deviations = contrast @ mean, np.sqrt(np.maximum(np.diag(contrast @ covariance @ contrast.T), 0.0))
    factors = [
        Interval(middle=math.exp(log), low=math.exp(log - 1.645 * deviation), high=math.exp(log + 1.645 * deviation))
        for log, deviation in zip(logs, deviations, strict=True)
    ]
    return values, factors


def _values(parameter: Parameter) -> list[Any]:
    """All numbers of a short range, else a few from the lowest to the highest; all options of a choice, or some evenly among very many."""
    if isinstance(parameter, Choice):
        options = [value for value, _ in parameter.options]
        options = sorted(options) if is_ranked(parameter) else options
        return [options[int(index)] for index in np.linspace(0, len(options) - 1, min(len(options), _MAX_OPTIONS))]
    if num_points(SearchSpace({"it": parameter})) <= _NUM_VALUES:
        return [point.values["it"] for point in points(SearchSpace({"it": parameter}))]
    low, high = parameter.ends()
    spaced = np.geomspace if getattr(parameter, "log", True) else np.linspace
    numbers = spaced(low, high, _NUM_VALUES).tolist()
    return numbers if isinstance(low, float) else [round(number) for number in numbers]
