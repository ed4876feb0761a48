"""Points as numbers, and drawn: none twice in a finite space, and all of it in the end."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.search.points import (
    Candidates,
    NearbyTrial,
    RandomTrial,
    UnitCube,
    num_points,
    points,
)
from autotune.space import SearchSpace, Suggestion

SPACE = SearchSpace.from_mapping(
    {
        "optimizer": {
            "type": "choice",
            "choices": {
                "sgd": {"lr": {"type": "float", "low": 1e-4, "high": 1.0, "log": True}},
                "adamw": {"lr": [0.1, 0.001, 0.01]},
            },
        },
        "batch_size": {"type": "power_of_two", "low": 16, "high": 256},
        "epochs": {"type": "int", "low": 1, "high": 5},
        "fixed": {"type": "int", "low": 3, "high": 3},
    },
    "space.yaml",
)
SGD = Suggestion({"optimizer": "sgd", "lr": 1e-2, "batch_size": 64, "epochs": 2, "fixed": 3})
ADAMW = Suggestion({"optimizer": "adamw", "lr": 0.1, "batch_size": 256, "epochs": 5, "fixed": 3})


def test_numbers_lie_in_the_unit_cube_in_log_where_the_space_says_so() -> None:
    cube = UnitCube(SPACE)
    encoded = cube.encode([SGD, ADAMW])
    assert cube.num_options == [2, 0, 0, 0, 0, 0]
    assert encoded[0] == pytest.approx([0, 0.5, np.nan, 0.5, 0.25, 0.5], nan_ok=True)
    assert encoded[1] == pytest.approx([1, np.nan, 1.0, 1.0, 1.0, 0.5], nan_ok=True)


def test_features_have_no_gaps_and_categories_lie_one_apart() -> None:
    cube = UnitCube(SPACE)
    features = cube.features([SGD, ADAMW])
    assert features.shape == (2, cube.num_features)
    assert np.linalg.norm(features[0, :2] - features[1, :2]) == pytest.approx(1, abs=0.02)
    # the fourth is the rate of the branch that is not open
    assert features[0] == pytest.approx([0.7, 0, 0.5, 0.5, 0.5, 0.25, 0.5])
    assert features[1] == pytest.approx([0, 0.7, 0.5, 1, 1, 1, 0.5])
    assert UnitCube(SearchSpace({})).features([SGD, ADAMW]).shape == (2, 0)


TREE: dict[str, Any] = {
    "optimizer": {
        "type": "choice",
        "choices": {
            "sgd": {"momentum": {"type": "float", "low": 0.0, "high": 0.9, "step": 0.3}},
            "adamw": {},
        },
    },
    "size": {"type": "power_of_two", "low": 8, "high": 64},
    "layers": {"type": "int", "low": 1, "high": 6, "step": 2},
}
FINITE = SearchSpace.from_mapping(TREE, "space.yaml")


def test_every_point_of_a_finite_space_is_listed_once() -> None:
    listed = [point.key for point in points(FINITE)]
    assert len(listed) == len(set(listed)) == num_points(FINITE) == (4 + 1) * 4 * 3
    by_chance = RandomTrial(np.random.default_rng(0))
    assert {FINITE.suggest(by_chance).key for _ in range(2000)} == set(listed)


@given(seed=st.integers(0, 5), count=st.integers(1, 9))
def test_nothing_is_drawn_that_was_tried_until_all_is(seed: int, count: int) -> None:
    candidates, rng, tried = Candidates(FINITE), np.random.default_rng(seed), set()
    while not candidates.is_exhausted:
        drawn = candidates.draw(rng, count)
        assert drawn
        assert not {point.key for point in drawn} & tried
        candidates.tried(drawn[0])
        tried.add(drawn[0].key)
    assert len(tried) == num_points(FINITE)
    assert candidates.draw(rng, count) == []


def test_a_point_that_was_tried_gives_way_to_one_near_it() -> None:
    candidates, rng = Candidates(FINITE), np.random.default_rng(0)
    point = FINITE.suggest(RandomTrial(rng))
    assert candidates.in_place_of(point, rng) is point
    candidates.tried(point)
    near = candidates.in_place_of(point, rng)
    assert len(point.values.items() - near.values.items()) == 1
    candidates.forget(point)
    assert candidates.in_place_of(point, rng) is point


@given(st.integers(0, 2**32 - 1))
def test_points_drawn_near_another_keep_about_half_of_it_and_lie_in_the_space(seed: int) -> None:
    rng = np.random.default_rng(seed)
    point = FINITE.suggest(RandomTrial(rng))
    near = NearbyTrial(rng, FINITE.params_of(point))
    drawn = [FINITE.suggest(near) for _ in range(8)]
    assert all(FINITE.point_of(each.values.__getitem__) == each for each in drawn)


def test_half_of_the_candidates_lie_near_the_points_that_are_given() -> None:
    cube = UnitCube(SPACE)
    drawn = Candidates(SPACE).draw(np.random.default_rng(0), 400, [SGD])
    assert SGD not in drawn
    distances = np.linalg.norm(cube.features(drawn) - cube.features([SGD]), axis=1)
    by_chance = cube.features(Candidates(SPACE).draw(np.random.default_rng(0), 400))
    at_random = np.linalg.norm(by_chance - cube.features([SGD]), axis=1)
    near = np.quantile(at_random, 0.2)
    assert 0.4 < (distances < near).mean() < 0.7
    # a branch that the point does not open is drawn at random
    rates = {point.values["lr"] for point in drawn if point.values["optimizer"] == "adamw"}
    assert rates == {0.1, 0.001, 0.01}
