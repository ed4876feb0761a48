"""What earlier studies contribute to a freeze-thaw search: points to try, and prior means for the
metric of a point.

Targets, units and speeds differ from study to study; which configurations are better than which
often does not. So a study gives one number for a point, the *prior mean*: the metric that a forest,
fitted to the study's curves, predicts there at the step by which that study's best trials had
reached their target. The prior mean is on the scale that the curve model uses for the new study's
own metrics: ``-asinh(shortfall / unit)``, a ratio far from the target and a difference near it. The
curve model learns how much weight the prior means deserve (``autotune.search.curve_model``).
"""

import math
from collections.abc import Sequence

import numpy as np

from autotune.recording import RecordedTrial
from autotune.search.curve_model import scaled_shortfalls, wait_for_scikit_learn
from autotune.search.earlier_trials import EarlierStudy, first_points
from autotune.search.encoding import Array, UnitCube
from autotune.space import SearchSpace, Suggestion

_NUM_TREES = 20
_MIN_LEAF = 3
"""Minimum number of evaluations in a leaf of the forest."""
_NUM_EVALUATIONS = 4
"""Number of evaluations of each curve that a forest is fitted to, spread evenly over the
logarithm of their index."""
_BEST_SHARE = 0.1
"""Fraction of a study's successful trials, the fastest ones, whose steps to target set the step
at which points are compared."""
_NUM_POINTS = 12
"""Number of each earlier study's best points that are candidates besides the points drawn at
random."""
_NUM_FIRST = 3
"""Number of points of earlier studies that are tried before there is anything to model."""


class WarmStart:
    """Points and prior means from any number of earlier studies, none included, for a search over a
    space.

    Args:
        seed: seed of the search.
    """

    def __init__(self, studies: Sequence[EarlierStudy], space: SearchSpace, seed: int) -> None:
        self._cube = UnitCube(space)
        self._models = [_PriorMeanModel(study, self._cube) for study in studies]
        self.points = first_points(studies, space, seed=seed, count=_NUM_POINTS * len(studies))
        """Good points of earlier studies that have not been tried yet, the best point of each
        study first."""
        self._num_first = min(_NUM_FIRST, len(self.points))
        self._num_tried = 0

    def first(self) -> Suggestion | None:
        """A point to try before there is anything to model.

        None once enough points of earlier studies have been tried.
        """
        return self.points[0] if self.points and self._num_tried < self._num_first else None

    def take(self, point: Suggestion) -> None:
        """Remove a point that is proposed or trained from the candidates."""
        left = [other for other in self.points if other != point]
        self._num_tried += len(self.points) - len(left)
        self.points = left

    def prior_means(self, coordinates: Array) -> Array:
        """Prior means ``[points, studies]`` of points with the given coordinates ``[points,
        parameters]``, higher is better.
        """
        if not self._models or not len(coordinates):
            return np.zeros((len(coordinates), len(self._models)))
        features = self._cube.features(coordinates)
        return np.column_stack([model.predict(features) for model in self._models])


class _PriorMeanModel:
    """A forest of one study's metrics over features and log step, evaluated at the study's
    decisive step.
    """

    def __init__(self, study: EarlierStudy, cube: UnitCube) -> None:
        features = cube.features(cube.encode([trial.suggestion for trial in study.trials]))
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
            [
                shortfalls[trial_indices == trial_index].min()
                for trial_index in np.unique(trial_indices)
            ]
        )
        self._log_step = _decisive_log_step(study, float(log_steps.max()))
        wait_for_scikit_learn()
        from sklearn.ensemble import ExtraTreesRegressor  # noqa: PLC0415  # takes seconds

        self._forest = ExtraTreesRegressor(_NUM_TREES, min_samples_leaf=_MIN_LEAF, random_state=0)
        self._forest.fit(
            np.column_stack([features[trial_indices.astype(int)], log_steps]),
            scaled_shortfalls(shortfalls, least),
        )

    def predict(self, features: Array) -> Array:
        rows = np.column_stack([features, np.full(len(features), self._log_step)])
        # scikit-learn has no types
        return self._forest.predict(rows)  # type: ignore[no-any-return]


def _evaluation_indices(trial: RecordedTrial) -> list[int]:
    """Indices of the evaluations that a forest is fitted to: those with a finite metric, denser
    at the start of the curve.
    """
    finite = [index for index, metric in enumerate(trial.metrics) if math.isfinite(metric)]
    chosen = np.geomspace(1, max(1, len(finite)), _NUM_EVALUATIONS).round().astype(int) - 1
    return [finite[index] for index in np.unique(chosen) if finite]


def _decisive_log_step(study: EarlierStudy, last: float) -> float:
    """Median log step at which the study's fastest trials reached its target.

    ``last`` if no trial did.
    """
    reached = sorted(
        (seconds, trial.steps[index])
        for trial in study.trials
        if (seconds := trial.time_to_target(study.target)) is not None
        and (index := trial.index_of_target(study.target)) is not None
    )
    best = reached[: max(1, round(_BEST_SHARE * len(reached)))]
    return float(np.median([math.log(max(step, 0.5)) for _, step in best])) if best else last
