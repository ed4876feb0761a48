"""Fresh processes on Ray: one run after another, of any size, and nothing left of one that was
interrupted.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from autotune.config.schema import TrialConfig
from autotune.confirm.runs import compiled_anew
from autotune.execution.cluster import ClusterSize
from autotune.execution.fresh import FreshProcesses, FreshRun
from autotune.execution.launcher import Launcher
from autotune.measurement import TrialResult
from tests.support.patience import is_alive, wait_until
from tests.support.records import make_trial_task

pytestmark = [pytest.mark.ray, pytest.mark.slow]


_TRAININGS = """
import os, pathlib, signal, time

def works():
    print("works")
    with open("processes", "a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\\n")
    yield {"metric": 1.0}

def kills():
    os.kill(os.getpid(), signal.SIGKILL)
    yield {"metric": 1.0}

def waits():
    yield {"metric": 0.1}
    pathlib.Path("trains.part").write_text(str(os.getpid()))
    os.replace("trains.part", "trains")
    time.sleep(600)
"""


@pytest.fixture
def make_run(trial_config: Callable[..., TrialConfig], tmp_path: Path) -> Callable[..., FreshRun]:
    (tmp_path / "trainings.py").write_text(_TRAININGS)

    def make(
        how: str | None,
        *overrides: str,
        num_cpus: int = 1,
        on_start: Callable[[], None] = lambda: None,
    ) -> FreshRun:
        config = trial_config("epochs=1", "allowed_targets=[trainings]", *overrides)
        if how is not None:
            config = replace(config, training={"_target_": f"trainings.{how}"})
        task = make_trial_task(config, tmp_path, name="confirm-0-0", num_cpus=num_cpus)
        return FreshRun(
            task=task,
            trial=7,
            values={},
            overrides=overrides,
            on_start=on_start,
            on_evaluation=lambda evaluation: None,
        )

    return make


@pytest.fixture
def processes(cluster: ClusterSize) -> Iterator[FreshProcesses]:
    with FreshProcesses(fit=cluster.holds, interrupt=threading.Event(), max_retakes=0) as processes:
        yield processes
    wait_until(lambda: ray.available_resources().get("CPU") == 3)


def train(processes: FreshProcesses, run: FreshRun) -> TrialResult:
    result = processes.train(run)
    assert result is not None
    return result


def test_the_first_compiled_run_of_a_comparison_compiles_and_later_ones_are_charged_it(
    processes: FreshProcesses, make_run: Any, tmp_path: Path
) -> None:
    run, compiled = make_run(None), make_run(None, "runtime.compile=default")
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "of-a-driver-that-was-killed").touch()
    with compiled_anew(tmp_path) as anew:
        assert anew(run.task) == run.task
        first = train(processes, replace(compiled, task=anew(compiled.task))).last
        assert len(list((tmp_path / "compiled").iterdir())) == 2, (
            "what was compiled, and its record"
        )
        again = anew(replace(compiled.task, config=replace(compiled.task.config, seed=5)))
        second = train(processes, replace(compiled, task=again)).last
    assert first is not None
    assert second is not None
    assert first.reused_build_seconds == 0
    assert 0 < second.reused_build_seconds < second.build_seconds
    assert not (tmp_path / "compiled").exists()


@pytest.mark.parametrize("own", [False, True])
def test_an_interrupt_ends_the_run_that_is_under_way(
    cluster: ClusterSize, make_run: Any, tmp_path: Path, own: bool
) -> None:
    interrupt = threading.Event()
    with (
        contextlib.closing(Launcher()) if own else contextlib.nullcontext() as launcher,
        FreshProcesses(fit=cluster.holds, interrupt=interrupt, launcher=launcher) as processes,
    ):

        def interrupt_once_it_trains() -> None:
            wait_until((tmp_path / "trains").is_file)
            interrupt.set()

        waiting = threading.Thread(target=interrupt_once_it_trains)
        waiting.start()
        assert processes.train(make_run("waits")) is None
        waiting.join()
        wait_until(lambda: not is_alive(int((tmp_path / "trains").read_text())))
        assert processes.train(make_run("works")) is None, "none begins after that"
