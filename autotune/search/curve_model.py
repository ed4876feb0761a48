"""A model of learning curves over a search space: Gaussian processes of scikit-learn, learnt in the background.

One process is of the metric over a point's features, the logarithm of the step, and the trial: points that are alike have like
curves, neighbouring steps like metrics, and what sets a trial apart from its neighbours lasts through its curve. The other is of
the logarithm of seconds a step over the features alone, which every trial tells after its first evaluation, stopped ones too.

Source: freeze-thaw Bayesian optimization (Swersky, Snoek and Adams, 2014), with a step's seconds apart from what steps bring.
"""

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Exponentiation, Kernel, Matern, WhiteKernel

from autotune.search.encoding import Array

Indices = np.ndarray[Any, np.dtype[np.int_]]

_JITTER = 1e-6
_FITS_UNTIL_LEARNT = 3
"""How many fits later hyperparameters are used that began to be learnt at one."""
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
        features, log_step, trial = slice(0, num_features), slice(num_features, num_features + 1), slice(num_features + 1, num_features + 2)
        alike = _on(features, Matern(np.full(num_features, 0.7), (0.05, 20), nu=2.5))
        near = _on(log_step, Matern(1.5, (0.2, 20), nu=2.5))
        kernel = alike * (_squared(0.6) + _squared(0.4) * near) + _squared(0.4) * _on(log_step, Matern(1.5, (0.2, 20), nu=2.5))
        self._process = _Process(kernel + _squared(0.25) * _SameTrial(trial) + WhiteKernel(0.01, (1e-5, 1)))

    def fit(self, features: Array, log_steps: Array, trials: Array, metrics: Array, *, learn: Indices | None) -> None:
        """Take the rows ``[rows, ...]``; ``learn`` are the indices of those that hyperparameters are learnt of, None to keep them."""
        self._process.fit(np.column_stack([features, log_steps, trials]), metrics, learn)

    def predict(self, features: Array, log_steps: Array, trials: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of an evaluation, its noise included; a trial not seen before is -1.

        Args:
            features, trials: ``[points, ...]``.
            log_steps: ``[..., points]``, as what is returned.
        """
        times = log_steps.size // len(features)
        rows = np.column_stack([np.tile(features, (times, 1)), log_steps.ravel(), np.tile(trials, times)])
        means, deviations = self._process.predict(rows)
        return means.reshape(log_steps.shape), deviations.reshape(log_steps.shape)


class RateModel:
    """Log seconds a step over features. Call ``fit``, then ``predict``."""

    def __init__(self, num_features: int) -> None:
        alike = _on(slice(0, num_features), Matern(np.full(num_features, 0.7), (0.05, 20), nu=2.5))
        self._process = _Process(_squared(0.8) * alike + WhiteKernel(0.01, (1e-5, 1)))

    def fit(self, features: Array, log_rates: Array, *, learn: Indices | None) -> None:
        """Take the rows, as ``CurveModel.fit``."""
        self._process.fit(features, log_rates, learn)

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Mean and standard deviation ``[rows]``."""
        return self._process.predict(features)


class _Process:
    """A Gaussian process of standardised values whose hyperparameters stay near their first ones where rows are few.

    They are learnt in the background, since a device may be waiting, and used from a later fit on that does not depend on how long
    that takes: the same trials give the same decisions.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._prior: Array = kernel.theta
        self._mean, self._scale = 0.0, 1.0
        self._learning: Future[GaussianProcessRegressor] | None = None
        self._fits_until_learnt = 0

    def fit(self, rows: Array, values: Array, learn: Indices | None) -> None:
        self._mean, self._scale = float(values.mean()), float(values.std()) or 1.0
        scaled = (values - self._mean) / self._scale
        self._fits_until_learnt -= 1
        if self._learning is not None and (learn is not None or self._fits_until_learnt <= 0):
            self._kernel, self._learning = self._learning.result().kernel_, None
        if learn is not None:
            learner = GaussianProcessRegressor(self._kernel, alpha=_JITTER, optimizer=self._most_likely)
            self._learning = _background().submit(_learnt, learner, rows[learn], scaled[learn])
            self._fits_until_learnt = _FITS_UNTIL_LEARNT
        self._regressor = GaussianProcessRegressor(self._kernel, alpha=_JITTER, optimizer=None).fit(rows, scaled)

    def predict(self, rows: Array) -> tuple[Array, Array]:
        mean, deviation = self._regressor.predict(rows, return_std=True)
        return mean * self._scale + self._mean, deviation * self._scale

    def _most_likely(self, loss: Callable[..., Any], first: Array, bounds: Array) -> tuple[Array, float]:
        """Hyperparameters at the highest posterior density, as the regressor's optimizer."""

        def posterior(theta: Array) -> tuple[float, Array]:
            value, gradient = loss(theta)
            away = (theta - self._prior) / _PRIOR_SPREAD
            return value + 0.5 * float(away @ away), gradient + away / _PRIOR_SPREAD

        found = minimize(posterior, first, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": _MAX_ITERATIONS})
        return found.x, found.fun


def _learnt(learner: GaussianProcessRegressor, rows: Array, values: Array) -> GaussianProcessRegressor:
    with warnings.catch_warnings():  # a hyperparameter at its bound is as good as any
        warnings.simplefilter("ignore", ConvergenceWarning)
        return learner.fit(rows, values)


@cache
def _background() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="hyperparameters")


def _squared(amplitude: float) -> ConstantKernel:
    return ConstantKernel(amplitude**2, (1e-5, 10))


class _OnColumns(Exponentiation):  # type: ignore[misc]  # scikit-learn has no types
    """A kernel that sees only some columns of the rows; its parameters are the kernel's, as those of a power of it are."""

    def __init__(self, kernel: Kernel, exponent: tuple[int, int]) -> None:
        super().__init__(kernel, exponent)

    def _seen(self, rows: Array | None) -> Array | None:
        return None if rows is None else rows[:, slice(*self.exponent)]

    def __call__(self, X: Array, Y: Array | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803  # as it is called
        return self.kernel(self._seen(X), self._seen(Y), eval_gradient)

    def diag(self, X: Array) -> Array:  # noqa: N803  # as it is called
        """The kernel's diagonal."""
        return self.kernel.diag(self._seen(X))  # type: ignore[no-any-return]  # scikit-learn has no types


def _on(columns: slice, kernel: Kernel) -> Kernel:
    return _OnColumns(kernel, (columns.start, columns.stop))


class _SameTrial(Kernel):  # type: ignore[misc]  # scikit-learn has no types
    """One where two rows are of the same trial, zero elsewhere."""

    def __init__(self, column: slice) -> None:
        self.column = column

    def __call__(self, X: Array, Y: Array | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803  # as it is called
        same = (X[:, self.column] == (X if Y is None else Y)[:, self.column].T).astype(float)
        return (same, np.empty((len(X), len(X), 0))) if eval_gradient else same

    def diag(self, X: Array) -> Array:  # noqa: N803  # as it is called
        """Ones."""
        return np.ones(len(X))

    def is_stationary(self) -> bool:
        """It is not a function of a distance."""
        return False
