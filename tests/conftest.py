"""What several test folders share: configurations of tiny trainings, and tests that need a GPU."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import settings

from autotune.config.compose import Composer
from autotune.config.schema import TrialConfig

MakeTrialConfig = Callable[..., TrialConfig]

gc.set_threshold(100_000, 20, 50)  # torch and MLflow hold much that is walked at every collection, and never freed
settings.register_profile("shared", deadline=None)  # a busy machine makes no test fail
settings.load_profile("shared")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of the execution layer count as Ray tests: what does not start it plans whole studies or starts processes."""
    for item in items:
        if "execution" in item.path.parts:
            item.add_marker("ray")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch  # the tests of other parts do without its second and a half

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and torch sees none here")


@cache
def _composed(overrides: tuple[str, ...]) -> TrialConfig:
    return Composer(["experiment=cnn", "device=cpu", "runtime.num_threads=1", *overrides]).compose().trial


@pytest.fixture(scope="session")
def trial_config() -> MakeTrialConfig:
    """Makes the configuration of one training on the CPU: of overrides, then of fields replaced as they are."""

    def make(*overrides: str, **fields: Any) -> TrialConfig:
        return replace(_composed(overrides), **fields)

    return make
