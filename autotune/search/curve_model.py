"""Models of learning curves over a search space: Gaussian processes whose hyperparameters are
learnt in the background.

One process models the metric over a point's features, the logarithm of the step, and the trial:
similar points have similar curves, neighbouring steps similar metrics, and a trial's difference
from its neighbours lasts through its whole curve. Another one models the logarithm of seconds per
step over the features alone, which every trial reveals at its first evaluation, stopped trials
included.

scikit-learn, whose import takes seconds, is imported with the first fit, or in the background while
the first workers start.

Source: freeze-thaw Bayesian optimization (Swersky, Snoek and Adams, 2014), with seconds per step
modelled apart from the metric.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import ThreadpoolController

from autotune.search.points import Array, Indices

if TYPE_CHECKING:
    from sklearn.gaussian_process.kernels import Kernel


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
    _libraries().limit(limits=1)


@cache
def _libraries() -> ThreadpoolController:
    """The libraries of linear algebra, once the import of scikit-learn, which brings some of its
    own, has ended.

    To look for them while a thread imports may hang for ever: the one has the loader's lock and
    waits for Python's, the other has Python's and waits for the loader's
    (https://github.com/joblib/threadpoolctl/issues/239).
    """
    import_in_background().join()
    return ThreadpoolController()


@cache
def import_in_background() -> Thread:
    """Begin, once, to import in a thread what the first fit needs.

    Join it before other parts of scikit-learn are imported: Python raises errors in both threads
    where two import modules that need each other, in another order. SciPy fails if another thread
    imports torch meanwhile.
    """
    thread = Thread(
        target=import_module, args=("autotune.search.gaussian_process",), name="import-scikit-learn"
    )
    thread.start()
    return thread


def wait_for_import() -> None:
    """Wait until the import that ``import_in_background`` began has ended.

    If none was begun, return at once.
    """
    if import_in_background.cache_info().currsize:
        import_in_background().join()


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
        self._num_features, self._of_curves = num_features, of_curves
        self._kernel: Kernel | None = None
        self._learning: Future[Array] | None = None
        self._fits_until_learnt = 0
        self._studies: list[int] = []

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
        use_one_thread()  # waits for the import of scikit-learn
        # takes seconds
        from autotune.search.gaussian_process import (  # noqa: PLC0415
            ConditionedProcess,
            curve_kernel,
            rate_kernel,
        )

        prior_means = _none(rows) if prior_means is None else prior_means
        if self._kernel is None:
            self._kernel = (curve_kernel if self._of_curves else rate_kernel)(self._num_features)
            self._prior = self._kernel.theta
            self._studies = list(range(prior_means.shape[1]))
        self._fits_until_learnt -= 1
        if self._learning is not None and (learn is not None or self._fits_until_learnt <= 0):
            self._kernel, self._learning = (
                self._kernel.clone_with_theta(self._learning.result()),
                None,
            )
            self._studies = list(range(prior_means.shape[1]))
            while self._studies:
                process = ConditionedProcess(self._kernel, rows, values, prior_means, self._studies)
                if (process.weights > 0).all():
                    without = ConditionedProcess(self._kernel, rows, values, prior_means, [])
                    self._studies = (
                        self._studies if process.log_likelihood > without.log_likelihood else []
                    )
                    break
                self._studies = [
                    study
                    for study, weight in zip(self._studies, process.weights, strict=True)
                    if weight > 0
                ]
        self._process = ConditionedProcess(self._kernel, rows, values, prior_means, self._studies)
        if learn is not None:
            self._learning = _background().submit(self._process.learn, learn, self._prior)
            self._fits_until_learnt = 3

    def predict(self, rows: Array, prior_means: Array | None = None) -> tuple[Array, Array]:
        """Mean and standard deviation ``[rows]``, noise included."""
        return self._process.predict(rows, _none(rows) if prior_means is None else prior_means)


def _none(rows: Array) -> Array:
    return np.zeros((len(rows), 0))
