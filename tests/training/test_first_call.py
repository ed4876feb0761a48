"""What a process pays once for a training function, and how often it calls it; a clock of the tests' own tells."""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Target
from autotune.training.run import check_training, start_training
from autotune.training.user_training import TrainingClock

MakeConfig = Callable[..., TrialConfig]
IMPORT, SET_UP, STEPS = 1_000.0, 100.0, 10.0
"""Seconds by the tests' clock: of an import, of what is set up in a first call, and of training."""


@dataclass
class Process:
    """What is told of a process: its clock, in place of the ``time`` module, and what the functions below did."""

    now: float = 0.0
    calls: list[dict[str, Any]] = field(default_factory=list)
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
    """A process in which no training function was called, and two modules, one of which imports the other, were not imported."""
    PROCESS.__dict__.update(vars(Process()))
    monkeypatch.setattr("autotune.measurement.time", PROCESS)
    monkeypatch.setattr("autotune.training.first_call._paid", {})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "inner_library.py").write_text(f"import sys\nnothing = None\nsys.modules[{__name__!r}].PROCESS.now += {IMPORT}\n")
    (tmp_path / "library.py").write_text(MODULE.format(inner="inner_library"))
    importlib.invalidate_caches()
    untouched = importlib._bootstrap._find_and_load
    yield PROCESS
    assert importlib._bootstrap._find_and_load is untouched, "nothing is left where modules are imported"
    for name in ("library", "inner_library"):
        sys.modules.pop(name, None)


def lazy(report: Callable[..., None], clock: TrainingClock, num_evaluations: int = 2) -> None:
    """Imports a library and sets something up when it is first called, and trains."""
    PROCESS.calls.append(
        {"random": (float(torch.rand(1)), float(np.random.rand())), "threads": torch.get_num_threads(), "folder": Path.cwd()}
    )
    import library  # noqa: F401  # one of the fixture's

    if not PROCESS.is_set_up:
        PROCESS.is_set_up = True
        PROCESS.now += SET_UP
    for _ in range(num_evaluations):
        PROCESS.now += STEPS
        with clock.evaluating():
            PROCESS.now += 3
        report(0.25)


def lazy_generator(clock: TrainingClock, num_evaluations: int = 2) -> Iterator[Mapping[str, Any]]:
    said: list[Mapping[str, Any]] = []
    lazy(lambda metric: said.append({"metric": metric}), clock, 1)
    yield said[0]
    for _ in range(num_evaluations - 1):
        PROCESS.now += STEPS
        with clock.evaluating():
            PROCESS.now += 3
        yield {"metric": 0.25}


def careless(report: Callable[..., None], folder: str) -> None:
    """Leaves much behind."""
    lazy(lambda metric: None, TrainingClock.__new__(TrainingClock), 0)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_default_dtype(torch.float64)
    os.chdir(folder)
    report(0.25)


def stepping(report: Callable[..., None]) -> None:
    """Reports after many steps."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    PROCESS.calls.append({"steps": 0})
    for _ in range(20):
        parameter.sum().backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        PROCESS.calls[-1]["steps"] += 1
    report(0.25)


def failing(report: Callable[..., None]) -> None:
    raise ZeroDivisionError("the batch was empty")


def importing_aside(report: Callable[..., None]) -> None:
    """Imports in a thread of its own, as what loads data may."""
    thread = threading.Thread(target=importlib.import_module, args=("library",))
    thread.start()
    thread.join()
    report(0.25)


def importing_late(report: Callable[..., None]) -> None:
    report(0.25)
    importlib.import_module("library")
    PROCESS.now += STEPS
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


both_kinds = pytest.mark.parametrize("function", [lazy, lazy_generator])


@both_kinds
def test_a_function_is_called_once_and_its_imports_are_build(own: MakeConfig, function: Callable[..., Any]) -> None:
    first, *others = (last(own(function)) for _ in range(3))
    assert (first.train_seconds, first.evaluate_seconds) == (2 * STEPS + SET_UP, 6)
    assert [each.train_seconds for each in others] == [2 * STEPS] * 2
    assert [each.build_seconds for each in (first, *others)] == [2 * IMPORT] * 3
    assert len(PROCESS.calls) == 3


@both_kinds
def test_a_process_that_is_reused_calls_it_once_before_it_counts(own: MakeConfig, function: Callable[..., Any]) -> None:
    for _ in range(3):
        ended = last(own(function, _reuse_process_=True))
        assert (ended.train_seconds, ended.evaluate_seconds) == (2 * STEPS, 6)
        assert ended.build_seconds == 2 * IMPORT + SET_UP + STEPS + 3, "all of the first call, up to its first report"
    assert len(PROCESS.calls) == 4


@both_kinds
@pytest.mark.parametrize("reuse", [True, False])
def test_imports_of_installed_libraries_are_paid_by_no_training(
    own: MakeConfig, function: Callable[..., Any], reuse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.training.first_call._LIBRARY_FOLDERS", (str(tmp_path),))
    first, *others = (last(own(function, _reuse_process_=reuse)) for _ in range(3))
    assert [each.build_seconds for each in (first, *others)] == [SET_UP + STEPS + 3 if reuse else 0] * 3
    assert [each.train_seconds for each in (first, *others)] == [2 * STEPS + (0 if reuse else SET_UP), 2 * STEPS, 2 * STEPS]


def test_the_call_that_counts_starts_where_the_other_one_did(own: MakeConfig, tmp_path: Path) -> None:
    last(own(careless, folder=str(tmp_path), _reuse_process_=True))
    thrown_away, counted = PROCESS.calls
    assert thrown_away == counted
    assert torch.get_default_dtype() is torch.float64, "as that one left it"
    torch.set_default_dtype(torch.float32)
    os.chdir(counted["folder"])


def test_a_call_that_does_not_count_is_ended_at_a_step_where_it_does_not_report(own: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.training.first_call.MAX_STEP_SECONDS", -1.0)
    assert last(own(stepping, _reuse_process_=True)).metric == 0.25
    assert [each["steps"] for each in PROCESS.calls] == [0, 20], "the step that ends it is not left"


def test_an_error_of_the_call_that_does_not_count_is_that_of_the_training(own: MakeConfig) -> None:
    with pytest.raises(ZeroDivisionError, match="the batch was empty"):
        last(own(failing, _reuse_process_=True))


def test_imports_of_other_threads_are_not_told_apart(own: MakeConfig) -> None:
    ended = last(own(importing_aside))
    assert (ended.build_seconds, ended.train_seconds) == (0, 2 * IMPORT)


def test_imports_after_the_first_report_are_build_too(own: MakeConfig) -> None:
    for _ in range(2):
        ended = last(own(importing_late))
        assert (ended.build_seconds, ended.train_seconds) == (2 * IMPORT, STEPS)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("_reuse_process_", "never", r"^training\._reuse_process_: found 'never', accepted are true, false$"),
        ("_warm_up_", False, r"^training\._warm_up_: is gone, .*; accepted is _reuse_process_: true, "),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused_before_anything_runs(own: MakeConfig, key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_training(own(lazy, **{key: value}))
    assert PROCESS.calls == []


@pytest.mark.parametrize("key", ["_reuse_process_", "_command_"])
def test_who_may_share_a_process_says_so(own: MakeConfig, trial_config: MakeConfig, key: str) -> None:
    assert own(lazy).needs_fresh_process
    assert not own(lazy, **{key: True}).needs_fresh_process
    assert not trial_config(training={"_target_": "autotune.script.run"}).needs_fresh_process
    assert not trial_config().needs_fresh_process
