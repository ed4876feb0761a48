"""How much each parameter decides the time to target, split into steps to target and seconds a
step, from all trials of a study.

A search stops most trials early; those that reached the target are few, and only good ones. A
stopped trial says as much about seconds a step as any other. The steps that it would have needed
follow from how far it came: curves of a space look much alike but for a factor on their steps, so
what is left from a metric to the target is learnt from the trials that went that way.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import minimize
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

_MAX_TRIALS = 150
"""Maximum number of trials that the models are learnt from."""
_MIN_REACHED = 4
"""Minimum number of trials that reached the target; with fewer, the best metric that as many
trials reached takes its place."""
_NUM_POINTS, _NUM_PAIRS, _NUM_DRAWS = 1000, 128, 200
_MAX_OPTIONS, _NUM_VALUES = 48, 7
"""Maximum number of a choice's options, and number of values of a number, whose effect is
computed."""
_NUM_ROWS = 448
"""Number of points at which the effect of one parameter is computed, over all of its values."""


def time_effects(recording: Recording) -> list[Effects]:
    """Effects on the time to target, the steps to target and the seconds a step.

    Empty if fewer than MIN_TRIALS trials were evaluated.

    If fewer than four trials reached the target, the best metric that four trials reached takes its
    place, and is named.

    Source: shares are Sobol's total indices by Jansen's estimator, in Saltelli et al., "Variance
    based sensitivity analysis of model output" (2010), of functions drawn from Gaussian processes:
    Oakley and O'Hagan, "Probabilistic sensitivity analysis of complex models" (2004).
    """
    trials = [trial for trial in recording.trials if trial.suggestion.values and _is_usable(trial)]
    trials = [
        trials[int(index)]
        for index in np.linspace(0, len(trials) - 1, min(len(trials), _MAX_TRIALS))
    ]
    if len(trials) < MIN_TRIALS:
        return []
    target, rng, cube = (
        _reachable(trials, recording.target),
        np.random.default_rng(0),
        UnitCube(recording.space),
    )
    goal = "target" if target is recording.target else f"{target.metric} {target.value:.4g}"
    encoded = cube.encode([trial.suggestion for trial in trials])
    drawn = cube.encode([recording.space.suggest(RandomTrial(rng)) for _ in range(_NUM_POINTS)])
    log_rates = np.array([math.log(_train_seconds(trial) / trial.steps[-1]) for trial in trials])
    with threadpool_limits(1), warnings.catch_warnings():
        # A parameter that does nothing has the longest length scale; functions are drawn at points
        # that are all but the same.
        warnings.simplefilter("ignore")
        models = [
            _fitted(cube.features(encoded), values)
            for values in (log_steps_to_target(trials, target), log_rates)
        ]
        estimates = [
            _Estimates(models, column, cube, drawn, rng)
            for column in _varied(recording.space, encoded)
        ]
    quantities = {f"time to {goal}": [0, 1], f"steps to {goal}": [0], "seconds a step": [1]}
    return [
        Effects(quantity=quantity, num_trials=len(trials), effects=_effects(estimates, parts))
        for quantity, parts in quantities.items()
    ]


def log_steps_to_target(trials: Sequence[RecordedTrial], target: Target) -> Array:
    """Logarithm of each trial's steps to the target ``[trials]``: measured if it reached the
    target, else estimated from its curve.

    The logarithm of the step at which a trial has come as far as a metric is a function of the
    metric, common to all trials, plus the trial's own offset. An estimate is never below the
    trial's last step.
    """
    shortfalls = [
        np.array([target.shortfall(metric) for metric in trial.metrics]) for trial in trials
    ]
    ends = [trial.index_of_target(target) for trial in trials]
    rows = [
        (index, at) for index, curve in enumerate(shortfalls) for at in _records(curve, ends[index])
    ]
    owners, log_steps = (
        np.array([index for index, _ in rows]),
        np.log([trials[index].steps[at] for index, at in rows]),
    )
    goodness = np.minimum([-shortfalls[index][at] for index, at in rows], 0.0)
    counts, offsets, common = (
        np.bincount(owners),
        np.zeros(len(trials)),
        IsotonicRegression(out_of_bounds="clip"),
    )
    for _ in range(30):
        residuals = log_steps - common.fit(goodness, log_steps - offsets[owners]).predict(goodness)
        # shrunk as if the common curve had a third of an evaluation
        offsets = np.bincount(owners, residuals) / (counts + 0.3)
    farthest = np.full(len(trials), -np.inf)
    np.maximum.at(farthest, owners, goodness)
    left = common.predict([0.0])[0] - common.predict(farthest)
    last = np.log(
        [trial.steps[-1 if end is None else end] for trial, end in zip(trials, ends, strict=True)]
    )
    return np.where([end is None for end in ends], last + left, last)


def _records(shortfalls: Array, end: int | None) -> list[int]:
    """Indices of the evaluations that came closer to the target than all before, up to the one
    that reached it.
    """
    best, found = math.inf, []
    for index, shortfall in enumerate(shortfalls[: None if end is None else end + 1]):
        if shortfall < best:
            best = float(shortfall)
            found.append(index)
    return found


def _is_usable(trial: RecordedTrial) -> bool:
    """Whether a trial tells its seconds a step and how far it came: it took a step, and did not
    diverge.
    """
    return (
        bool(trial.steps)
        and all(map(math.isfinite, trial.metrics))
        and trial.steps[0] > 0
        and _train_seconds(trial) > 0
    )


def _train_seconds(trial: RecordedTrial) -> float:
    return trial.train_seconds[-1] - (trial.prepare_seconds[-1] if trial.prepare_seconds else 0.0)


def _reachable(trials: Sequence[RecordedTrial], target: Target) -> Target:
    """The target, or the nearest one that a few trials reached."""
    if sum(trial.index_of_target(target) is not None for trial in trials) >= _MIN_REACHED:
        return target
    best = sorted(min(target.shortfall(metric) for metric in trial.metrics) for trial in trials)
    shortfall = max(best[_MIN_REACHED - 1], 0.0)
    return replace(
        target, value=target.value - shortfall if target.mode == "max" else target.value + shortfall
    )


@dataclass(frozen=True)
class _Column:
    """A parameter of an encoded search space: its coordinate, and those of all that it opens,
    itself among them.
    """

    name: str
    parameter: Parameter
    index: int
    opened: Indices


def _varied(space: SearchSpace, encoded: Array) -> list[_Column]:
    """The parameters that have several values among encoded points."""
    items = list(space.items())
    return [
        _Column(
            name,
            parameter,
            index,
            np.array(
                [
                    i
                    for i, (other, _, _) in enumerate(items)
                    if i == index or other.startswith(f"{name}=")
                ]
            ),
        )
        for index, (name, _, parameter) in enumerate(items)
        if len(set(encoded[~np.isnan(encoded[:, index]), index])) > 1
    ]


def _fitted(features: Array, values: Array) -> GaussianProcessRegressor:
    """A Gaussian process of the values without the noise of single trials."""
    kernel = ConstantKernel(1.0, (0.01, 100)) * Matern(
        np.ones(features.shape[1]), (0.1, 100), nu=2.5
    ) + WhiteKernel(0.1, (1e-4, 1))
    learnt = (
        GaussianProcessRegressor(kernel, optimizer=_minimized, normalize_y=True)
        .fit(features, values)
        .kernel_
    )
    return GaussianProcessRegressor(
        learnt.k1, alpha=learnt.k2.noise_level, optimizer=None, normalize_y=True
    ).fit(features, values)


def _minimized(
    loss: Callable[[Array], tuple[float, Array]], theta: Array, bounds: Array
) -> tuple[Array, float]:
    """Where the lowest loss is that a few iterations find, and what it is: as many as curves
    that are not mere noise take.
    """
    solution = minimize(
        loss, theta, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 30}
    )
    return solution.x, solution.fun


class _Estimates:
    """What one parameter does, by functions drawn from each of several models.

    Attributes:
        changes: change of the function with the parameter's value alone ``[models, copies, pairs,
            draws]``. What an option opens is drawn anew in each of two copies of a pair, so that
            the product of both changes holds the option's own effect.
        open_fraction: fraction of the search space that has the parameter.
        logs: mean of the function at each value, less the mean over values ``[models, values,
            draws]``.
    """

    def __init__(
        self,
        models: Sequence[GaussianProcessRegressor],
        column: _Column,
        cube: UnitCube,
        drawn: Array,
        rng: np.random.Generator,
    ) -> None:
        def draws(rows: Sequence[Array]) -> Array:
            features = cube.features(np.concatenate(rows))
            return np.array(
                [model.sample_y(features, _NUM_DRAWS, random_state=0) for model in models]
            )

        is_open = ~np.isnan(drawn[:, column.index])
        self.name, self.open_fraction, self.values = (
            column.name,
            is_open.mean(),
            _values(column.parameter),
        )
        base, others = drawn[rng.choice(np.flatnonzero(is_open), (2, _NUM_PAIRS))]
        rows = [
            _with_values(base, side[:, column.index], column, drawn, rng)
            for side in (base, others)
            for _ in range(2)
        ]
        before, after = np.moveaxis(
            draws(rows).reshape(len(models), 2, 2, _NUM_PAIRS, _NUM_DRAWS), 1, 0
        )
        self.changes = after - before
        coordinates = UnitCube(SearchSpace({"it": column.parameter})).encode(
            [Suggestion({"it": value}) for value in self.values]
        )[:, 0]
        base = drawn[rng.choice(np.flatnonzero(is_open), max(4, _NUM_ROWS // len(self.values)))]
        rows = [
            _with_values(base, np.full(len(base), coordinate), column, drawn, rng)
            for coordinate in coordinates
        ]
        means = (
            draws(rows).reshape(len(models), len(self.values), len(base), _NUM_DRAWS).mean(axis=2)
        )
        self.logs = means - means.mean(axis=1, keepdims=True)


def _effects(estimates: Sequence[_Estimates], parts: Sequence[int]) -> list[Effect]:
    """Effects on the sum of some models, the most important parameter first."""
    changes = [estimate.changes[parts].sum(axis=0) for estimate in estimates]
    variances = [
        estimate.open_fraction * np.maximum((first * second).mean(axis=0), 0.0)
        for estimate, (first, second) in zip(estimates, changes, strict=True)
    ]
    total = sum(float(np.median(variance)) for variance in variances)
    effects = []
    for estimate, variance in zip(estimates, variances, strict=True):
        quantiles = np.quantile(variance, (0.05, 0.5, 0.95))
        # beside the others' medians: at most 1
        low, middle, high = quantiles / np.maximum(total - quantiles[1] + quantiles, 1e-300)
        factors = np.exp(np.quantile(estimate.logs[parts].sum(axis=0), (0.05, 0.5, 0.95), axis=1)).T
        effects.append(
            Effect(
                name=estimate.name,
                share=Interval(low=float(low), middle=float(middle), high=float(high)),
                values=estimate.values,
                factors=[
                    Interval(low=float(low), middle=float(middle), high=float(high))
                    for low, middle, high in factors
                ],
            )
        )
    return sorted(effects, key=lambda effect: -effect.share.middle)


def _with_values(
    rows: Array, coordinates: Array, column: _Column, drawn: Array, rng: np.random.Generator
) -> Array:
    """Copy of points with other values of a parameter, ``[rows]``.

    What an option opens is drawn at random.
    """
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


def _values(parameter: Parameter) -> list[Any]:
    """All numbers of a short range, else a few from the lowest to the highest.

    All options of a choice, or some evenly among very many.
    """
    if isinstance(parameter, Choice):
        options = [value for value, _ in parameter.options]
        options = sorted(options) if is_ranked(parameter) else options
        return [
            options[int(index)]
            for index in np.linspace(0, len(options) - 1, min(len(options), _MAX_OPTIONS))
        ]
    if num_points(SearchSpace({"it": parameter})) <= _NUM_VALUES:
        return [point.values["it"] for point in points(SearchSpace({"it": parameter}))]
    low, high = parameter.ends()
    spaced = np.geomspace if getattr(parameter, "log", True) else np.linspace
    numbers = spaced(low, high, _NUM_VALUES).tolist()
    return numbers if isinstance(low, float) else [round(number) for number in numbers]
