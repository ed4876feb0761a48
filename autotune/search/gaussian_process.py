"""Gaussian processes of scikit-learn over the rows of a search, whose hyperparameters are learnt in the background."""

import math
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from scipy.optimize import minimize
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Hyperparameter, Kernel, Matern, WhiteKernel

from autotune.search.curve_model import Indices, use_one_thread
from autotune.search.encoding import Array

_JITTER = 1e-6
_FITS_UNTIL_LEARNT = 3
"""Number of fits from the start of learning hyperparameters until they are used, unless they are learnt anew before that."""
_PRIOR_SPREAD = 1.4
"""Prior standard deviation of the logarithm of each hyperparameter around its initial value; amplitudes are squared."""
_MAX_ITERATIONS = 5
"""Optimizer iterations each time that hyperparameters are learnt, from their last values: few, so that learning is short."""
_WEIGHT_MEAN = 0.7
"""Prior mean of the total weight of the prior means that earlier studies give, before any evaluation is known."""
_WEIGHT_SPREAD = 0.7
"""Prior standard deviation of the total weight of the prior means that earlier studies give."""
_MAX_DISTINCT = 0.5
"""Fraction of distinct rows below which it pays to compute a kernel for these alone."""


def curve_kernel(num_features: int) -> Kernel:
    """Kernel of metrics over rows of ``num_features`` features, a position in the schedule, and the trial's number."""
    axis, trial = slice(num_features, num_features + 1), slice(num_features + 1, num_features + 2)
    alike, near = _alike(num_features), _OnColumns(axis, Matern(1.5, (0.2, 20), nu=2.5))
    kernel = alike * (_squared(0.6) + _squared(0.4) * near) + _squared(0.4) * clone(near)
    return kernel + _squared(0.25) * _SameTrial(trial) + WhiteKernel(0.01, (1e-5, 1))


def rate_kernel(num_features: int) -> Kernel:
    """Kernel of values over rows of ``num_features`` features alone."""
    return _squared(0.8) * _alike(num_features) + WhiteKernel(0.01, (1e-5, 1))


class GaussianProcess:
    """A Gaussian process of standardised values whose hyperparameters stay near their initial values while rows are few.

    Hyperparameters are learnt in the background, since a device may be waiting, and are used from a later fit on that does not depend on
    how long learning takes: the same trials give the same decisions.

    Prior means of earlier studies enter linearly: a share of their mean is the process's mean, and each study's weight, around that
    share, is learnt from the rows. Whenever hyperparameters have been learnt, a study whose weight comes out negative is left out, and
    all studies are if the rows are likelier without them.
    """

    def __init__(self, kernel: Kernel) -> None:
        use_one_thread()
        self._kernel = kernel
        self._prior: Array = kernel.theta
        self._learning: Future[Array] | None = None
        self._fits_until_learnt = 0
        self._used_studies: list[int] | None = None

    @property
    def uses_prior_means(self) -> bool:
        """Whether the rows support the prior means of any earlier study."""
        return bool(self._used_studies)

    def fit(self, rows: Array, values: Array, learn: Indices | None, prior_means: Array | None = None) -> None:
        """Condition the process on values ``[rows]``, as ``CurveModel.fit`` does."""
        prior_means = np.zeros((len(rows), 0)) if prior_means is None else prior_means
        if self._used_studies is None:
            self._used_studies = list(range(prior_means.shape[1]))
        self._fits_until_learnt -= 1
        if self._learning is not None and (learn is not None or self._fits_until_learnt <= 0):
            self._kernel, self._learning = self._kernel.clone_with_theta(self._learning.result()), None
            self._used_studies = self._choose_studies(rows, values, prior_means)
        if learn is not None:
            residuals = _Residuals(values, prior_means, self._used_studies)
            process = self._fitted(residuals, rows[learn], prior_means[learn], scaled=residuals.scaled[learn])
            self._learning = _background().submit(_learnt, process, self._prior)
            self._fits_until_learnt = _FITS_UNTIL_LEARNT
        self._residuals = _Residuals(values, prior_means, self._used_studies)
        self._regressor = self._fitted(self._residuals, rows, prior_means)

    def predict(self, rows: Array, prior_means: Array | None = None) -> tuple[Array, Array]:
        """Mean and standard deviation ``[rows]``, noise included."""
        prior_means = np.zeros((len(rows), 0)) if prior_means is None else prior_means
        mean, deviation = self._regressor.predict(self._residuals.columns(rows, prior_means), return_std=True)
        return self._residuals.unscaled(mean, prior_means), deviation * self._residuals.scale

    def _choose_studies(self, rows: Array, values: Array, prior_means: Array) -> list[int]:
        """Indices of the earlier studies whose prior means the rows support."""
        studies = list(range(prior_means.shape[1]))
        while studies:
            residuals = _Residuals(values, prior_means, studies)
            regressor = self._fitted(residuals, rows, prior_means)
            weights = residuals.weights(regressor.X_train_, regressor.alpha_)
            if (weights > 0).all():
                without_studies = _Residuals(values, prior_means, [])
                without = without_studies.log_likelihood(self._fitted(without_studies, rows, prior_means))
                return studies if residuals.log_likelihood(regressor) > without else []
            studies = [study for study, weight in zip(studies, weights, strict=True) if weight > 0]
        return []

    def _fitted(self, residuals: "_Residuals", rows: Array, prior_means: Array, scaled: Array | None = None) -> GaussianProcessRegressor:
        regressor = _Regressor(residuals.kernel(self._kernel, rows), alpha=_JITTER, optimizer=None)
        return regressor.fit(residuals.columns(rows, prior_means), residuals.scaled if scaled is None else scaled)


class _Regressor(GaussianProcessRegressor):  # type: ignore[misc]  # scikit-learn has no types
    """A regressor whose ``fit`` skips the likelihood, which takes as long as all the rest of it and is rarely needed."""

    def log_marginal_likelihood(self, theta: Array | None = None, eval_gradient: bool = False, clone_kernel: bool = True) -> Any:
        """The log likelihood with its gradient; NaN unless the gradient is asked for."""
        return super().log_marginal_likelihood(theta, eval_gradient, clone_kernel) if eval_gradient else math.nan


def _learnt(process: GaussianProcessRegressor, prior: Array) -> Array:
    """Logarithms of the hyperparameters after a few optimizer iterations towards the highest posterior density."""
    kernel, options = process.kernel_, {"maxiter": _MAX_ITERATIONS}

    def loss(theta: Array) -> tuple[float, Array]:
        value, gradient = process.log_marginal_likelihood(theta, eval_gradient=True, clone_kernel=False)
        deviation = (theta - prior) / _PRIOR_SPREAD
        return 0.5 * float(deviation @ deviation) - value, deviation / _PRIOR_SPREAD - gradient

    use_one_thread()
    solution = minimize(loss, kernel.theta, jac=True, method="L-BFGS-B", bounds=kernel.bounds, options=options)
    return solution.x  # type: ignore[no-any-return]  # SciPy says Any


@cache
def _background() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="hyperparameters")


class _Residuals:
    """Standardised values after a share of some studies' prior means is subtracted; without studies, just the standardised values."""

    def __init__(self, values: Array, prior_means: Array, studies: list[int]) -> None:
        self._studies = studies
        self._share = _WEIGHT_MEAN / max(1, len(studies))
        self._variance = _WEIGHT_SPREAD**2 / max(1, len(studies))
        self._centres = prior_means[:, studies].mean(axis=0)
        rest = values - self._offset(prior_means)
        self._mean, self.scale = float(rest.mean()), float(rest.std()) or 1.0
        self.scaled = (rest - self._mean) / self.scale

    def kernel(self, kernel: Kernel, rows: Array) -> Kernel:
        """The rows' kernel plus a linear kernel, without hyperparameters, of the prior means in the columns beside them."""
        if not self._studies:
            return kernel
        columns = slice(rows.shape[1], rows.shape[1] + len(self._studies))
        return kernel + _Constant(self._variance, "fixed") * _OnColumns(columns, DotProduct(0.0, "fixed"))

    def columns(self, rows: Array, prior_means: Array) -> Array:
        """The rows with a column for each study's prior means, centred and scaled, beside them."""
        return np.column_stack([rows, (prior_means[:, self._studies] - self._centres) / self.scale])

    def unscaled(self, mean: Array, prior_means: Array) -> Array:
        """Expected values from the process's means of standardised residuals."""
        return mean * self.scale + self._mean + self._offset(prior_means)

    def weights(self, columns: Array, alpha: Array) -> Array:
        """Weight of each study's prior means ``[studies]``, given the process's columns and dual coefficients."""
        return self._share + self._variance * columns[:, -len(self._studies) :].T @ alpha

    def log_likelihood(self, regressor: GaussianProcessRegressor) -> float:
        """Log likelihood of the values, given the process of ``scaled``, up to a constant that depends only on their number."""
        of_scaled = -0.5 * float(self.scaled @ regressor.alpha_) - float(np.log(np.diag(regressor.L_)).sum())
        return of_scaled - len(self.scaled) * math.log(self.scale)

    def _offset(self, prior_means: Array) -> Array:
        return self._share * (prior_means[:, self._studies] - self._centres).sum(axis=1)  # type: ignore[no-any-return]  # NumPy says Any


class _Constant(ConstantKernel):  # type: ignore[misc]  # scikit-learn has no types
    """A constant to add to another kernel or multiply with it: computed as one number instead of a matrix of equal entries."""

    def __call__(self, X: Array, Y: Array | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803  # scikit-learn names it so
        return super().__call__(X, Y, eval_gradient) if eval_gradient else self.constant_value


def _squared(amplitude: float) -> Kernel:
    return _Constant(amplitude**2, (1e-5, 10))


class _OnColumns(Kernel):  # type: ignore[misc]  # scikit-learn has no types
    """Another kernel, with its hyperparameters, of some columns of the rows.

    Rows that are equal in these columns, such as the evaluations of one trial or at one step, are computed once.
    """

    def __init__(self, columns: slice, kernel: Kernel) -> None:
        self.columns = columns
        self.kernel = kernel

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments that the kernel was made with; with ``deep`` those of the inner kernel, too."""
        inner = {f"kernel__{name}": value for name, value in self.kernel.get_params().items()} if deep else {}
        return {"columns": self.columns, "kernel": self.kernel, **inner}

    @property
    def hyperparameters(self) -> list[Hyperparameter]:
        """The inner kernel's hyperparameters, named as in ``get_params``."""
        return [inner._replace(name=f"kernel__{inner.name}") for inner in self.kernel.hyperparameters]

    @property
    def theta(self) -> Array:
        return self.kernel.theta  # type: ignore[no-any-return]  # scikit-learn has no types

    @theta.setter
    def theta(self, theta: Array) -> None:
        self.kernel.theta = theta

    def __call__(self, X: Array, Y: Array | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803  # scikit-learn names it so
        left = _Distinct(X[:, self.columns])
        if eval_gradient:
            return tuple(left.spread(left.spread(values, axis=1), axis=0) for values in self.kernel(left.rows, eval_gradient=True))
        right = left if Y is None else _Distinct(Y[:, self.columns])
        values = self.kernel(left.rows, None if Y is None else right.rows)
        return left.spread(right.spread(values, axis=1), axis=0)

    def diag(self, X: Array) -> Array:  # noqa: N803  # scikit-learn names it so
        return self.kernel.diag(X[:, self.columns])  # type: ignore[no-any-return]  # scikit-learn has no types

    def is_stationary(self) -> bool:
        return self.kernel.is_stationary()  # type: ignore[no-any-return]  # scikit-learn has no types


class _Distinct:
    """The distinct rows of a matrix, where these are few enough; else all of its rows."""

    def __init__(self, rows: Array) -> None:
        packed = np.ascontiguousarray(rows)
        row_bytes = packed.view(np.dtype((np.void, packed.itemsize * packed.shape[1]))).ravel()
        _, first, indices = np.unique(row_bytes, return_index=True, return_inverse=True)
        are_fewer = len(first) < _MAX_DISTINCT * len(rows)
        self.rows = rows[first] if are_fewer else rows
        self._indices = indices if are_fewer else None

    def spread(self, values: Array, *, axis: int) -> Array:
        """Repeat values computed for the distinct rows, so that there is one for every row of the matrix."""
        return values if self._indices is None else values.take(self._indices, axis)


def _alike(num_features: int) -> Kernel:
    """How alike two points are by their features, the first columns of the rows; each feature has a length scale of its own."""
    return _OnColumns(slice(0, num_features), Matern(np.full(num_features, 0.7), (0.05, 20), nu=2.5))


class _SameTrial(Kernel):  # type: ignore[misc]  # scikit-learn has no types
    """A kernel that is one where two rows belong to the same trial and zero elsewhere."""

    def __init__(self, column: slice) -> None:
        self.column = column

    def __call__(self, X: Array, Y: Array | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803  # scikit-learn names it so
        same = (X[:, self.column] == (X if Y is None else Y)[:, self.column].T).astype(float)
        return (same, np.empty((len(X), len(X), 0))) if eval_gradient else same

    def diag(self, X: Array) -> Array:  # noqa: N803  # scikit-learn names it so
        return np.ones(len(X))

    def is_stationary(self) -> bool:
        return False
