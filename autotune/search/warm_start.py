"""Earlier studies: their trials, translated to a new search space by matching config keys, and what
these contribute to a freeze-thaw search, which is points to try and prior means for the metric of a
point.

A parameter that only the earlier study has is left out. A parameter that only the new space has is
unknown for every earlier trial: models get no value for it, and where such a point is tried again
its value is drawn. A trial with a value that the new space does not have (outside a range, none of
a choice's options) is left out as a whole: moved to the range's end it would be a point nobody
trained.

Targets, units and speeds differ from study to study; which configurations are better than which
often does not. So a study gives one number for a point, the *prior mean*: the metric that a forest,
fitted to the study's curves, predicts there at the step by which that study's best trials had
reached their target. The prior mean is on the scale that the curve model uses for the new study's
own metrics: ``-asinh(shortfall / unit)``, a ratio far from the target and a difference near it. The
curve model learns how much weight the prior means deserve (``autotune.search.curve_model``).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from sklearn.ensemble import ExtraTreesRegressor

from autotune.errors import ConfigError
from autotune.measurement import Target
from autotune.recording import RecordedTrial, Recording
from autotune.search.curve_model import scaled_shortfalls
from autotune.search.points import Array, Candidates, RandomTrial, UnitCube, derived_seed
from autotune.space import Choice, Float, Int, Parameter, SearchSpace, Suggestion


@dataclass(frozen=True, kw_only=True)
class EarlierStudy:
    """An earlier study's trials, as far as their values are in the new search space."""

    name: str
    target: Target
    trials: tuple[RecordedTrial, ...]
    """Trials whose suggestions hold only values of the new space, and not always a value for
    each of its parameters."""
    summary: str
    """One line for the user on which trials and parameters were taken and left out."""


def earlier_study(name: str, recording: Recording, space: SearchSpace) -> EarlierStudy:
    """The trials of a recording that fit a search space and have an evaluation.

    Raises:
        ConfigError: no trial fits.
    """
    kept, misfits = [], Counter[str]()
    for trial in recording.trials:
        values, misfit = _fitting(space, trial.suggestion.values)
        if misfit is not None:
            misfits[misfit] += 1
        elif values and any(map(math.isfinite, trial.metrics)):
            kept.append(RecordedTrial(**{**vars(trial), "suggestion": Suggestion(values)}))
    known = {key for trial in recording.trials for key in trial.suggestion.values}
    wanted = set(space.keys)
    parts = [f"{name}: {len(kept)} of {len(recording.trials)} trials"]
    parts += [
        f"{count} left out, whose {key} this search space does not have"
        for key, count in misfits.items()
    ]
    if known - wanted:
        parts.append(f"left out: {', '.join(sorted(known - wanted))}, not in this search space")
    if wanted - known:
        parts.append(f"unknown there: {', '.join(sorted(wanted - known))}")
    if not kept:
        raise ConfigError(
            f"warm_start: {'; '.join(parts)}; use a study of which a trial fits this search space"
        )
    return EarlierStudy(
        name=name, target=recording.target, trials=tuple(kept), summary="; ".join(parts)
    )


def completed(space: SearchSpace, values: Mapping[str, Any], by_chance: RandomTrial) -> Suggestion:
    """A point of the space with the given values; missing values are drawn at random."""

    def value_of(name: str, key: str, parameter: Parameter) -> Any:
        return values[key] if key in values else parameter.suggest(by_chance, name)

    return space.point(value_of)


def _fitting(space: SearchSpace, values: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The values of parameters that the space has, and the key of a value outside the space,
    None if there is none.
    """
    fitting: dict[str, Any] = {}
    for key, parameter in space.parameters.items():
        if key not in values:
            continue
        value = values[key]
        if isinstance(parameter, Choice):
            if (index := parameter.index_of(value)) is None:
                return fitting, key
            fitting[key], opened = parameter.options[index]
            beneath, misfit = _fitting(opened, values)
            if misfit is not None:
                return fitting, misfit
            fitting |= beneath
            continue
        if isinstance(parameter, Float) and isinstance(value, int | float):
            low, high = parameter.low, parameter.high
            near = min(max(value, low), high)
            # past the end by a rounding error
            value = near if abs(value - near) <= 1e-9 * (high - low) else value
        if parameter.as_param(value) is None:
            return fitting, key
        fitting[key] = int(value) if isinstance(parameter, Int) else value
    return fitting, None


def _ranked(study: EarlierStudy) -> Sequence[RecordedTrial]:
    """A study's trials by time to target, the shortest first.

    Then those short of the target, by least shortfall.
    """

    def sort_key(trial: RecordedTrial) -> tuple[float, float]:
        seconds = trial.time_to_target(study.target)
        nearest = min(
            (study.target.shortfall(metric) for metric in trial.metrics if math.isfinite(metric)),
            default=math.inf,
        )
        return (math.inf if seconds is None else seconds, nearest)

    return sorted(study.trials, key=sort_key)


def first_points(
    studies: Sequence[EarlierStudy], space: SearchSpace, *, seed: int, count: int = 3
) -> list[Suggestion]:
    """At most ``count`` of the best points of earlier studies, from each study in turn and
    without duplicates.
    """
    by_chance = RandomTrial(np.random.default_rng(derived_seed(seed, "earlier points")))
    points: list[Suggestion] = []
    # None stands in place of trials of a study that has fewer than another one
    for trial in filter(None, chain.from_iterable(zip_longest(*map(_ranked, studies)))):
        if len(points) == count:
            break
        point = completed(space, trial.suggestion.values, by_chance)
        if point not in points:
            points.append(point)
    return points


class WarmStart:
    """Points and prior means from any number of earlier studies, none included, for a search over a
    space.

    Args:
        seed: seed of the search.
    """

    def __init__(self, studies: Sequence[EarlierStudy], space: SearchSpace, seed: int) -> None:
        self._models = [_PriorMeanModel(study, UnitCube(space)) for study in studies]
        self.points = first_points(studies, space, seed=seed, count=12 * len(studies))
        """Good points of earlier studies that have not been tried yet, the best point of each
        study first."""
        self._seed = seed
        self._num_first = min(3, len(self.points))
        self._num_tried = 0
        self._num_by_chance = 0
        self._is_earlier_next = True

    def startup_point(self, candidates: Candidates) -> Suggestion:
        """A point to try before there is anything to model: in turns a random one, the same as in a
        search without earlier studies, and a good one of an earlier study, at most three of those.
        """
        self._is_earlier_next = not self._is_earlier_next
        if not self._is_earlier_next and self.points and self._num_tried < self._num_first:
            return self.points[0]
        self._num_by_chance += 1
        rng = np.random.default_rng(derived_seed(self._seed, f"start {self._num_by_chance}"))
        return candidates.draw(rng, 1)[0]

    def take(self, point: Suggestion) -> None:
        """Remove a point that is proposed or trained from the candidates."""
        left = [other for other in self.points if other != point]
        self._num_tried += len(self.points) - len(left)
        self.points = left

    def prior_means(self, features: Array) -> Array:
        """Prior means ``[points, studies]`` of points with the given features ``[points,
        features]``, higher is better.
        """
        if not self._models or not len(features):
            return np.zeros((len(features), len(self._models)))
        return np.column_stack([model.predict(features) for model in self._models])


class _PriorMeanModel:
    """A forest of one study's metrics over features and log step, evaluated at the study's
    decisive step.
    """

    def __init__(self, study: EarlierStudy, cube: UnitCube) -> None:
        features = cube.features([trial.suggestion for trial in study.trials])
        rows = [
            (
                trial_index,
                math.log(max(trial.steps[index], 0.5)),
                study.target.shortfall(trial.metrics[index]),
            )
            for trial_index, trial in enumerate(study.trials)
            for index in _evaluation_indices(trial)
        ]
        trial_indices, log_steps, shortfalls = (
            np.array(column) for column in zip(*rows, strict=True)
        )
        least = np.array(
            [shortfalls[trial_indices == index].min() for index in np.unique(trial_indices)]
        )
        self._log_step = _decisive_log_step(study, float(log_steps.max()))
        self._forest = ExtraTreesRegressor(20, min_samples_leaf=3, random_state=0)
        self._forest.fit(
            np.column_stack([features[trial_indices.astype(int)], log_steps]),
            scaled_shortfalls(shortfalls, least),
        )

    def predict(self, features: Array) -> Array:
        rows = np.column_stack([features, np.full(len(features), self._log_step)])
        # scikit-learn has no types
        return self._forest.predict(rows)  # type: ignore[no-any-return]


def _evaluation_indices(trial: RecordedTrial) -> list[int]:
    """Indices of the evaluations that a forest is fitted to: of those with a finite metric four,
    spread evenly over the logarithm of their index.
    """
    finite = [index for index, metric in enumerate(trial.metrics) if math.isfinite(metric)]
    chosen = np.geomspace(1, max(1, len(finite)), 4).round().astype(int) - 1
    return [finite[index] for index in np.unique(chosen) if finite]


def _decisive_log_step(study: EarlierStudy, last: float) -> float:
    """Median log step at which the fastest tenth of the successful trials reached the target.

    ``last`` if no trial did.
    """
    reached = sorted(
        (trial.train_seconds[index], trial.steps[index])
        for trial in study.trials
        if (index := trial.index_of_target(study.target)) is not None
    )
    best = reached[: max(1, round(0.1 * len(reached)))]
    return float(np.median([math.log(max(step, 0.5)) for _, step in best])) if best else last
