"""Fresh processes: one run after another, and nothing left of one that was interrupted."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.config.command_line import Interrupt
from autotune.config.schema import TrialConfig
from autotune.confirm.runs import compiled_anew
from autotune.contention import Contention
from autotune.execution.fresh import FreshProcesses
from autotune.execution.launcher import Launcher
from autotune.execution.task import TrialTask, WorkerReport
from autotune.measurement import Evaluation
from autotune.outcome import Outcome
from tests.support.patience import is_alive, wait_until
from tests.support.records import make_evaluation, make_trial_task
from tests.support.tracked import make_run

_TRAININGS = """
import os, pathlib, time

def works():
    yield {"metric": 1.0}

def waits():
    yield {"metric": 0.1}
    pathlib.Path("trains.part").write_text(str(os.getpid()))
    os.replace("trains.part", "trains")
    time.sleep(600)
"""


MakeTask = Callable[..., TrialTask]
TRACKED = make_run()[0]


@pytest.fixture
def make_task(trial_config: Callable[..., TrialConfig], tmp_path: Path) -> MakeTask:
    (tmp_path / "trainings.py").write_text(_TRAININGS)

    def make(*overrides: str, how: str | None = None) -> TrialTask:
        config = trial_config("epochs=1", "allowed_targets=[trainings]", *overrides)
        if how is not None:
            config = replace(config, training={"_target_": f"trainings.{how}"})
        return make_trial_task(config, tmp_path, name="confirm-7-0", num_cpus=1)

    return make


@pytest.mark.slow
def test_the_first_compiled_run_of_a_comparison_compiles_and_later_ones_are_charged_it(
    make_task: MakeTask, tmp_path: Path
) -> None:
    def trained(task: TrialTask) -> Evaluation:
        result = processes.train(task, TRACKED)
        assert result is not None
        assert result.last is not None
        return result.last

    eager, compiled = make_task(), make_task("runtime.compile=default")
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "of-a-driver-that-was-killed").touch()
    with contextlib.closing(Launcher()) as launcher, compiled_anew(tmp_path) as anew:
        processes = FreshProcesses(interrupt=Interrupt(), max_retakes=0, launcher=launcher)
        assert anew(eager) == eager
        first = trained(anew(compiled))
        assert len(list((tmp_path / "compiled").iterdir())) == 2, (
            "what was compiled, and its record"
        )
        second = trained(anew(replace(compiled, config=replace(compiled.config, seed=5))))
    assert first.reused_build_seconds == 0
    assert 0 < second.reused_build_seconds < second.build_seconds
    assert not (tmp_path / "compiled").exists()


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_an_interrupt_ends_the_run_that_is_under_way(
    cluster: Any, make_task: MakeTask, tmp_path: Path, own: bool
) -> None:
    interrupt = Interrupt()
    with contextlib.closing(Launcher()) if own else contextlib.nullcontext() as launcher:
        processes = FreshProcesses(interrupt=interrupt, launcher=launcher)

        def interrupt_once_it_trains() -> None:
            wait_until((tmp_path / "trains").is_file)
            interrupt.set()

        waiting = threading.Thread(target=interrupt_once_it_trains)
        waiting.start()
        assert processes.train(make_task(how="waits"), TRACKED) is None
        waiting.join()
        wait_until(lambda: not is_alive(int((tmp_path / "trains").read_text())))
        assert processes.train(make_task(how="works"), TRACKED) is None, "none begins after that"


@pytest.mark.parametrize(("train_seconds", "num_runs"), [(2.0, [3, 1]), (7200.0, [1, 1, 1])])
def test_a_run_whose_times_are_spoilt_is_made_again_if_it_is_short(
    make_task: MakeTask, train_seconds: float, num_runs: list[int]
) -> None:
    class Spoilt(FreshProcesses):
        def _trained_once(self, run: Any, *_: Any) -> WorkerReport:
            made.append(train_seconds)
            last = WorkerReport(
                evaluation=make_evaluation(train_seconds, outcome=Outcome.REACHED),
                outcome=Outcome.REACHED,
                contention=Contention(
                    seconds=train_seconds,
                    stopped_seconds=train_seconds / 2,
                    waited_seconds=0.0,
                    others_cpu_seconds=0.0,
                    study_cpu_seconds=0.0,
                ),
            )
            run.reported(last)
            run.curve.add(last.evaluation)
            return last

    processes = Spoilt(interrupt=Interrupt())
    for expected in num_runs:
        made: list[float] = []
        result = processes.train(make_task(), TRACKED)
        assert result is not None
        assert "was stopped" in str(result.contention)
        assert len(made) == expected, "after three in vain, the machine is always that busy"
