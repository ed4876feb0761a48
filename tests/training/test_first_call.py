"""What is counted of a training function's first call in a process.

A clock of the tests' own tells.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.config.schema import TrialConfig
from autotune.measurement import Evaluation, Target
from autotune.training.run import start_training
from autotune.training.user_training import TrainingClock

MakeConfig = Callable[..., TrialConfig]
IMPORT, SET_UP, STEPS = 1_000.0, 100.0, 10.0
"""Seconds by the tests' clock: of an import, of what is set up in a first call, and of training."""


@dataclass
class Process:
    """What is told of a process: its clock, in place of the ``time`` module, and what the
    functions below did.
    """

    now: float = 0.0
    num_calls: int = 0
    is_set_up: bool = False

    def perf_counter(self) -> float:
        return self.now


PROCESS = Process()

MODULE = f"""
import sys
from {{inner}} import nothing
sys.modules["{__name__}"].PROCESS.now += {IMPORT}
"""


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Process]:
    """A process in which no training function was called, and two modules, one of which imports
    the other, were not imported.
    """
    PROCESS.__dict__.update(vars(Process()))
    monkeypatch.setattr("autotune.measurement.time", PROCESS)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "inner_library.py").write_text(
        f"import sys\nnothing = None\nsys.modules[{__name__!r}].PROCESS.now += {IMPORT}\n"
    )
    (tmp_path / "library.py").write_text(MODULE.format(inner="inner_library"))
    importlib.invalidate_caches()
    finders = [*sys.meta_path]
    yield PROCESS
    assert sys.meta_path == finders, "nothing is left where modules are imported"
    for name in ("library", "inner_library"):
        sys.modules.pop(name, None)


def lazy(report: Callable[..., None], clock: TrainingClock, num_evaluations: int = 2) -> None:
    """Imports a library and sets something up when it is first called, and trains."""
    PROCESS.num_calls += 1
    import library  # noqa: F401  # one of the fixture's

    if not PROCESS.is_set_up:
        PROCESS.is_set_up = True
        PROCESS.now += SET_UP
    for _ in range(num_evaluations):
        PROCESS.now += STEPS
        with clock.evaluating():
            PROCESS.now += 3
        report(0.25)


@pytest.fixture
def own(trial_config: MakeConfig) -> MakeConfig:
    """Makes configurations of a training function here that never reaches its target."""

    def make(function: Callable[..., Any], **arguments: Any) -> TrialConfig:
        return trial_config(
            training={"_target_": f"{__name__}.{function.__name__}", **arguments},
            target=Target(metric="score", value=0.5, mode="max", max_train_seconds=1e9),
            allowed_targets=(__name__,),
        )

    return make


def last(config: TrialConfig) -> Evaluation:
    return list(start_training(config))[-1]


def test_a_function_is_called_once_and_its_imports_are_build(own: MakeConfig) -> None:
    first, *others = (last(own(lazy)) for _ in range(3))
    assert (first.train_seconds, first.evaluate_seconds) == (2 * STEPS + SET_UP, 6)
    assert [each.train_seconds for each in others] == [2 * STEPS] * 2
    assert [each.build_seconds for each in (first, *others)] == [2 * IMPORT, 0, 0]
    assert PROCESS.num_calls == 3


def test_imports_of_installed_libraries_are_paid_by_no_training(
    own: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.training.user_training._LIBRARY_FOLDERS", (str(tmp_path),))
    first, *others = (last(own(lazy)) for _ in range(3))
    assert [each.build_seconds for each in (first, *others)] == [0] * 3
    assert [each.train_seconds for each in (first, *others)] == [
        2 * STEPS + SET_UP,
        2 * STEPS,
        2 * STEPS,
    ]
