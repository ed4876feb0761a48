"""How much each parameter decides the time to target, split into steps to target and seconds a
step, from all trials of a study.

A search stops most trials early; those that reached the target are few, and only good ones. A
stopped trial says as much about seconds a step as any other. The steps that it would have needed
follow from how far it came: curves of a space look much alike but for a factor on their steps, so
what is left from a metric to the target is learnt from the trials that went that way.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.isotonic import IsotonicRegression
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import BayesianRidge
from threadpoolctl import threadpool_limits

from autotune.measurement import Target
from autotune.recording import RecordedTrial, Recording
from autotune.search.points import Array, RandomTrial, UnitCube, num_points, points
from autotune.space import Choice, Parameter, SearchSpace, Suggestion

MIN_TRIALS = 8
"""Minimum number of evaluated trials; with fewer, effects are noise."""
_MAX_TRIALS = 100
"""Maximum number of trials that the models are learnt from."""
_MIN_REACHED = 4
"""Minimum number of trials that reached the target; with fewer, the best metric that as many
trials reached takes its place."""
_NUM_DRAWS = 100
_MAX_OPTIONS, _MAX_VALUES = 48, 7
"""Maximum number of a choice's options, and of values of a number, whose effect is computed."""


@dataclass(frozen=True)
class Effects:
    """What parameters do to the time to target, to the steps to target and to the seconds a step.

    Estimates are columns ``low``, ``middle`` and ``high``: a 90% interval.

    Attributes:
        num_trials: number of trials that the estimates are made from, stopped ones among them.
        shares: part of the variance of ``quantity``, in logarithms and over the whole search space,
            that goes with ``parameter``, a qualified name such as ``optimizer=sgd/optimizer.lr``;
            the most important parameter of each quantity first. Shares sum to 1.
        factors: ``quantity`` at each ``value`` of ``parameter``, over its geometric mean over the
            values, averaged over all other parameters. Values are a choice's options, or a few
            numbers over the range.
    """

    num_trials: int
    shares: pd.DataFrame
    factors: pd.DataFrame


def time_effects(recording: Recording) -> Effects | None:
    """What each varied parameter does; None if fewer than MIN_TRIALS trials were evaluated, or
    if all were at one point.

    If fewer than four trials reached the target, the best metric that four trials reached takes its
    place, and is named.

    Source: shares are Sobol's total indices (Saltelli et al., "Variance based sensitivity analysis
    of model output", 2010) of functions drawn from Gaussian processes: Oakley and O'Hagan,
    "Probabilistic sensitivity analysis of complex models" (2004).
    """
    trials = [trial for trial in recording.trials if trial.suggestion.values and _is_usable(trial)]
    if len(trials) < MIN_TRIALS:
        return None
    chosen = np.linspace(0, len(trials) - 1, min(len(trials), _MAX_TRIALS)).astype(int)
    trials = [trials[index] for index in chosen]
    target, rng = _reachable(trials, recording.target), np.random.default_rng(0)
    goal = "target" if target is recording.target else f"{target.metric} {target.value:.4g}"
    cube = UnitCube(recording.space)
    encoded = cube.encode([trial.suggestion for trial in trials])
    log_rates = np.log([_train_seconds(trial) / trial.steps[-1] for trial in trials])
    quantities = [f"time to {goal}", f"steps to {goal}", "seconds a step"]
    names, variances, factors = [], [], []
    with threadpool_limits(1):
        models = [
            _drawn_functions(cube.features(encoded), logs, rng)
            for logs in (log_steps_to_target(trials, target), log_rates)
        ]
        for name, values, grid, open_fraction in _grids(recording.space, cube, encoded, rng):
            features = cube.features(grid.reshape(-1, grid.shape[-1]))
            steps, rate = (model(features).reshape(*grid.shape[:-1], -1) for model in models)
            logs = np.stack([steps + rate, steps, rate])
            # The product of two copies' changes holds nothing of what the parameter opens.
            changes = logs - logs.mean(axis=2, keepdims=True)
            variance = (changes[:, 0] * changes[:, -1]).mean(axis=(1, 2))
            variances.append(open_fraction * np.maximum(variance, 0.0)[:, np.newaxis])
            names.append(name)
            for quantity, means in zip(quantities, changes.mean(axis=(1, 3)), strict=True):
                for value, mean in zip(values, means, strict=True):
                    row = {"quantity": quantity, "parameter": name, "value": value}
                    factors.append(row | _estimates(np.exp(mean)))
    if not names:
        return None
    shares = []
    for quantity, of_names in zip(quantities, np.concatenate(variances, axis=1), strict=True):
        medians = np.median(of_names, axis=1, keepdims=True)
        totals = np.maximum(medians.sum() - medians + of_names, 1e-300)  # the others at medians
        rows = [
            {"quantity": quantity, "parameter": name} | _estimates(share)
            for name, share in zip(names, of_names / totals, strict=True)
        ]
        shares += sorted(rows, key=lambda row: -row["middle"])
    return Effects(len(trials), pd.DataFrame(shares), pd.DataFrame(factors))


def _estimates(draws: Array) -> dict[str, Any]:
    low, middle, high = np.quantile(draws, (0.05, 0.5, 0.95))
    return {"low": low, "middle": middle, "high": high}


def log_steps_to_target(trials: Sequence[RecordedTrial], target: Target) -> Array:
    """Logarithm of each trial's steps to the target ``[trials]``: measured if it reached the
    target, else estimated from its curve.

    The logarithm of the step at which a trial has come as far as a metric is a function of the
    metric, common to all trials, plus the trial's own offset. An estimate is never below the
    trial's last step.
    """
    ends = [trial.index_of_target(target) for trial in trials]
    lengths = [
        len(trial.steps) if end is None else end + 1
        for trial, end in zip(trials, ends, strict=True)
    ]
    rows = pd.DataFrame(
        [
            (index, math.log(step), min(-target.shortfall(metric), 0.0))
            for index, (trial, length) in enumerate(zip(trials, lengths, strict=True))
            for step, metric in zip(trial.steps[:length], trial.metrics, strict=False)
        ],
        columns=["trial", "log_step", "goodness"],
    )
    rows["goodness"] = rows.groupby("trial").goodness.cummax()
    rows = rows.drop_duplicates(["trial", "goodness"])
    counts, offsets = np.bincount(rows.trial), np.zeros(len(trials))
    common = IsotonicRegression(out_of_bounds="clip")
    for _ in range(30):
        common.fit(rows.goodness, rows.log_step - offsets[rows.trial])
        residuals = rows.log_step - common.predict(rows.goodness)
        # shrunk as if the common curve had a third of an evaluation
        offsets = np.bincount(rows.trial, residuals) / (counts + 0.3)
    left = common.predict([0.0]) - common.predict(rows.groupby("trial").goodness.max())
    last = [trial.steps[length - 1] for trial, length in zip(trials, lengths, strict=True)]
    is_estimated = [end is None for end in ends]
    return np.log(last) + np.where(is_estimated, left, 0.0)


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


def _drawn_functions(
    features: Array, values: Array, rng: np.random.Generator
) -> Callable[[Array], Array]:
    """Functions drawn from a Gaussian process of values: at features ``[rows, features]`` they are
    ``[rows, draws]``, without the noise of single trials.

    Source: Rahimi and Recht, "Random features for large-scale kernel machines" (2007): the process
    as a linear model of random cosines, whose weights are drawn once.
    """
    kernel = ConstantKernel(1.0, (0.01, 100)) * RBF(np.ones(features.shape[1]), (0.1, 100))
    process = GaussianProcessRegressor(kernel + WhiteKernel(0.1, (1e-4, 1)), normalize_y=True)
    with warnings.catch_warnings():  # a parameter that does nothing has the longest length scale
        warnings.simplefilter("ignore")
        scales = process.fit(features, values).kernel_.k1.k2.length_scale
    cosines = RBFSampler(gamma=0.5, n_components=400, random_state=0).fit(features)
    model = BayesianRidge().fit(cosines.transform(features / scales), values)
    weights = rng.multivariate_normal(model.coef_, model.sigma_, _NUM_DRAWS, method="cholesky").T
    return lambda rows: cosines.transform(rows / scales) @ weights


def _grids(
    space: SearchSpace, cube: UnitCube, encoded: Array, rng: np.random.Generator
) -> Iterator[tuple[str, list[Any], Array, float]]:
    """For each parameter that has several values among the encoded trials: its name, some values,
    encoded points ``[copies, values, points, coordinates]`` that are the same but for this
    parameter, and the fraction of the space that has it.

    What an option opens is drawn anew, in each of two copies.
    """
    random, names = RandomTrial(rng), [name for name, _, _ in space.items()]
    drawn = cube.encode([space.suggest(random) for _ in range(500)])
    for index, (name, _, parameter) in enumerate(space.items()):
        is_open = ~np.isnan(drawn[:, index])
        if len(set(encoded[~np.isnan(encoded[:, index]), index])) < 2 or not is_open.any():
            continue
        values, alone = _values(parameter), UnitCube(SearchSpace({"it": parameter}))
        coordinates = alone.encode([Suggestion({"it": value}) for value in values])[:, 0]
        opened = np.flatnonzero([other.startswith(f"{name}=") for other in names])
        points = drawn[rng.choice(np.flatnonzero(is_open), max(4, 448 // len(values)))]
        grid = np.tile(points, (2 if len(opened) else 1, len(values), 1, 1))
        grid[..., index] = coordinates[:, np.newaxis]
        for copy, (at, coordinate) in itertools.product(grid, enumerate(coordinates)):
            having = np.flatnonzero(drawn[:, index] == coordinate)
            if len(opened) and len(having):  # an option of very many may be in no point
                sources = rng.choice(having, len(points))
                copy[at][:, opened] = drawn[np.ix_(sources, opened)]
        yield name, values, grid, float(is_open.mean())


def _values(parameter: Parameter) -> list[Any]:
    """All options of a choice, some of very many, and all numbers of a short range, else the
    middles of equal parts of it.
    """
    if isinstance(parameter, Choice):
        return [value for value, _ in parameter.options][
            :: math.ceil(len(parameter.options) / _MAX_OPTIONS)
        ]
    alone = SearchSpace({"it": parameter})
    if num_points(alone) <= _MAX_VALUES:
        return [point.values["it"] for point in points(alone)]
    low, high = parameter.low, parameter.high
    spaced = np.geomspace if parameter.log else np.linspace
    numbers = spaced(low, high, 2 * _MAX_VALUES + 1)[1::2].tolist()
    return numbers if isinstance(low, float) else [round(number) for number in numbers]
