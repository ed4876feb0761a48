"""Learning which points can be trained."""

import numpy as np

from autotune.search.trial_history import FeasibilityModel


def test_before_a_point_failed_every_one_is_feasible() -> None:
    model = FeasibilityModel(2)
    assert (model.log_chances(np.random.default_rng(0).random((5, 2))) == 0).all()
    model.add("one", np.array([0.2, 0.2]), is_feasible=True)
    assert (model.log_chances(np.random.default_rng(0).random((5, 2))) == 0).all()


def test_half_a_space_that_fails_is_told_from_the_other() -> None:
    rng = np.random.default_rng(0)
    model = FeasibilityModel(3)
    for index, point in enumerate(rng.random((40, 3))):
        model.add(str(index), point, is_feasible=bool(point[0] < 0.5))
    points = rng.random((200, 3))
    chances = np.exp(model.log_chances(points))
    clear = np.abs(points[:, 0] - 0.5) > 0.15
    assert chances[clear & (points[:, 0] < 0.5)].mean() > 0.8
    assert chances[clear & (points[:, 0] > 0.5)].mean() < 0.25
    assert (chances > 0).all(), "none is given up for good"


def test_a_trial_that_diverges_later_is_no_longer_feasible() -> None:
    model = FeasibilityModel(1)
    model.add("other", np.array([0.9]), is_feasible=True)
    model.add("trial", np.array([0.1]), is_feasible=True)
    model.add("trial", np.array([0.1]), is_feasible=False)
    chances = model.log_chances(np.array([[0.1], [0.9]]))
    assert chances[0] < np.log(0.5) < chances[1]
