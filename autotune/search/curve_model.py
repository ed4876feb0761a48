"""Models of learning curves over a search space: Gaussian processes whose hyperparameters are
learnt in the background.

One process models the metric over a point's features, the logarithm of the step, and the trial:
similar points have similar curves, neighbouring steps similar metrics, and a trial's difference
from its neighbours lasts through its whole curve. Another one models the logarithm of seconds per
step over the features alone, which every trial reveals at its first evaluation, stopped trials
included.

Source: freeze-thaw Bayesian optimization (Swersky, Snoek and Adams, 2014), with seconds per step
modelled apart from the metric.
"""

import math
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from scipy.optimize import minimize
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Exponentiation,
    Kernel,
    Matern,
    WhiteKernel,
)
from threadpoolctl import ThreadpoolController

from autotune.search.points import Array, Indices

_LIBRARIES = ThreadpoolController()
"""Libraries of linear algebra, which the imports above have loaded."""


def scaled_shortfalls(shortfalls: Array, least: Array) -> Array:
    """Scale distances from the target for the model, higher is better: ratios count far from the
    target, differences near it.

    ``least`` holds the least shortfall of each trial, of which a low quantile is the unit.
    """
    short = least[least > 0]
    unit = max(float(np.quantile(short, 0.1)), 1e-9) if len(short) else 1e-9
    values = -np.arcsinh(shortfalls / unit)
    # How bad the worst values are says nothing about the best.
    return np.maximum(values, np.quantile(values, 0.05)) if len(values) > 10 else values


def use_one_thread() -> None:
    """Limit linear algebra of this process to one thread: matrices are small, and waiting threads
    would spin on cores that trainings need.

    The limit is not lifted. It is the whole process's, so a decision that lifted it would give more
    threads to the learning in the background, whose last bits, and with them decisions, would then
    depend on how long each takes.
    """
    _LIBRARIES.limit(limits=1)


@cache
def _background() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="hyperparameters", initializer=use_one_thread)


class GaussianProcess:
    """A Gaussian process of standardised values whose hyperparameters stay near their initial
    values while rows are few.

    Hyperparameters are learnt in the background, since a device may be waiting, and are used from a
    later fit on that does not depend on how long learning takes: the same trials give the same
    decisions.

    Prior means of earlier studies enter linearly, with a weight for each study that is learnt from
    the rows. Whenever hyperparameters have been learnt, a study whose weight comes out negative is
    left out, and all studies are if the rows are likelier without them.

    Args:
        num_features: number of features of a point, the first columns of the rows.
        of_curves: whether two more columns follow: the position in the schedule, and the trial's
            number, -1 for a new trial.
    """

    def __init__(self, num_features: int, *, of_curves: bool = False) -> None:
        self._of_curves = of_curves
        self._kernel = (_curve_kernel if of_curves else _rate_kernel)(num_features)
        self._prior = self._kernel.theta
        self._learning: Future[Array] | None = None
        self._fits_until_learnt = 0
        self._studies: list[int] | None = None
        """Indices of the studies whose prior means the rows support; None before the first fit."""

    @property
    def uses_prior_means(self) -> bool:
        """Whether the rows support the prior means of any earlier study."""
        return bool(self._studies)

    def fit(
        self, rows: Array, values: Array, learn: Indices | None, prior_means: Array | None = None
    ) -> None:
        """Condition the process on values ``[rows]`` at rows ``[rows, columns]``, with earlier
        studies' prior means ``[rows, studies]``.

        ``learn`` holds the indices of the rows that hyperparameters are learnt from, None to keep
        them as they are. What is learnt is used three fits later, or when they are learnt anew
        before that.
        """
        use_one_thread()
        if prior_means is None:
            prior_means = np.zeros((len(rows), 0))
        if self._studies is None:
            self._studies = list(range(prior_means.shape[1]))
        self._fits_until_learnt -= 1
        if self._learning is not None and (learn is not None or self._fits_until_learnt <= 0):
            self._kernel = self._kernel.clone_with_theta(self._learning.result())
            self._learning = None
            self._studies = _supported_studies(self._kernel, rows, values, prior_means)
        # Were all values far from the target and alike, none could be expected to reach it.
        least_scale = abs(float(values.mean())) / 1.4 if self._of_curves else 0.0
        self._process = _ConditionedProcess(
            self._kernel, rows, values, prior_means, self._studies, least_scale
        )
        if learn is not None:
            self._learning = _background().submit(self._process.learn, learn, self._prior)
            self._fits_until_learnt = 3

    def predict(self, rows: Array, prior_means: Array | None = None) -> tuple[Array, Array]:
        """Mean and standard deviation ``[rows]``, noise included."""
        if prior_means is None:
            prior_means = np.zeros((len(rows), 0))
        return self._process.predict(rows, prior_means)


def _supported_studies(kernel: Kernel, rows: Array, values: Array, prior_means: Array) -> list[int]:
    studies = list(range(prior_means.shape[1]))
    while studies:
        process = _ConditionedProcess(kernel, rows, values, prior_means, studies)
        positive = [
            study for study, weight in zip(studies, process.weights, strict=True) if weight > 0
        ]
        if positive == studies:
            without = _ConditionedProcess(kernel, rows, values, prior_means, [])
            return studies if process.log_likelihood > without.log_likelihood else []
        studies = positive
    return []


def _curve_kernel(num_features: int) -> Kernel:
    """Kernel of metrics over rows of ``num_features`` features, a position in the schedule, and
    the trial's number.
    """
    near = _squared(0.4) + _squared(0.7) * Matern(4.0, (0.2, 40), nu=2.5)
    near_at_all = _squared(0.6) * Matern(4.0, (0.2, 40), nu=2.5)
    # 1 or 0, since numbers of trials are whole
    same_trial = _squared(0.3) * RBF(1e-3, "fixed")
    return (
        _alike(num_features, 0.6) * _OnColumns(num_features, 1, near)
        + _OnColumns(num_features, 1, near_at_all)
        + _OnColumns(num_features + 1, 1, same_trial)
        + WhiteKernel(0.008, (1e-5, 1))
    )


def _rate_kernel(num_features: int) -> Kernel:
    """Kernel of values over rows of ``num_features`` features alone."""
    return _squared(0.8) * _alike(num_features, 0.7) + WhiteKernel(0.01, (1e-5, 1))


class _Regressor(GaussianProcessRegressor):  # type: ignore[misc]  # scikit-learn has no types
    """Computes no likelihood when it is fitted, which takes as long as all the rest."""

    def log_marginal_likelihood(
        self, theta: Array | None = None, eval_gradient: bool = False, clone_kernel: bool = True
    ) -> Any:
        """With its gradient, as scikit-learn computes it; without, as ``fit`` asks for it, NaN."""
        if not eval_gradient:
            return math.nan
        return super().log_marginal_likelihood(theta, eval_gradient, clone_kernel)


class _ConditionedProcess:
    """A Gaussian process conditioned on values ``[rows]``, which are standardised, and on some
    earlier studies' prior means for them.

    The prior means' average, times the prior expectation of its weight, is the process's mean. How
    far each study's weight differs from its expectation is a linear kernel over the study's prior
    means, which stand in columns beside the rows.
    """

    def __init__(
        self,
        kernel: Kernel,
        rows: Array,
        values: Array,
        prior_means: Array,
        studies: list[int],
        least_scale: float = 0.0,
    ) -> None:
        self._studies = studies
        # Before any value is known, all weights together are expected to be 0.7 +- 0.7.
        self._weight, self._variance = 0.7 / max(1, len(studies)), 0.7**2 / max(1, len(studies))
        self._centres = prior_means[:, studies].mean(axis=0)
        rest = values - self._offset(prior_means)
        self._mean, self._scale = float(rest.mean()), max(float(rest.std()), least_scale) or 1.0
        if studies:
            kernel = kernel + ConstantKernel(self._variance, "fixed") * _OnColumns(
                rows.shape[1], len(studies), DotProduct(0.0, "fixed")
            )
        self._kernel, self._inputs = kernel, self._columns(rows, prior_means)
        self._targets = (rest - self._mean) / self._scale
        self._regressor = _Regressor(kernel, alpha=1e-6, optimizer=None).fit(
            self._inputs, self._targets
        )

    def predict(self, rows: Array, prior_means: Array) -> tuple[Array, Array]:
        """Mean and standard deviation ``[rows]``, noise included."""
        mean, deviation = self._regressor.predict(self._columns(rows, prior_means), return_std=True)
        return mean * self._scale + self._mean + self._offset(prior_means), deviation * self._scale

    def learn(self, rows: Indices, prior: Array) -> Array:
        """Learn the logarithms of the hyperparameters from some rows: a few iterations towards the
        highest posterior density.

        The logarithms have a normal prior around ``prior``, with a standard deviation of 1.4.
        """
        process = _Regressor(self._kernel, alpha=1e-6, optimizer=None).fit(
            self._inputs[rows], self._targets[rows]
        )

        def loss(theta: Array) -> tuple[float, Array]:
            value, gradient = process.log_marginal_likelihood(
                theta, eval_gradient=True, clone_kernel=False
            )
            deviation = (theta - prior) / 1.4
            density = 0.5 * float(deviation @ deviation) - value
            return density, deviation / 1.4 - gradient

        kernel = process.kernel_
        solution = minimize(
            loss,
            kernel.theta,
            jac=True,
            method="L-BFGS-B",
            bounds=kernel.bounds,
            options={"maxiter": 5},
        )
        return solution.x  # type: ignore[no-any-return]  # SciPy says Any

    @property
    def weights(self) -> Array:
        """Weight of each study's prior means ``[studies]``."""
        columns = self._inputs[:, -len(self._studies) :]
        weights: Array = self._weight + self._variance * columns.T @ self._regressor.alpha_
        return weights

    @property
    def log_likelihood(self) -> float:
        """Log likelihood of the values, up to a constant that depends only on their number."""
        log_determinant = 2 * float(np.log(np.diag(self._regressor.L_)).sum())
        of_targets = -0.5 * (float(self._targets @ self._regressor.alpha_) + log_determinant)
        return of_targets - len(self._targets) * math.log(self._scale)

    def _columns(self, rows: Array, prior_means: Array) -> Array:
        return np.column_stack(
            [rows, (prior_means[:, self._studies] - self._centres) / self._scale]
        )

    def _offset(self, prior_means: Array) -> Array:
        offsets: Array = (prior_means[:, self._studies] - self._centres).sum(axis=1)
        return self._weight * offsets


def _squared(amplitude: float) -> Kernel:
    return ConstantKernel(amplitude**2, (1e-5, 10))


def _alike(num_features: int, length_scale: float) -> Kernel:
    """How alike two points are by their features, the first columns of the rows.

    Each feature has a length scale of its own, at first ``length_scale``.
    """
    lengths = np.full(num_features, length_scale)
    return _OnColumns(0, num_features, Matern(lengths, (0.05, 20), nu=2.5))


class _OnColumns(Exponentiation):  # type: ignore[misc]  # scikit-learn has no types
    """Another kernel, with its hyperparameters, of ``count`` columns of the rows: a power of one,
    since that is scikit-learn's kernel of a single kernel.

    Rows that are equal in these columns, such as the evaluations of one trial or at one step, are
    computed once.
    """

    def __init__(self, first: int, count: int, kernel: Kernel) -> None:
        super().__init__(kernel, 1)
        self.first, self.count = first, count

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments that the kernel was made with.

        With ``deep`` those of the inner kernel, too.
        """
        inner = super().get_params(deep)
        del inner["exponent"]
        return {"first": self.first, "count": self.count, **inner}

    # scikit-learn names it so
    def __call__(
        self,
        X: Array,  # noqa: N803
        Y: Array | None = None,  # noqa: N803
        eval_gradient: bool = False,
    ) -> Any:
        rows, row_of = self._distinct(X)
        if eval_gradient:
            return tuple(
                values.take(row_of, axis=1).take(row_of, axis=0)
                for values in self.kernel(rows, eval_gradient=True)
            )
        if Y is None:
            return self.kernel(rows).take(row_of, axis=1).take(row_of, axis=0)
        columns, column_of = self._distinct(Y)
        # columns first, of fewer rows
        return self.kernel(rows, columns).take(column_of, axis=1).take(row_of, axis=0)

    def _distinct(self, rows: Array) -> tuple[Array, Indices]:
        """The distinct rows, and for every row the index of the one that equals it."""
        columns = np.ascontiguousarray(rows[:, self.first : self.first + self.count])
        as_bytes = columns.view(np.dtype((np.void, columns.itemsize * self.count))).ravel()
        _, first, index = np.unique(as_bytes, return_index=True, return_inverse=True)
        return columns[first], index

    def diag(self, X: Array) -> Array:  # noqa: N803  # scikit-learn names it so
        variances: Array = self.kernel.diag(X[:, self.first : self.first + self.count])
        return variances
