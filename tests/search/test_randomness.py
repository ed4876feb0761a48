"""Drawing new points: none twice in a finite space, and all of it in the end."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autotune.search.randomness import Candidates, RandomTrial, num_points, points
from autotune.space import SearchSpace

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
SPACE = SearchSpace.from_mapping(TREE, "space.yaml")


def test_every_point_of_a_finite_space_is_listed_once() -> None:
    listed = [point.key for point in points(SPACE)]
    assert len(listed) == len(set(listed)) == num_points(SPACE) == (4 + 1) * 4 * 3
    by_chance = RandomTrial(np.random.default_rng(0))
    assert {SPACE.suggest(by_chance).key for _ in range(2000)} == set(listed)


@given(seed=st.integers(0, 5), count=st.integers(1, 9))
def test_nothing_is_drawn_that_was_tried_until_all_is(seed: int, count: int) -> None:
    candidates, rng, tried = Candidates(SPACE), np.random.default_rng(seed), set()
    while not candidates.is_exhausted:
        drawn = candidates.draw(rng, count)
        assert drawn
        assert not {point.key for point in drawn} & tried
        candidates.tried(drawn[0])
        tried.add(drawn[0].key)
    assert len(tried) == num_points(SPACE)
    assert candidates.draw(rng, count) == []


def test_a_point_that_was_tried_gives_way_to_one_near_it() -> None:
    candidates, rng = Candidates(SPACE), np.random.default_rng(0)
    point = SPACE.suggest(RandomTrial(rng))
    assert candidates.in_place_of(point, rng) is point
    candidates.tried(point)
    near = candidates.in_place_of(point, rng)
    assert len(point.values.items() - near.values.items()) == 1
    candidates.forget(point)
    assert candidates.in_place_of(point, rng) is point
