"""Predicts which configurations can be trained at all, from trials that ran out of memory, diverged or had refused values."""

import numpy as np
from scipy.special import ndtr

from autotune.search.curve_model import Indices, RateModel
from autotune.search.encoding import Array

_MIN_CHANCE = 0.02
"""Lower limit on every predicted chance, so that an error of the model never rules a region out."""
_MAX_POINTS = 200
"""Maximum number of points that the model is conditioned on: the last infeasible and the last feasible ones, up to half each."""


class FeasibilityModel:
    """The chance that a configuration can be trained, over its features: a Gaussian process of the labels 1 and -1.

    Until both a feasible and an infeasible point are known, every point counts as feasible and nothing is computed.

    Source: Rasmussen and Williams, "Gaussian processes for machine learning" (2006), section 6.5, least-squares classification; for
    weighing an acquisition by it, Gelbart, Snoek and Adams, "Bayesian optimization with unknown constraints" (2014).
    """

    def __init__(self, num_features: int) -> None:
        self._process = RateModel(num_features)
        self._points: dict[str, tuple[Array, bool]] = {}
        self._num_learnt_of = 0
        self._is_fitted = False

    def add(self, name: str, features: Array, *, is_feasible: bool) -> None:
        """Set the label of a point ``[features]``; a new label for the same name replaces it, since a trial may still diverge."""
        self._points[name] = features, is_feasible
        self._is_fitted = False

    def log_chances(self, features: Array) -> Array:
        """Logarithms ``[points]`` of the chance that each of the points ``[points, features]`` can be trained."""
        if not len(features) or len({is_feasible for _, is_feasible in self._points.values()}) < 2:
            return np.zeros(len(features))
        if not self._is_fitted:
            self._fit()
        means, deviations = self._process.predict(features)
        chances: Array = np.log(np.clip(ndtr(means / deviations), _MIN_CHANCE, 1.0))
        return chances

    def _fit(self) -> None:
        feasible, infeasible = (
            [features for features, label in self._points.values() if label is is_feasible][-_MAX_POINTS // 2 :]
            for is_feasible in (True, False)
        )
        labels = np.array([-1.0] * len(infeasible) + [1.0] * len(feasible))
        is_grown = len(labels) >= 1.06 * self._num_learnt_of
        learn: Indices | None = np.arange(len(labels)) if is_grown else None
        if is_grown:
            self._num_learnt_of = len(labels)
        self._process.fit(np.array([*infeasible, *feasible]), labels, learn=learn)
        self._is_fitted = True
