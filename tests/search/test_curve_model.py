"""The models of learning curves, on curves made by a formula."""

import subprocess
import sys

import numpy as np
import pytest

from autotune.search.curve_model import GaussianProcess

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


def test_equal_values_are_no_trouble() -> None:
    made, points = GaussianProcess(2), np.random.default_rng(0).random((4, 2))
    made.fit(points, np.full(4, 2.5), np.arange(4))
    assert made.predict(points)[0] == pytest.approx(np.full(4, 2.5))


_LIMITED = """
from threadpoolctl import threadpool_info
from autotune.search.curve_model import use_one_thread

use_one_thread()
print({library["num_threads"] for library in threadpool_info()})
"""


def test_linear_algebra_of_the_search_takes_one_thread() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _LIMITED], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.returncode) == ("{1}\n", 0), ended.stderr
