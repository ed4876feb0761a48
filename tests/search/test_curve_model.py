"""The models of learning curves, on curves made by a formula."""

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.gaussian_process.kernels import Matern

from autotune.search import curve_model
from autotune.search.curve_model import CurveModel, RateModel
from autotune.search.earlier_trials import earlier_study
from autotune.search.expected_scores import _correlation
from autotune.search.gaussian_process import _OnColumns
from autotune.search.warm_start import WarmStart
from tests.search.test_warm_start import SPACE, recording

NEW = -1.0


def curves(points: np.ndarray, log_steps: np.ndarray) -> np.ndarray:
    return log_steps * (1 - (points[:, 0] - 0.3) ** 2)


@pytest.fixture(scope="module")
def model() -> CurveModel:
    rng = np.random.default_rng(0)
    points = np.repeat(rng.random((25, 2)), 3, axis=0)
    log_steps = np.tile([0.0, 0.7, 1.4], 25)
    made = CurveModel(2)
    for _ in range(6):  # a little at a time
        made.fit(points, log_steps, np.repeat(np.arange(25.0), 3), curves(points, log_steps), learn=np.arange(75))
    return made


def test_the_curve_of_a_point_not_seen_is_foretold(model: CurveModel) -> None:
    points = np.random.default_rng(1).random((40, 2))
    log_steps = np.full(40, 1.0)
    means, deviations = model.predict(points, log_steps, np.full(40, NEW))
    assert np.abs(means - curves(points, log_steps)).mean() < 0.05
    assert (deviations > 0).all()


def test_further_on_less_is_known(model: CurveModel) -> None:
    point = np.full((2, 2), 0.5)
    _, deviations = model.predict(point, np.array([1.0, 6.0]), np.full(2, NEW))
    assert deviations[1] > 3 * deviations[0]


def test_what_sets_a_trial_apart_lasts() -> None:
    rng = np.random.default_rng(0)
    points, log_steps, trials = np.repeat(rng.random((30, 1)), 2, axis=0), np.tile([0.0, 1.0], 30), np.repeat(np.arange(30.0), 2)
    apart = rng.normal(size=30)
    made = CurveModel(1)
    made.fit(points, log_steps, trials, np.repeat(apart, 2) + log_steps, learn=np.arange(60))
    own, _ = made.predict(points[::2], np.full(30, 1.2), np.arange(30.0))
    others, _ = made.predict(points[::2], np.full(30, 1.2), np.full(30, NEW))
    assert np.corrcoef(own, apart)[0, 1] > 0.9
    assert np.corrcoef(own, apart)[0, 1] > np.corrcoef(others, apart)[0, 1]


def test_curves_that_are_one_by_their_share_of_the_schedule_are_foretold_at_lengths_not_seen() -> None:
    """The metric comes at the end of the schedule, however long that is; a point's features say nothing."""

    def metric(log_shares: np.ndarray) -> np.ndarray:
        return np.exp(log_shares) ** 3  # type: ignore[no-any-return]  # NumPy says Any

    rng = np.random.default_rng(0)
    lengths = np.repeat(np.log(rng.uniform(10, 100, 20)), 4)
    shares = np.tile(np.log([0.1, 0.4, 0.7, 1.0]), 20)
    trials, points = np.repeat(np.arange(20.0), 4), np.repeat(rng.random((20, 1)), 4, axis=0)
    new, unseen = np.log(rng.uniform(10, 100, 30)), rng.random((30, 1))
    errors = []
    for has_lengths in (True, False):
        made = CurveModel(1, has_lengths=has_lengths)
        for _ in range(4):
            made.fit(points, lengths + shares, trials, metric(shares), learn=np.arange(80), log_lengths=lengths)
        at_end, _ = made.predict(unseen, new, np.full(30, NEW), log_lengths=new)
        half, _ = made.predict(unseen, new + math.log(0.55), np.full(30, NEW), log_lengths=new)
        wanted = metric(np.full(30, math.log(0.55)))
        errors.append(float(np.abs(at_end - 1).mean() + np.abs(half - wanted).mean()))
    assert errors[0] < 0.2
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("num_points", [4, 30], ids=["many are the same", "few are"])
def test_what_is_computed_once_for_rows_that_are_the_same_is_to_the_last_bit_what_each_has(num_points: int) -> None:
    rng = np.random.default_rng(0)
    rows, others = (np.column_stack([rng.random((num_points, 2))[rng.integers(0, num_points, 40)], rng.random(40)]) for _ in range(2))
    kernel = Matern([0.5, 0.8], nu=2.5)
    seen = _OnColumns(slice(0, 2), kernel)
    assert (seen(rows) == kernel(rows[:, :2])).all()
    assert (seen(rows, others) == kernel(rows[:, :2], others[:, :2])).all()
    for ours, plain in zip(seen(rows, eval_gradient=True), kernel(rows[:, :2], eval_gradient=True), strict=True):
        assert (ours == plain).all()


def test_a_kernel_on_columns_has_the_inner_kernels_hyperparameters_and_its_clone_has_its_own() -> None:
    kernel = _OnColumns(slice(1, 3), Matern([0.5, 0.8], (0.1, 10), nu=2.5)) * 2.0
    assert (kernel.theta[:2] == np.log([0.5, 0.8])).all()
    assert (kernel.bounds[:2] == np.log([0.1, 10])).all()
    assert all(hyperparameter.name in kernel.get_params() for hyperparameter in kernel.hyperparameters)
    other = kernel.clone_with_theta(np.zeros(3))
    assert (other.theta == 0).all()
    assert kernel.theta[0] == np.log(0.5)
    assert other != kernel
    assert clone(kernel) == kernel
    rows = np.random.default_rng(0).random((5, 4))
    assert kernel.diag(rows) == pytest.approx(np.diag(kernel(rows)))


def test_hyperparameters_stay_where_nothing_is_to_be_learnt_of(model: CurveModel) -> None:
    made = RateModel(2)
    points = np.random.default_rng(0).random((20, 2))
    for _ in range(6):
        made.fit(points, points[:, 1], learn=np.arange(20))
    for _ in range(3):  # what was begun is taken
        made.fit(points, points[:, 1], learn=None)
    learnt = made._process._kernel
    made.fit(points[:5], points[:5, 1], learn=None)
    assert made._process._kernel is learnt
    assert made.predict(points[:5])[0] == pytest.approx(points[:5, 1], abs=0.05)


def test_equal_values_are_no_trouble() -> None:
    made = RateModel(2)
    points = np.random.default_rng(0).random((4, 2))
    made.fit(points, np.full(4, 2.5), learn=np.arange(4))
    assert made.predict(points)[0] == pytest.approx(np.full(4, 2.5))


def test_hyperparameters_are_used_a_fixed_number_of_fits_after_they_began_to_be_learnt() -> None:
    rng = np.random.default_rng(0)
    points = rng.random((60, 2))
    values = np.sin(9 * points[:, 0])
    made, kernels = RateModel(2), []
    for learn in (np.arange(60), None, None, None, None):
        made.fit(points, values, learn=learn)
        kernels.append(made._process._kernel)
    assert [each is kernels[0] for each in kernels] == [True, True, True, False, False]
    assert kernels[3] is kernels[4]


def test_hyperparameters_are_learnt_a_little_further_each_time() -> None:
    rng = np.random.default_rng(0)
    points = rng.random((60, 2))
    values = np.sin(9 * points[:, 0])
    made, found = RateModel(2), []
    for _ in range(5):
        made.fit(points, values, learn=np.arange(60))
        found.append(made._process._kernel.theta)
    assert np.abs(found[2] - found[1]).max() > np.abs(found[4] - found[3]).max()
    assert found[4][1] < found[4][2] - 1, "the second feature says nothing, so its scale is long"


_IMPORTS = """
import threading
from threadpoolctl import ThreadpoolController, threadpool_info
from autotune.search import curve_model

def look():
    assert "import-scikit-learn" not in {thread.name for thread in threading.enumerate()}, "each may wait for the other for ever"
    return ThreadpoolController()

curve_model.ThreadpoolController = look
curve_model.import_in_background()
curve_model.use_one_thread()
print({library["num_threads"] for library in threadpool_info()})
"""


def test_libraries_are_looked_for_and_limited_once_they_are_imported() -> None:
    ended = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stdout, ended.returncode) == ("{1}\n", 0), ended.stderr


@pytest.mark.parametrize(
    "use",
    [lambda: _correlation([np.zeros(2)]), lambda: WarmStart([earlier_study("old", recording(0.1, 0), SPACE)], SPACE, 0)],
    ids=["expected_scores", "warm_start"],
)
def test_scikit_learn_is_used_once_the_background_has_imported_it(use: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    importing = threading.Thread(target=time.sleep, args=(0.5,))
    importing.start()
    monkeypatch.setattr(curve_model, "import_in_background", lambda: importing)
    use()
    assert not importing.is_alive()
