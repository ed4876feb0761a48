"""The models of learning curves, on curves made by a formula."""

import subprocess
import sys

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import Matern

from autotune.search.curve_model import GaussianProcess
from autotune.search.gaussian_process import _OnColumns

NEW = -1.0


def rows(points: np.ndarray, log_steps: np.ndarray, trials: np.ndarray) -> np.ndarray:
    return np.column_stack([points, log_steps, trials])


def curves(points: np.ndarray, log_steps: np.ndarray) -> np.ndarray:
    return log_steps * (1 - (points[:, 0] - 0.3) ** 2)


def test_the_curve_of_a_point_not_seen_is_foretold_and_further_on_less_is_known() -> None:
    rng = np.random.default_rng(0)
    points = np.repeat(rng.random((25, 2)), 3, axis=0)
    log_steps = np.tile([0.0, 0.7, 1.4], 25)
    made = GaussianProcess(2, of_curves=True)
    for _ in range(6):  # a little at a time
        made.fit(
            rows(points, log_steps, np.repeat(np.arange(25.0), 3)),
            curves(points, log_steps),
            np.arange(75),
        )
    points, log_steps = np.random.default_rng(1).random((40, 2)), np.full(40, 1.0)
    means, deviations = made.predict(rows(points, log_steps, np.full(40, NEW)))
    assert np.abs(means - curves(points, log_steps)).mean() < 0.05
    assert (deviations > 0).all()
    _, deviations = made.predict(rows(np.full((2, 2), 0.5), np.array([1.0, 6.0]), np.full(2, NEW)))
    assert deviations[1] > 3 * deviations[0]


@pytest.mark.parametrize("num_points", [4, 30], ids=["many are the same", "few are"])
def test_a_kernel_on_columns_is_to_the_last_bit_the_inner_kernel_of_these(num_points: int) -> None:
    rng = np.random.default_rng(0)
    seen, others = (
        np.column_stack(
            [rng.random((num_points, 2))[rng.integers(0, num_points, 40)], rng.random(40)]
        )
        for _ in range(2)
    )
    kernel = Matern([0.5, 0.8], nu=2.5)
    of_columns = _OnColumns(0, 2, kernel)
    assert (of_columns(seen) == kernel(seen[:, :2])).all()
    assert (of_columns(seen, others) == kernel(seen[:, :2], others[:, :2])).all()
    for ours, plain in zip(
        of_columns(seen, eval_gradient=True), kernel(seen[:, :2], eval_gradient=True), strict=True
    ):
        assert (ours == plain).all()
    other = (of_columns * 2.0).clone_with_theta(np.zeros(3))
    assert (other.theta == 0).all()
    assert of_columns.theta[0] == np.log(0.5)


def test_hyperparameters_are_used_a_fixed_number_of_fits_after_they_began_to_be_learnt() -> None:
    points = np.random.default_rng(0).random((60, 2))
    made, kernels = GaussianProcess(2), []
    for learn in (np.arange(60), None, None, None, None):
        made.fit(points, np.sin(9 * points[:, 0]), learn)
        kernels.append(made._kernel)
    assert [kernel is kernels[0] for kernel in kernels] == [True, True, True, False, False]
    assert kernels[3] is kernels[4]


def test_equal_values_are_no_trouble() -> None:
    made, points = GaussianProcess(2), np.random.default_rng(0).random((4, 2))
    made.fit(points, np.full(4, 2.5), np.arange(4))
    assert made.predict(points)[0] == pytest.approx(np.full(4, 2.5))


_IMPORTS = """
import threading
from threadpoolctl import ThreadpoolController, threadpool_info
from autotune.search import curve_model

def look():
    names = {thread.name for thread in threading.enumerate()}
    assert "import-scikit-learn" not in names, "each may wait for the other for ever"
    return ThreadpoolController()

curve_model.ThreadpoolController = look
curve_model.import_in_background()
curve_model.use_one_thread()
print({library["num_threads"] for library in threadpool_info()})
"""


def test_libraries_are_looked_for_and_limited_once_they_are_imported() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.stdout, ended.returncode) == ("{1}\n", 0), ended.stderr
