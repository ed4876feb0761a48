"""The garbage collector is spared imports, not trainings."""

import gc
from collections.abc import Iterator

import pytest

from autotune.collector import collect_as_usual, spare_imports
from autotune.training.run import start_training
from tests.conftest import MakeTrialConfig


@pytest.fixture(autouse=True)
def _threshold() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_collections_are_rare_until_a_training_begins(trial_config: MakeTrialConfig) -> None:
    before = gc.get_threshold()
    spare_imports()
    assert gc.get_threshold() != before
    start_training(trial_config()).close()
    assert gc.get_threshold() == before


def test_a_threshold_of_the_users_own_is_left_alone() -> None:
    gc.set_threshold(12_345)
    collect_as_usual()
    assert gc.get_threshold()[0] == 12_345
