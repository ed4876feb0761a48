"""Points as numbers."""

import numpy as np
import pytest

from autotune.search.encoding import UnitCube
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
    features = cube.features(cube.encode([SGD, ADAMW]))
    assert features.shape == (2, cube.num_features)
    assert np.linalg.norm(features[0, :2] - features[1, :2]) == pytest.approx(1, abs=0.02)
    # the fourth is the rate of the branch that is not open
    assert features[0] == pytest.approx([0.7, 0, 0.5, 0.5, 0.5, 0.25, 0.5])
    assert features[1] == pytest.approx([0, 0.7, 0.5, 1, 1, 1, 0.5])
    assert UnitCube(SearchSpace({})).features(np.zeros((2, 0))).shape == (2, 0)
