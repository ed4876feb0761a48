"""A model of learning curves over a search space: two Gaussian processes (``autotune.search.gaussian_process``).

One process models the metric over a point's features, the logarithm of the step, and the trial: similar points have similar curves,
neighbouring steps similar metrics, and a trial's difference from its neighbours lasts through its whole curve. The other process models
the logarithm of seconds per step over the features alone, which every trial reveals at its first evaluation, stopped trials included.

scikit-learn, whose import takes seconds, is imported with the first fit, or in the background while the first workers start.

Source: freeze-thaw Bayesian optimization (Swersky, Snoek and Adams, 2014), with seconds per step modelled apart from the metric.
"""

from functools import cache, cached_property
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import ThreadpoolController

from autotune.search.encoding import Array

if TYPE_CHECKING:
    from autotune.search.gaussian_process import GaussianProcess  # imports scikit-learn

Indices = np.ndarray[Any, np.dtype[np.int_]]

_UNIT_QUANTILE = 0.1
_WORST_QUANTILE = 0.05


def scaled_shortfalls(shortfalls: Array, least: Array) -> Array:
    """Scale distances from the target for the model, higher is better: ratios count far from the target, differences near it.

    ``least`` holds the least shortfall of each trial, of which a low quantile is the unit.
    """
    short = least[least > 0]
    unit = max(float(np.quantile(short, _UNIT_QUANTILE)), 1e-9) if len(short) else 1e-9
    values = -np.arcsinh(shortfalls / unit)
    # How bad the worst values are says nothing about the best.
    return np.maximum(values, np.quantile(values, _WORST_QUANTILE)) if len(values) > 10 else values


def use_one_thread() -> None:
    """Limit linear algebra of this process to one thread: matrices are small, and waiting threads would spin on cores that trainings need.

    The limit is not lifted. It is the whole process's, so a decision that lifted it would give more threads to the learning in the
    background, whose last bits, and with them decisions, would then depend on how long each takes.
    """
    _libraries().limit(limits=1)


@cache
def _libraries() -> ThreadpoolController:
    """The libraries of linear algebra, once the import of scikit-learn, which brings some of its own, has ended.

    To look for them while a thread imports may hang for ever: the one has the loader's lock and waits for Python's, the other has
    Python's and waits for the loader's (https://github.com/joblib/threadpoolctl/issues/239).
    """
    wait_for_scikit_learn()
    return ThreadpoolController()


@cache
def import_in_background() -> Thread:
    """Begin, once, to import in a thread what the first fit needs; SciPy fails if another thread imports torch meanwhile."""
    thread = Thread(target=import_module, args=("autotune.search.gaussian_process",), name="import-scikit-learn")
    thread.start()
    return thread


def wait_for_import() -> None:
    """Wait until the import that ``import_in_background`` began has ended; if none was begun, return at once."""
    if import_in_background.cache_info().currsize:
        import_in_background().join()


def wait_for_scikit_learn() -> None:
    """Wait until what the first fit needs is imported; it must be called in a search before other parts of scikit-learn are imported.

    Python raises errors in both threads where two import modules that need each other, in another order.
    """
    import_in_background().join()


class CurveModel:
    """Metrics over features, log step and trial. Call ``fit``, then ``predict``.

    Where schedules differ in length, an evaluation's position is the fraction of its trial's schedule instead of the step: the metric
    improves as the learning rate falls, at the schedule's end. The number of steps has its effect through the length, a feature.

    Args:
        num_features: number of features of a point.
        has_lengths: whether schedules differ in length.
    """

    def __init__(self, num_features: int, *, has_lengths: bool = False) -> None:
        self.has_lengths = has_lengths
        self._num_features = num_features

    @cached_property
    def _process(self) -> "GaussianProcess":
        from autotune.search.gaussian_process import GaussianProcess, curve_kernel  # noqa: PLC0415  # imports scikit-learn

        return GaussianProcess(curve_kernel(self._num_features))

    @property
    def uses_prior_means(self) -> bool:
        """Whether the evaluations support the prior means of any earlier study, so that predictions use them."""
        return "_process" in vars(self) and self._process.uses_prior_means

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
        """Condition the model on rows ``[rows, ...]``, one per evaluation, with earlier studies' prior means ``[rows, studies]``.

        ``learn`` holds the indices of the rows that hyperparameters are learnt from, None to keep them as they are; ``log_lengths`` are
        the logarithms of the lengths of the rows' schedules.
        """
        self._process.fit(np.column_stack([features, self._axis(log_steps, log_lengths), trials]), metrics, learn, prior_means)

    def predict(
        self, features: Array, log_steps: Array, trials: Array, *, prior_means: Array | None = None, log_lengths: Array | None = None
    ) -> tuple[Array, Array]:
        """Mean and standard deviation of evaluations, noise included, in the shape of ``log_steps``.

        Args:
            features, trials, prior_means, log_lengths: ``[points, ...]``; the trial of a point that was not seen before is -1.
            log_steps: ``[..., points]``.
        """
        copies = log_steps.size // len(features)
        axis = self._axis(log_steps.ravel(), None if log_lengths is None else np.tile(log_lengths, copies))
        rows = np.column_stack([np.tile(features, (copies, 1)), axis, np.tile(trials, copies)])
        means, deviations = self._process.predict(rows, None if prior_means is None else np.tile(prior_means, (copies, 1)))
        return means.reshape(log_steps.shape), deviations.reshape(log_steps.shape)

    def _axis(self, log_steps: Array, log_lengths: Array | None) -> Array:
        """Positions of evaluations: log step or, where schedules differ in length, log of the fraction of the schedule."""
        if not self.has_lengths:
            return log_steps
        assert log_lengths is not None, "a model of schedules that differ in length is told their lengths"
        return log_steps - log_lengths


class RateModel:
    """Log seconds per step over features. Call ``fit``, then ``predict``."""

    def __init__(self, num_features: int) -> None:
        self._num_features = num_features

    @cached_property
    def _process(self) -> "GaussianProcess":
        from autotune.search.gaussian_process import GaussianProcess, rate_kernel  # noqa: PLC0415  # imports scikit-learn

        return GaussianProcess(rate_kernel(self._num_features))

    def fit(self, features: Array, log_rates: Array, *, learn: Indices | None) -> None:
        """Condition the model on rows ``[rows, ...]``; hyperparameters are learnt from those at the indices ``learn``, if given."""
        self._process.fit(features, log_rates, learn)

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Mean and standard deviation ``[rows]`` of log seconds per step, noise included."""
        return self._process.predict(features)
