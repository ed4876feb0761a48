"""The models of learning curves, on curves made by a formula."""

import numpy as np
import pytest

from autotune.search.curve_model import CurveModel, RateModel, _Loss

NEW = -1.0


def curves(points: np.ndarray, log_steps: np.ndarray) -> np.ndarray:
    return log_steps * (1 - (points[:, 0] - 0.3) ** 2)


@pytest.fixture(scope="module")
def model() -> CurveModel:
    rng = np.random.default_rng(0)
    points = np.repeat(rng.random((25, 2)), 3, axis=0)
    log_steps = np.tile([0.0, 0.7, 1.4], 25)
    made = CurveModel(2)
    for _ in range(6):
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


def test_hyperparameters_stay_where_nothing_is_to_be_learnt_of(model: CurveModel) -> None:
    made = RateModel(2)
    points = np.random.default_rng(0).random((20, 2))
    made.fit(points, points[:, 1], learn=np.arange(20))
    learnt = made._process.hyperparameters
    made.fit(points[:5], points[:5, 1], learn=None)
    assert made._process.hyperparameters is learnt
    assert made.predict(points[:5])[0] == pytest.approx(points[:5, 1], abs=0.05)


def test_equal_values_are_no_trouble() -> None:
    made = RateModel(2)
    points = np.random.default_rng(0).random((4, 2))
    made.fit(points, np.full(4, 2.5), learn=np.arange(4))
    assert made.predict(points)[0] == pytest.approx(np.full(4, 2.5))


def test_the_gradient_is_that_of_the_loss() -> None:
    rng = np.random.default_rng(0)
    loss = _Loss(rng.random((12, 2)), rng.random(12), np.repeat(np.arange(4.0), 3), rng.normal(size=12))
    hyperparameters = np.log(np.array([0.4, 0.2, 0.1, 0.06, 0.01, 1.5, 1.1, 0.7, 0.3]))
    small = 1e-5 * np.eye(9)
    slopes = [(loss(hyperparameters + each)[0] - loss(hyperparameters - each)[0]) / 2e-5 for each in small]
    assert loss(hyperparameters)[1] == pytest.approx(np.array(slopes), abs=1e-5)


def test_hyperparameters_are_learnt_a_little_further_each_time() -> None:
    rng = np.random.default_rng(0)
    points = rng.random((60, 2))
    values = np.sin(9 * points[:, 0])
    made = RateModel(2)
    found = []
    for _ in range(4):
        made.fit(points, values, learn=np.arange(60))
        found.append(made._process.hyperparameters[7:])
    assert np.abs(found[1] - found[0]).max() > np.abs(found[3] - found[2]).max()
    assert found[3][0] < found[3][1] - 1  # the second feature says nothing, so its scale is long
