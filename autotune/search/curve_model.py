"""A model of learning curves over a search space: Gaussian processes of scikit-learn, learnt in the background.

One process is of the metric over a point's features, the logarithm of the step, and the trial: points that are alike have like
curves, neighbouring steps like metrics, and what sets a trial apart from its neighbours lasts through its curve. The other is of
the logarithm of seconds a step over the features alone, which every trial tells after its first evaluation, stopped ones too.

Source: freeze-thaw Bayesian optimization (Swersky, Snoek and Adams, 2014), with a step's seconds apart from what steps bring.
"""

import math
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
from scipy.optimize import minimize
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Exponentiation, Kernel, Matern, WhiteKernel
from threadpoolctl import ThreadpoolController

from autotune.search.encoding import Array

Indices = np.ndarray[Any, np.dtype[np.int_]]

_JITTER = 1e-6
_FITS_UNTIL_LEARNT = 3
"""How many fits later hyperparameters are used that began to be learnt at one."""
_PRIOR_SPREAD = 1.4
"""Standard deviation of the logarithm of each hyperparameter around its first value; amplitudes are squared."""
_MAX_ITERATIONS = 5
"""Of each time that hyperparameters are learnt: they go on from where they stood, so that none of them is long."""
_MERIT_SHARE = 0.7
"""How much of the mean merit by earlier studies is taken for true before anything is known."""
_MERIT_SPREAD = 0.7
"""Standard deviation of what the prior_means count in all, around that."""
_UNIT_QUANTILE = 0.1
_WORST_QUANTILE = 0.05
_FEWER = 0.5
"""Share of rows that are distinct below which it pays to compute those alone."""


def goodness(shortfalls: Array, least: Array) -> Array:
    """Distances from the target as the model takes them, higher is better: ratios far from the target, differences near it.

    ``least`` holds the least of each trial; what the better trials lack is the unit.
    """
    short = least[least > 0]
    unit = max(float(np.quantile(short, _UNIT_QUANTILE)), 1e-9) if len(short) else 1e-9
    values = -np.arcsinh(shortfalls / unit)
    # How bad the worst are says nothing of the best.
    return np.maximum(values, np.quantile(values, _WORST_QUANTILE)) if len(values) > 10 else values


def one_thread() -> AbstractContextManager[object]:
    """Linear algebra in one thread: matrices are small here, and threads that wait would spin on the cores that trainings have."""
    return _libraries().limit(limits=1)  # type: ignore[no-any-return]  # threadpoolctl has no types


@cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


class CurveModel:
    """Metrics over features, log step and trial. Call ``fit``, then ``predict``.

    Where schedules differ in length, an evaluation lies at a share of its trial's schedule in place of a step: the metric comes as the
    rate falls, at the end of it. What the steps themselves bring is known by the length, which is one of the features.

    Args:
        num_features: of a point.
        has_lengths: whether schedules differ in length.
    """

    def __init__(self, num_features: int, *, has_lengths: bool = False) -> None:
        features, axis, trial = slice(0, num_features), slice(num_features, num_features + 1), slice(num_features + 1, num_features + 2)
        alike = _on(features, Matern(np.full(num_features, 0.7), (0.05, 20), nu=2.5))
        near = _on(axis, Matern(1.5, (0.2, 20), nu=2.5))
        kernel = alike * (_squared(0.6) + _squared(0.4) * near) + _squared(0.4) * _on(axis, Matern(1.5, (0.2, 20), nu=2.5))
        kernel = kernel + _squared(0.25) * _SameTrial(trial) + WhiteKernel(0.01, (1e-5, 1))
        self._has_lengths = has_lengths
        self._process = _Process(kernel)

    @property
    def uses_prior_means(self) -> bool:
        """Whether the rows speak for what an earlier study expects."""
        return self._process.uses_prior_means

    def fit(
        self,
        features: Array,
        log_steps: Array,
        trials: Array,
        metrics: Array,
        *,
        learn: Indices | None,
        prior_means: Array | None = None,
        log_lengths: Array | None = None,
    ) -> None:
        """Take the rows ``[rows, ...]``, with the prior_means ``[rows, studies]`` that earlier studies give to their points.

        ``learn`` are the indices of those that hyperparameters are learnt of, None to keep them; ``log_lengths`` say how long the rows'
        schedules are.
        """
        self._process.fit(np.column_stack([features, self._axis(log_steps, log_lengths), trials]), metrics, learn, prior_means)

    def predict(
        self, features: Array, log_steps: Array, trials: Array, *, prior_means: Array | None = None, log_lengths: Array | None = None
    ) -> tuple[Array, Array]:
        """Mean and standard deviation of an evaluation, its noise included; a trial not seen before is -1.

        Args:
            features, trials, prior_means, log_lengths: ``[points, ...]``.
            log_steps: ``[..., points]``, as what is returned.
        """
        times = log_steps.size // len(features)
        axis = self._axis(log_steps.ravel(), None if log_lengths is None else np.tile(log_lengths, times))
        rows = np.column_stack([np.tile(features, (times, 1)), axis, np.tile(trials, times)])
        means, deviations = self._process.predict(rows, None if prior_means is None else np.tile(prior_means, (times, 1)))
        return means.reshape(log_steps.shape), deviations.reshape(log_steps.shape)

    def _axis(self, log_steps: Array, log_lengths: Array | None) -> Array:
        """Where evaluations lie: at which step or, where schedules differ in length, at which share of theirs."""
        if not self._has_lengths:
            return log_steps
        assert log_lengths is not None, "a model of schedules that differ in length is told their lengths"
        return log_steps - log_lengths


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

    Merits by earlier studies come in linearly: a share of their mean is the process's mean, and each one's weight around it is as
    uncertain as the rows leave it. Whenever hyperparameters were learnt, a study whose weight comes out negative is left out, and all
    are where the rows are likelier without them.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._prior: Array = kernel.theta
        self._learning: Future[Array] | None = None
        self._fits_until_learnt = 0
        self._believed: list[int] | None = None

    @property
    def uses_prior_means(self) -> bool:
        return bool(self._believed)

    def fit(self, rows: Array, values: Array, learn: Indices | None, prior_means: Array | None = None) -> None:
        prior_means = np.zeros((len(rows), 0)) if prior_means is None else prior_means
        if self._believed is None:
            self._believed = list(range(prior_means.shape[1]))
        self._fits_until_learnt -= 1
        if self._learning is not None and (learn is not None or self._fits_until_learnt <= 0):
            self._kernel, self._learning = self._kernel.clone_with_theta(self._learning.result()), None
            self._believed = self._choose_studies(rows, values, prior_means)
        if learn is not None:
            view = _View(values, prior_means, self._believed)
            process = self._regressor_of(view, rows[learn], prior_means[learn], scaled=view.scaled[learn])
            self._learning = _background().submit(_learnt, process, self._prior)
            self._fits_until_learnt = _FITS_UNTIL_LEARNT
        self._view = _View(values, prior_means, self._believed)
        self._regressor = self._regressor_of(self._view, rows, prior_means)

    def predict(self, rows: Array, prior_means: Array | None = None) -> tuple[Array, Array]:
        prior_means = np.zeros((len(rows), 0)) if prior_means is None else prior_means
        mean, deviation = self._regressor.predict(self._view.columns(rows, prior_means), return_std=True)
        return self._view.unscaled(mean, prior_means), deviation * self._view.scale

    def _choose_studies(self, rows: Array, values: Array, prior_means: Array) -> list[int]:
        """Those studies whose prior_means the rows speak for."""
        studies = list(range(prior_means.shape[1]))
        while studies:
            view = _View(values, prior_means, studies)
            regressor = self._regressor_of(view, rows, prior_means)
            weights = view.weights(regressor.X_train_, regressor.alpha_)
            if (weights > 0).all():
                none = _View(values, prior_means, [])
                without = none.log_likelihood(self._regressor_of(none, rows, prior_means))
                return studies if view.log_likelihood(regressor) > without else []
            studies = [study for study, weight in zip(studies, weights, strict=True) if weight > 0]
        return []

    def _regressor_of(self, view: "_View", rows: Array, prior_means: Array, scaled: Array | None = None) -> GaussianProcessRegressor:
        made = _Regressor(view.kernel(self._kernel, rows), alpha=_JITTER, optimizer=None)
        return made.fit(view.columns(rows, prior_means), view.scaled if scaled is None else scaled)


class _Regressor(GaussianProcessRegressor):  # type: ignore[misc]  # scikit-learn has no types
    """One whose ``fit`` leaves the likelihood out: that takes as long as all the rest of it, and few ask for it."""

    def log_marginal_likelihood(self, theta: Array | None = None, eval_gradient: bool = False, clone_kernel: bool = True) -> Any:
        """The likelihood with its gradient; NaN where that is not asked for."""
        return super().log_marginal_likelihood(theta, eval_gradient, clone_kernel) if eval_gradient else math.nan


def _learnt(process: GaussianProcessRegressor, prior: Array) -> Array:
    """Logarithms of the hyperparameters, a little nearer to where their posterior density is highest."""
    kernel, options = process.kernel_, {"maxiter": _MAX_ITERATIONS}

    def loss(theta: Array) -> tuple[float, Array]:
        value, gradient = process.log_marginal_likelihood(theta, eval_gradient=True, clone_kernel=False)
        away = (theta - prior) / _PRIOR_SPREAD
        return 0.5 * float(away @ away) - value, away / _PRIOR_SPREAD - gradient

    with one_thread():
        found = minimize(loss, kernel.theta, jac=True, method="L-BFGS-B", bounds=kernel.bounds, options=options)
    return found.x  # type: ignore[no-any-return]  # SciPy says Any


@cache
def _background() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="hyperparameters")


class _View:
    """Values less what the prior_means by some studies alone make of them, standardised; where there are no such studies, the values."""

    def __init__(self, values: Array, prior_means: Array, studies: list[int]) -> None:
        self._studies = studies
        self._share = _MERIT_SHARE / max(1, len(studies))
        self._variance = _MERIT_SPREAD**2 / max(1, len(studies))
        self._usual = prior_means[:, studies].mean(axis=0)
        rest = values - self._of_prior_means(prior_means)
        self._mean, self.scale = float(rest.mean()), float(rest.std()) or 1.0
        self.scaled = (rest - self._mean) / self.scale

    def kernel(self, kernel: Kernel, rows: Array) -> Kernel:
        """The kernel of the rows, and of the prior_means beside them; what those add has no hyperparameters."""
        if not self._studies:
            return kernel
        columns = slice(rows.shape[1], rows.shape[1] + len(self._studies))
        return kernel + _Constant(self._variance, "fixed") * _on(columns, DotProduct(0.0, "fixed"))

    def columns(self, rows: Array, prior_means: Array) -> Array:
        """Rows with the prior_means beside them."""
        return np.column_stack([rows, (prior_means[:, self._studies] - self._usual) / self.scale])

    def unscaled(self, mean: Array, prior_means: Array) -> Array:
        """Expected values."""
        return mean * self.scale + self._mean + self._of_prior_means(prior_means)

    def weights(self, columns: Array, alpha: Array) -> Array:
        """What each study's prior_means count ``[studies]``, given the process's columns and dual coefficients."""
        return self._share + self._variance * columns[:, -len(self._studies) :].T @ alpha

    def log_likelihood(self, regressor: GaussianProcessRegressor) -> float:
        """Of the values, given the process of what ``scaled`` holds; less what all processes of so many values have in common."""
        of_scaled = -0.5 * float(self.scaled @ regressor.alpha_) - float(np.log(np.diag(regressor.L_)).sum())
        return of_scaled - len(self.scaled) * math.log(self.scale)

    def _of_prior_means(self, prior_means: Array) -> Array:
        return self._share * (prior_means[:, self._studies] - self._usual).sum(axis=1)  # type: ignore[no-any-return]  # NumPy says Any


class _Constant(ConstantKernel):  # type: ignore[misc]  # scikit-learn has no types
    """A constant to be added to another kernel or multiplied with it: one number, where a matrix of it would say no more."""

    def __call__(self, X: Array, Y: Array | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803  # as it is called
        return super().__call__(X, Y, eval_gradient) if eval_gradient else self.constant_value


def _squared(amplitude: float) -> Kernel:
    return _Constant(amplitude**2, (1e-5, 10))


class _OnColumns(Exponentiation):  # type: ignore[misc]  # scikit-learn has no types
    """A kernel that sees only some columns of the rows; its parameters are the kernel's, as those of a power of it are.

    Rows that are the same there, as evaluations of one trial or at one step are, are computed once.
    """

    def __init__(self, kernel: Kernel, exponent: tuple[int, int]) -> None:
        super().__init__(kernel, exponent)

    def _seen(self, rows: Array) -> Array:
        return rows[:, slice(*self.exponent)]

    def __call__(self, X: Array, Y: Array | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803  # as it is called
        left = _Distinct(self._seen(X))
        if eval_gradient:
            return tuple(left.spread(left.spread(each, axis=1), axis=0) for each in self.kernel(left.rows, eval_gradient=True))
        right = left if Y is None else _Distinct(self._seen(Y))
        made = self.kernel(left.rows, None if Y is None else right.rows)
        return left.spread(right.spread(made, axis=1), axis=0)

    def diag(self, X: Array) -> Array:  # noqa: N803  # as it is called
        """The kernel's diagonal."""
        return self.kernel.diag(self._seen(X))  # type: ignore[no-any-return]  # scikit-learn has no types


class _Distinct:
    """Rows without those that are there already, where that leaves out enough of them."""

    def __init__(self, rows: Array) -> None:
        packed = np.ascontiguousarray(rows)
        whole = packed.view(np.dtype((np.void, packed.itemsize * packed.shape[1]))).ravel()
        _, first, places = np.unique(whole, return_index=True, return_inverse=True)
        are_fewer = len(first) < _FEWER * len(rows)
        self.rows = rows[first] if are_fewer else rows
        self._places = places if are_fewer else None

    def spread(self, values: Array, *, axis: int) -> Array:
        """What was computed of these rows, for all rows."""
        return values if self._places is None else values.take(self._places, axis)


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
