"""Each trial of a user's function has a process to itself: what one leaves there, no other finds.

Unless a process may be reused.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from autotune.config.schema import TrialConfig
from autotune.execution.launcher import Launcher
from autotune.execution.task import TrialTask, WorkerReport
from autotune.execution.worker import TrialWorker
from autotune.measurement import Target
from autotune.outcome import Outcome
from tests.support.patience import PATIENCE_SECONDS
from tests.support.records import make_trial_task

pytestmark = [pytest.mark.ray, pytest.mark.slow]

_LEAVING = """
import json, os, random
import torch
import autotune

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
seen, dice = [], random.Random(0)

def train(log, folder):
    found = {
        "model": model.weight.item(),
        "list": len(seen),
        "variable": os.environ.get("LEFT_BEHIND"),
        "dtype": str(torch.get_default_dtype()),
        "random": dice.random(),
        "folder": os.getcwd(),
    }
    begun = autotune.checkpoint().load().get("epoch", 0)
    with open(log, "a") as file:
        file.write(json.dumps({"found": found, "process": os.getpid(), "epoch": begun}) + "\\n")
    torch.nn.init.ones_(model.weight)
    seen.append(bytearray(1 << 20))
    os.environ["LEFT_BEHIND"] = "yes"
    torch.set_default_dtype(torch.float64)
    os.chdir(folder)
    for epoch in range(begun, 3):
        autotune.checkpoint().save({"epoch": epoch + 1})
        autotune.report(epoch / 100, epoch=epoch + 1)
"""


MakeTask = Callable[..., TrialTask]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fresh")
    (folder / "leaving.py").write_text(_LEAVING)
    (folder / "left").mkdir()
    return folder


@pytest.fixture(scope="module")
def make_task(trial_config: Callable[..., TrialConfig], folder: Path) -> MakeTask:
    def make(log: str, name: str, *, is_paused: bool = False, **keys: Any) -> TrialTask:
        config = trial_config(
            training={
                "_target_": "leaving.train",
                "log": str(folder / log),
                "folder": str(folder / "left"),
                **keys,
            },
            target=Target(metric="score", value=0.5, mode="max", max_train_seconds=1e9),
            allowed_targets=("leaving",),
        )
        (folder / "paused").mkdir(exist_ok=True)
        return make_trial_task(
            config,
            folder,
            name=name,
            state_folder=str(folder / "paused" / name),
            is_paused=is_paused,
        )

    return make


@contextmanager
def worker_of(
    first: TrialTask, kind: type[TrialWorker] = TrialWorker
) -> Iterator[Callable[..., Any]]:
    """Calls methods of a Ray worker whose first trial is given."""
    worker = ray.remote(kind).options(num_cpus=1).remote({"task": first})
    try:
        yield lambda method, *arguments: ray.get(
            getattr(worker, method).remote(*arguments), timeout=PATIENCE_SECONDS
        )
    finally:
        ray.kill(worker)


def to_the_end(call: Callable[..., Any]) -> list[WorkerReport]:
    reports: list[WorkerReport] = [call("step")["report"]]
    while reports[-1].outcome is None:
        reports.append(call("step")["report"])
    return reports


def noted(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with closing(Launcher()) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def calls(
    cluster: None,
    make_task: MakeTask,
    launcher: Launcher,
    folder: Path,
) -> list[dict[str, Any]]:
    """What each call found: two trials one after the other, the second one paused, a third one,
    and the second one resumed.
    """
    log = "calls.jsonl"

    def task(name: str, **fields: Any) -> TrialTask:
        return replace(make_task(log, name, **fields), launcher=launcher.address)

    with worker_of(task("first")) as call:
        assert to_the_end(call)[-1].outcome is Outcome.MISSED
        call("reset", {"task": task("second")})
        assert call("step")["report"].can_pause
        call("save")
        call("reset", {"task": task("third")})
        assert to_the_end(call)[-1].outcome is Outcome.MISSED
        call("reset", {"task": task("second", is_paused=True)})
        assert [report.evaluation.epoch for report in to_the_end(call) if report.evaluation] == [
            2,
            3,
        ]
    return noted(folder / log)


def test_each_trial_has_a_process_to_itself_and_finds_nothing_of_another(
    calls: list[dict[str, Any]],
) -> None:
    assert [call["found"] for call in calls] == [calls[0]["found"]] * 4
    assert [call["epoch"] for call in calls] == [
        0,
        0,
        0,
        1,
    ], "one call a trial, and one more for the resumed one"
    assert len({call["process"] for call in calls}) == 4
