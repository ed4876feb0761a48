"""Workers: a reused process trains as a fresh one does, a hung one ends itself, and a faulty one
is replaced.
"""

import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.config.schema import TrialConfig
from autotune.execution.task_run import TrialTask, WorkerReport, outcome_of_death
from autotune.outcome import Outcome
from tests.support.patience import exit_code
from tests.support.records import make_trial_task

MakeTask = Callable[..., TrialTask]

_RUN_TASKS = """
import pickle, sys
from pathlib import Path
from autotune.execution.task_run import TaskRun, import_training

def run(task):
    training = TaskRun(task)
    reports = [training.next_report()]
    while reports[-1].outcome is None:
        reports.append(training.next_report())
    training.close()
    return reports

import_training()
reports = []
for task in pickle.loads(Path(sys.argv[1]).read_bytes()):
    reports.append(run(task))
    Path(sys.argv[2]).write_bytes(pickle.dumps(reports))
"""

_HANGS = """
import time

def hang():
    yield {"metric": 0.1}
    wait_for_what_never_comes()

def wait_for_what_never_comes():
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def make_task(trial_config: Callable[..., TrialConfig], folder: Path) -> MakeTask:
    def make(*overrides: str, name: str = "trial-1", **fields: Any) -> TrialTask:
        task = make_trial_task(
            trial_config("epochs=3", "target.value=0.999", *overrides), folder, name=name
        )
        return replace(task, **fields)

    return make


@pytest.fixture(autouse=True)
def _restored_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker may change its process's folder and threads; this one goes on with other tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Ran:
    """What one process made of its tasks."""

    reports: list[list[WorkerReport]]
    code: int
    seconds: float


@dataclass(frozen=True)
class Processes:
    """One process that ran ``task`` alone, and one that ran others around it and hung at last."""

    task: TrialTask
    hung: TrialTask
    fresh: Ran
    reused: Ran


@pytest.fixture(scope="module")
def processes(make_task: MakeTask, folder: Path) -> Processes:
    task = make_task("seed=11", "lr_schedule=one_cycle", "model.norm=batch")
    other = make_task(
        "seed=12",
        "optimizer=adamw",
        "batch_size=32",
        "precision=bf16",
        "model.widths=[8,16]",
        name="trial-2",
    )
    capped = make_task("seed=13", "model.norm=batch", name="trial-3", cap_seconds=0.02)
    (folder / "hanging.py").write_text(_HANGS)
    hung = make_task("allowed_targets=[hanging]", name="trial-4", deadline_seconds=1.5)
    hung = replace(hung, config=replace(hung.config, training={"_target_": "hanging.hang"}))
    began = time.monotonic()
    started = {}
    for name, tasks in {"fresh": [task], "reused": [other, task, capped, task, hung]}.items():
        (folder / f"{name}.tasks").write_bytes(pickle.dumps(tasks))
        command = [
            sys.executable,
            "-c",
            _RUN_TASKS,
            str(folder / f"{name}.tasks"),
            str(folder / f"{name}.reports"),
        ]
        started[name] = subprocess.Popen(command, start_new_session=True)
    ran = {}
    for name, process in started.items():
        code = exit_code(process)
        ran[name] = Ran(
            pickle.loads((folder / f"{name}.reports").read_bytes()), code, time.monotonic() - began
        )
    return Processes(task, hung, **ran)


def numbers(reports: list[WorkerReport]) -> list[tuple[int, float, float]]:
    return [
        (report.evaluation.step, report.evaluation.metric, report.evaluation.loss)
        for report in reports
        if report.evaluation
    ]


def test_a_reused_process_trains_as_a_fresh_one_to_the_last_bit(processes: Processes) -> None:
    [fresh], [_, second, capped, fourth] = processes.fresh.reports, processes.reused.reports
    assert len(numbers(fresh)) == 3
    assert numbers(second) == numbers(fresh)
    assert capped[-1].outcome is Outcome.CAPPED
    assert numbers(fourth) == numbers(fresh), "also after a trial that was stopped midway"
    assert [each[0].is_first_in_process for each in (fresh, *processes.reused.reports)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert len({each[0].fingerprint["sha256"] for each in (fresh, second, fourth)}) == 1


def test_a_hung_process_ends_itself_and_leaves_where_it_hung(
    processes: Processes, folder: Path
) -> None:
    assert processes.reused.code == 1
    assert processes.reused.seconds >= processes.hung.deadline_seconds
    outcome, error, _ = outcome_of_death(
        processes.hung, seconds=processes.reused.seconds, reason="the worker died"
    )
    assert outcome is Outcome.TIMED_OUT
    assert error.startswith("not ended at its deadline; the worker was ended\n")
    assert "in wait_for_what_never_comes" in error
    assert not list(folder.glob("hang-*"))
