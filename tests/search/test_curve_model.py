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
