"""How much each parameter decides the time to target, split into steps to target and seconds a
step, by Optuna's fANOVA over all trials of a study.

A search stops most trials early; those that reached the target are few, and only good ones. A
stopped trial says as much about seconds a step as any other. The steps that it would have needed
follow from how far it came: curves of a space look much alike but for a factor on their steps, so
what is left from a metric to the target is learnt from the trials that went that way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optuna
import pandas as pd
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.trial import create_trial
from sklearn.isotonic import IsotonicRegression

from autotune.measurement import Target
from autotune.recording import RecordedTrial, Recording
from autotune.search.points import Array, UnitCube
from autotune.search.samplers import quiet_optuna
from autotune.space import SearchSpace

MIN_TRIALS = 8
"""Minimum number of evaluated trials; with fewer, importances are noise."""
_MAX_TRIALS = 100
"""Maximum number of trials that importances are learnt from, since fANOVA takes time by their
square."""
_MIN_REACHED = 4
"""Minimum number of trials that reached the target; with fewer, the best metric that as many
trials reached takes its place."""


@dataclass(frozen=True)
class Importances:
    """What decides the time to target, the steps to target and the seconds a step.

    Attributes:
        num_trials: number of trials that the importances are learnt from, stopped ones among them.
        shares: part of the variance of each quantity, in logarithms and over the whole search
            space, that goes with each parameter: ``[parameters, quantities]``. The index has
            qualified names such as ``optimizer=sgd/optimizer.lr``; the most important parameter of
            the time to target is first. Shares of a quantity sum to 1; all are 0 where it does not
            vary.
    """

    num_trials: int
    shares: pd.DataFrame


def time_importances(recording: Recording) -> Importances | None:
    """Importance of each varied parameter; None if fewer than MIN_TRIALS trials were evaluated, or
    if all were at one point.

    If fewer than four trials reached the target, the best metric that four trials reached takes its
    place, and is named.

    Source: Hutter, Hoos and Leyton-Brown, "An efficient approach for assessing hyperparameter
    importance" (2014), as Optuna has it.
    """
    trials = [trial for trial in recording.trials if trial.suggestion.values and _is_usable(trial)]
    if len(trials) < MIN_TRIALS:
        return None
    chosen = np.linspace(0, len(trials) - 1, min(len(trials), _MAX_TRIALS)).astype(int)
    trials = [trials[index] for index in chosen]
    target = _reachable(trials, recording.target)
    goal = "target" if target is recording.target else f"{target.metric} {target.value:.4g}"
    log_steps = log_steps_to_target(trials, target)
    log_rates = np.log([_train_seconds(trial) / trial.steps[-1] for trial in trials])
    quantities = {
        f"time to {goal}": log_steps + log_rates,
        f"steps to {goal}": log_steps,
        "seconds a step": log_rates,
    }
    shares = pd.DataFrame(
        {name: _shares(recording.space, trials, values) for name, values in quantities.items()}
    )
    if shares.empty:
        return None
    return Importances(len(trials), shares.sort_values([*shares], ascending=False))


def _shares(space: SearchSpace, trials: Sequence[RecordedTrial], values: Array) -> dict[str, float]:
    """Importance of each parameter that varies, by qualified name, for a value of each trial.

    fANOVA wants every parameter in each trial. One that is not open has the middle of its range, or
    its first option.
    """
    cube = UnitCube(space)
    encoded = cube.encode([trial.suggestion for trial in trials])
    distributions: dict[str, BaseDistribution] = {}
    columns: dict[str, list[Any]] = {}
    for (name, *_), num_options, column in zip(
        space.walk(), cube.num_options, encoded.T, strict=True
    ):
        if pd.Series(column).nunique() < 2:
            continue
        if num_options:
            distributions[name] = CategoricalDistribution(range(num_options))
            columns[name] = np.nan_to_num(column).astype(int).tolist()
        else:
            distributions[name] = FloatDistribution(0.0, 1.0)
            columns[name] = np.nan_to_num(column, nan=0.5).tolist()
    quiet_optuna()
    study = optuna.create_study()
    for index, value in enumerate(values.tolist()):
        params = {name: column[index] for name, column in columns.items()}
        study.add_trial(create_trial(params=params, distributions=distributions, value=value))
    try:
        return get_param_importances(study, evaluator=FanovaImportanceEvaluator(n_trees=32, seed=0))
    except RuntimeError:  # the value is the same in all trials
        return dict.fromkeys(columns, 0.0)


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
