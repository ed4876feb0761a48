"""A model of learning curves over a search space: Gaussian processes whose hyperparameters are learnt a little at a time.

One process is of the metric over a point's features, the logarithm of the step, and the trial: points that are alike have like
curves, neighbouring steps like metrics, and what sets a trial apart from its neighbours lasts through its curve. The other is of
the logarithm of seconds a step over the features alone, which every trial tells after its first evaluation, stopped ones too.

Free devices wait for it, so it is written out rather than made of a library's kernels: how far points lie apart does not depend
on the step, so a prediction for several steps needs it once, and a gradient takes a tenth of what a general process takes.

Source: freeze-thaw Bayesian optimization (Swersky, Snoek and Adams, 2014), with a step's seconds apart from what steps bring;
Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), algorithm 2.1 and equation 5.9.
"""

from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.linalg.lapack import dpotri
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

from autotune.search.encoding import Array

Indices = np.ndarray[Any, np.dtype[np.int_]]

_JITTER = 1e-6
_PRIOR_SPREAD = 1.4
"""Standard deviation of the logarithm of each hyperparameter around its first value; amplitudes are squared."""
_MAX_ITERATIONS = 5
"""Of each time that hyperparameters are learnt: they go on from where they stood, so that none of them is long."""


class CurveModel:
    """Metrics over features, log step and trial. Call ``fit``, then ``predict``.

    Args:
        num_features: of a point.
    """

    def __init__(self, num_features: int) -> None:
        self._process = _Process(num_features, alike=0.6, bent_alike=0.4, rising=0.4, own=0.25)

    def fit(self, features: Array, log_steps: Array, trials: Array, metrics: Array, *, learn: Indices | None) -> None:
        """Take the rows ``[rows, ...]``; ``learn`` are the indices of those that hyperparameters are learnt of, None to keep them."""
        self._process.fit(features, log_steps, trials, metrics, learn)

    def predict(self, features: Array, log_steps: Array, trials: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of an evaluation, its noise included; a trial not seen before is -1.

        Args:
            features, trials: ``[points, ...]``.
            log_steps: ``[..., points]``, as what is returned.
        """
        return self._process.predict(features, log_steps, trials)


class RateModel:
    """Log seconds a step over features. Call ``fit``, then ``predict``."""

    def __init__(self, num_features: int) -> None:
        self._process = _Process(num_features, alike=0.8, bent_alike=0, rising=0, own=0)

    def fit(self, features: Array, log_rates: Array, *, learn: Indices | None) -> None:
        """Take the rows, as ``CurveModel.fit``."""
        none = np.zeros(len(features))
        self._process.fit(features, none, none, log_rates, learn)

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Mean and standard deviation ``[points]``."""
        none = np.zeros(len(features))
        return self._process.predict(features, none, none)


class _Process:
    """A Gaussian process of standardised values whose hyperparameters stay near their first ones where rows are few.

    Its covariance is ``(alike + bent_alike * near) * like_features + rising * near + own * same_trial + noise``, with a Matérn
    function of the features and two of the log step. Amplitudes are given as they are at first, and stay zero where they are.
    """

    def __init__(self, num_features: int, *, alike: float, bent_alike: float, rising: float, own: float) -> None:
        squared = np.square([alike, bent_alike, rising, own])
        self._is_learnt = np.concatenate([squared > 0, [True, bent_alike > 0, rising > 0], np.full(num_features, True)])
        with np.errstate(divide="ignore"):  # an amplitude of zero
            self._first = np.concatenate([np.log(squared), np.log([0.01, 1.5, 1.5]), np.log(np.full(num_features, 0.7))])
        bounds = [(1e-5, 10)] * 4 + [(1e-5, 1)] + [(0.2, 20)] * 2 + [(0.05, 20)] * num_features
        self._bounds = np.log(bounds)[self._is_learnt]
        self.hyperparameters: Array = self._first
        """Logarithms of the four squared amplitudes, the noise, both scales of the log step, and one scale a feature."""

    def fit(self, features: Array, log_steps: Array, trials: Array, values: Array, learn: Indices | None) -> None:
        self._mean, self._scale = float(values.mean()), float(values.std()) or 1.0
        scaled = (values - self._mean) / self._scale
        if learn is not None:
            self._learn(_Loss(features[learn], log_steps[learn], trials[learn], scaled[learn]))
        self._rows = features, log_steps, trials
        covariance = self._covariance(features, log_steps, trials)
        covariance[np.diag_indices_from(covariance)] += np.exp(self.hyperparameters[4]) + _JITTER
        self._factor = cho_factor(covariance, lower=True, check_finite=False)
        self._weights = cho_solve(self._factor, scaled, check_finite=False)

    def predict(self, features: Array, log_steps: Array, trials: Array) -> tuple[Array, Array]:
        across = self._covariance(features, log_steps, trials)
        left = solve_triangular(self._factor[0], across.reshape(-1, across.shape[-1]).T, lower=True, check_finite=False)
        variances = np.exp(self.hyperparameters[:5]).sum() - np.einsum("ij,ij->j", left, left).reshape(log_steps.shape)
        return across @ self._weights * self._scale + self._mean, np.sqrt(np.maximum(variances, _JITTER)) * self._scale

    def _covariance(self, features: Array, log_steps: Array, trials: Array) -> Array:
        """Of points with the rows ``[..., points, rows]``, without noise."""
        row_features, row_log_steps, row_trials = self._rows
        alike, bent_alike, rising, own, _, near_scale, rise_scale = np.exp(self.hyperparameters[:7])
        scales = np.exp(self.hyperparameters[7:])
        like = _matern(cdist(features / scales, row_features / scales))
        if not bent_alike:
            like *= alike
            return like
        apart = np.abs(log_steps[..., None] - row_log_steps)
        covariance = _matern(apart / near_scale)
        covariance *= bent_alike
        covariance += alike
        covariance *= like
        covariance += rising * _matern(apart / rise_scale)
        covariance += own * (trials[:, None] == row_trials)
        return covariance

    def _learn(self, loss: "_Loss") -> None:
        """Go on to hyperparameters of higher posterior density."""
        first = self._first[self._is_learnt]

        def posterior(learnt: Array) -> tuple[float, Array]:
            value, gradient = loss(self._with(learnt))
            away = (learnt - first) / _PRIOR_SPREAD
            return value + 0.5 * float(away @ away), gradient[self._is_learnt] + away / _PRIOR_SPREAD

        options = {"maxiter": _MAX_ITERATIONS, "maxfun": 2 * _MAX_ITERATIONS}
        start = self.hyperparameters[self._is_learnt]
        self.hyperparameters = self._with(minimize(posterior, start, jac=True, method="L-BFGS-B", bounds=self._bounds, options=options).x)

    def _with(self, learnt: Array) -> Array:
        hyperparameters = self._first.copy()
        hyperparameters[self._is_learnt] = learnt
        return hyperparameters


class _Loss:
    """The negative logarithm of the values' probability, and its gradient, over a process's hyperparameters."""

    def __init__(self, features: Array, log_steps: Array, trials: Array, values: Array) -> None:
        self._squared = np.square(features.T[:, :, None] - features.T[:, None, :]).reshape(features.shape[1], -1)
        self._apart = np.abs(log_steps[:, None] - log_steps)
        self._same = (trials[:, None] == trials).astype(float)
        self._values = values

    def __call__(self, hyperparameters: Array) -> tuple[float, Array]:
        alike, bent_alike, rising, own, noise, near_scale, rise_scale = np.exp(hyperparameters[:7])
        closeness = np.exp(-2 * hyperparameters[7:])
        size = len(self._values)
        like, like_slope = _matern_and_slope(np.sqrt((closeness @ self._squared).reshape(size, size)))
        near, near_slope = _matern_and_slope(self._apart / near_scale)
        rise, rise_slope = _matern_and_slope(self._apart / rise_scale)
        bent = alike + bent_alike * near
        covariance = bent * like + rising * rise + own * self._same
        covariance[np.diag_indices(size)] += noise + _JITTER
        factor = cho_factor(covariance, lower=True, check_finite=False)
        weights = cho_solve(factor, self._values, check_finite=False)
        inverse, _ = dpotri(factor[0], lower=1)  # its lower triangle
        inverse = np.tril(inverse) + np.tril(inverse, -1).T
        pull = 0.5 * (inverse - np.outer(weights, weights))
        pull_like, apart_squared = pull * like, self._apart**2
        gradient = np.concatenate(
            [
                [alike * pull_like.sum(), bent_alike * (pull_like * near).sum(), rising * (pull * rise).sum()],
                [own * (pull * self._same).sum(), noise * np.trace(pull)],
                [bent_alike * (pull_like * near_slope * apart_squared).sum() / near_scale**2],
                [rising * (pull * rise_slope * apart_squared).sum() / rise_scale**2],
                closeness * (self._squared @ (pull * bent * like_slope).ravel()),
            ]
        )
        return 0.5 * float(self._values @ weights) + float(np.log(np.diag(factor[0])).sum()), gradient


def _matern(distances: Array) -> Array:
    """The Matérn function of smoothness 5/2; in place for the most part, since it is most of what a prediction takes.

    Source: Rasmussen and Williams (2006), equation 4.17.
    """
    far: Array = np.sqrt(5.0) * distances
    value = far / 3
    value += 1
    value *= far
    value += 1
    np.negative(far, out=far)
    value *= np.exp(far, out=far)
    return value


def _matern_and_slope(distances: Array) -> tuple[Array, Array]:
    """It, and its derivative by minus half the squared distance."""
    far = np.sqrt(5.0) * distances
    falling = np.exp(-far)
    slope = (1 + far) * falling
    return slope + far**2 / 3 * falling, (5 / 3) * slope
