"""What earlier studies tell a freeze-thaw search: points to try, and how good each thinks that a point is.

Targets, units and speeds differ from study to study; which configurations are better than which often does not. So what a study
tells of a point is one number, its *merit*: what a forest, fitted to the study's curves, expects of the metric there by the step at
which that study's best trials reached their target. It is on the scale that the curve model has of the new study's own metrics:
``-asinh(shortfall / unit)``, a ratio far from the target and a difference near it. How much of it is true here, the curve model
finds out (``autotune.search.curve_model``).
"""

import math
from collections.abc import Sequence

import numpy as np
from sklearn.ensemble import ExtraTreesRegressor

from autotune.recording import RecordedTrial
from autotune.search.curve_model import goodness
from autotune.search.earlier_trials import EarlierStudy, first_points
from autotune.search.encoding import Array, UnitCube
from autotune.space import SearchSpace, Suggestion

_NUM_TREES = 20
_LEAST_LEAF = 3
"""Evaluations in a leaf of the forest."""
_NUM_PLACES = 4
"""Evaluations of a curve that a forest is fitted to, spread evenly over the logarithm of their number."""
_BEST_SHARE = 0.1
"""Share of a study's trials that reached its target, the soonest, whose steps say when a point must be good."""
_NUM_POINTS = 12
"""Points of each earlier study that are candidates, however small chance makes it that they are drawn."""
_NUM_FIRST = 3
"""Of these, how many are tried before there is anything to model."""


class WarmStart:
    """Earlier studies, as a search over a space asks them; there may be none.

    Args:
        seed: of the search.
    """

    def __init__(self, studies: Sequence[EarlierStudy], space: SearchSpace, seed: int) -> None:
        self._cube = UnitCube(space)
        self._models = [_MeritModel(each, self._cube) for each in studies]
        self.points = first_points(studies, space, seed=seed, count=_NUM_POINTS * len(studies))
        """Good points of earlier studies that have not been tried yet, the best of each study first."""
        self._num_first = min(_NUM_FIRST, len(self.points))
        self._num_tried = 0

    def first(self) -> Suggestion | None:
        """A point to try before there is anything to model; None once a few have been."""
        return self.points[0] if self.points and self._num_tried < self._num_first else None

    def take(self, point: Suggestion) -> None:
        """A point is proposed or trained: it is no candidate any more."""
        left = [each for each in self.points if each != point]
        self._num_tried += len(self.points) - len(left)
        self.points = left

    def prior_means(self, coordinates: Array) -> Array:
        """What each study expects of points ``[points, parameters]``: ``[points, studies]``, higher is better."""
        features = self._cube.features(coordinates)
        if not self._models or not len(features):
            return np.zeros((len(features), len(self._models)))
        return np.column_stack([each.predict(features) for each in self._models])


class _MeritModel:
    """A forest of one study's metrics over features and log step, asked at one step."""

    def __init__(self, study: EarlierStudy, cube: UnitCube) -> None:
        features = cube.features(cube.encode([each.suggestion for each in study.trials]))
        rows = [
            (index, math.log(max(trial.steps[place], 0.5)), study.target.shortfall(trial.metrics[place]))
            for index, trial in enumerate(study.trials)
            for place in _places(trial)
        ]
        index, log_steps, shortfalls = (np.array(each) for each in zip(*rows, strict=True))
        least = np.array([shortfalls[index == each].min() for each in np.unique(index)])
        self._log_step = _decisive_log_step(study, float(log_steps.max()))
        self._forest = ExtraTreesRegressor(_NUM_TREES, min_samples_leaf=_LEAST_LEAF, random_state=0)
        self._forest.fit(np.column_stack([features[index.astype(int)], log_steps]), goodness(shortfalls, least))

    def predict(self, features: Array) -> Array:
        rows = np.column_stack([features, np.full(len(features), self._log_step)])
        return self._forest.predict(rows)  # type: ignore[no-any-return]  # scikit-learn has no types


def _places(trial: RecordedTrial) -> list[int]:
    """Places of evaluations with a finite metric, dense at first."""
    finite = [place for place, metric in enumerate(trial.metrics) if math.isfinite(metric)]
    chosen = np.geomspace(1, max(1, len(finite)), _NUM_PLACES).round().astype(int) - 1
    return [finite[each] for each in np.unique(chosen) if finite]


def _decisive_log_step(study: EarlierStudy, last: float) -> float:
    """The log step by which the study's best trials had reached its target; ``last`` where none did."""
    reached = sorted(
        (seconds, trial.steps[place])
        for trial in study.trials
        if (seconds := trial.time_to_target(study.target)) is not None and (place := trial.place_of_target(study.target)) is not None
    )
    best = reached[: max(1, round(_BEST_SHARE * len(reached)))]
    return float(np.median([math.log(max(step, 0.5)) for _, step in best])) if best else last
