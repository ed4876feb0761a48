"""What several test folders share: configurations of tiny trainings, and tests that need a GPU."""

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hypothesis import settings
from omegaconf import DictConfig

from autotune.config.compose import Composer
from autotune.config.schema import TrialConfig
from autotune.measurement import Evaluation
from tests.support.served import Server, served

MakeTrialConfig = Callable[..., TrialConfig]

# torch reads it as it is imported: more threads than cores wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
# tests beside each other are contention, and count trials
os.environ.setdefault("AUTOTUNE_MAX_RETAKES", "0")

# torch and MLflow hold much that is walked at every collection, and never freed
gc.set_threshold(100_000, 20, 50)
settings.register_profile("shared", deadline=None)  # a busy machine makes no test fail
settings.load_profile("shared")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the execution layer, of stores and commands, and slow ones count as Ray tests:
    without them it is seconds.
    """
    for item in items:
        if "execution" in item.path.parts or any(
            map(item.get_closest_marker, ("store", "command", "slow"))
        ):
            item.add_marker("ray")


def pytest_collection_finish() -> None:
    """What was imported is not walked by the collection of garbage before each training."""
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where no Ray test is asked for, folders of nothing else are not even imported: with MLflow
    that takes seconds.
    """
    return (
        True
        if config.option.markexpr == "not ray" and collection_path.name in ("execution", "tracking")
        else None
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    gc.freeze()  # nor is what earlier tests keep
    if item.get_closest_marker("gpu") is None:
        return
    import torch  # the tests of other parts do without its second and a half

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and torch sees none here")


@pytest.fixture(scope="session", autouse=True)
def _hydra_composes_once() -> Iterator[None]:
    """Hydra takes a tenth of a second to compose the same files again: what it made of them is
    kept.
    """
    made: dict[tuple[Any, ...], DictConfig] = {}

    def compose_once(config_name: str, overrides: list[str], **settings: Any) -> DictConfig:
        key = (tuple(overrides), str(ConfigStore.instance().repo))
        if key not in made:
            made[key] = hydra.compose(config_name, overrides, **settings)
        return made[key].copy()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("autotune.config.config_files.compose", compose_once)
        yield


@cache
def _composed(overrides: tuple[str, ...]) -> TrialConfig:
    return (
        Composer(["experiment=cnn", "device=cpu", "runtime.num_threads=1", *overrides])
        .compose()
        .trial
    )


@pytest.fixture(scope="session")
def trial_config() -> MakeTrialConfig:
    """Makes the configuration of one training on the CPU: of overrides, then of fields replaced
    as they are.
    """

    def make(*overrides: str, **fields: Any) -> TrialConfig:
        return replace(_composed(overrides), **fields)

    return make


@pytest.fixture
def check_pauses(tmp_path: Path) -> Callable[[Callable[[str], TrialConfig]], list[Evaluation]]:
    """Asserts that a training is as if it had not been paused, if it is paused at each report where
    it can be, and continued anew.

    It takes what gives the training's configuration, for a folder of its own: once for the whole
    training, once for the paused one, whose evaluations it returns.
    """
    from autotune.session import is_pausable
    from autotune.training.run import start_training  # the tests of other parts do without torch
    from autotune.training.states import TrainingStates

    def paused_everywhere(config: TrialConfig) -> tuple[list[Evaluation], int]:
        evaluations: list[Evaluation] = []
        num_pauses, is_paused = 0, True
        while is_paused:
            is_paused = False
            training = start_training(config, states=TrainingStates(tmp_path / "states"))
            for evaluation in training:
                evaluations.append(evaluation)
                if is_pausable():
                    training.send(True)
                    training.close()
                    is_paused, num_pauses = True, num_pauses + 1
                    break
        return evaluations, num_pauses

    def check(config: Callable[[str], TrialConfig]) -> list[Evaluation]:
        whole = list(start_training(config("whole")))
        paused, num_pauses = paused_everywhere(config("paused"))
        assert num_pauses >= 2
        keys = ("step", "epoch", "metric", "metrics")
        assert [[getattr(evaluation, key) for key in keys] for evaluation in paused] == [
            [getattr(evaluation, key) for key in keys] for evaluation in whole
        ]
        seconds = [evaluation.train_seconds for evaluation in paused]
        assert seconds == sorted(seconds)
        return paused

    return check


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that fetched files go to."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("AUTOTUNE_CACHE", str(folder))
    return folder


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[str]:
    """The URL of an empty folder of fsspec's file system in memory."""
    import fsspec

    url = f"memory://{tmp_path.name}"
    yield url
    filesystem = fsspec.filesystem("memory")
    for path in filesystem.find(url):
        filesystem.rm_file(path)
    filesystem.pseudo_dirs[:] = [""]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A web server of an empty folder."""
    with served(tmp_path / "served") as running:
        yield running
