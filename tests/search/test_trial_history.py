"""Learning which points can be trained."""

import numpy as np

from autotune.search.trial_history import FeasibilityModel


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
