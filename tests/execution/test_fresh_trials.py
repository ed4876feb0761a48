"""Each trial of a user's function has a process to itself: what one leaves there, no other finds; unless a process may be reused."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from autotune.config.schema import TrialConfig
from autotune.execution.fork_server import ForkServer
from autotune.execution.task_run import TrialTask, WorkerReport
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
            training={"_target_": "leaving.train", "log": str(folder / log), "folder": str(folder / "left"), **keys},
            target=Target(metric="score", value=0.5, mode="max", max_train_seconds=1e9),
            allowed_targets=("leaving",),
        )
        (folder / "paused").mkdir(exist_ok=True)
        return make_trial_task(config, folder, name=name, state_folder=str(folder / "paused" / name), is_paused=is_paused)

    return make


@contextmanager
def worker_of(first: TrialTask, kind: type[TrialWorker] = TrialWorker) -> Iterator[Callable[..., Any]]:
    """Calls methods of a Ray worker whose first trial is given."""
    worker = ray.remote(kind).options(num_cpus=1).remote({"task": first})
    try:
        yield lambda method, *arguments: ray.get(getattr(worker, method).remote(*arguments), timeout=PATIENCE_SECONDS)
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
def server() -> Iterator[ForkServer]:
    with closing(ForkServer()) as server:
        assert server.fault() is None
        yield server


@pytest.fixture(scope="module", params=["the driver's fork server", "a worker's own"])
def calls(request: pytest.FixtureRequest, cluster: None, make_task: MakeTask, server: ForkServer, folder: Path) -> list[dict[str, Any]]:
    """What each call found: two trials one after the other, the second one paused, a third one, and the second one resumed."""
    address = server.address if request.param == "the driver's fork server" else None
    log = f"{address is None}.jsonl"

    def task(name: str, **fields: Any) -> TrialTask:
        return replace(make_task(log, f"{name}-{address is None}", **fields), fork_server=address)

    with worker_of(task("first")) as call:
        assert to_the_end(call)[-1].outcome is Outcome.MISSED
        call("reset", {"task": task("second")})
        assert call("step")["report"].can_pause
        call("save")
        call("reset", {"task": task("third")})
        assert to_the_end(call)[-1].outcome is Outcome.MISSED
        call("reset", {"task": task("second", is_paused=True)})
        assert [report.evaluation.epoch for report in to_the_end(call) if report.evaluation] == [2, 3]
    return noted(folder / log)


@pytest.mark.parametrize("what", ["model", "list", "variable", "dtype", "random", "folder"])
def test_no_trial_finds_what_another_left(calls: list[dict[str, Any]], what: str) -> None:
    found = [call["found"][what] for call in calls]
    assert found == found[:1] * len(found)


def test_each_trial_calls_the_function_once_in_a_process_of_its_own(calls: list[dict[str, Any]]) -> None:
    assert [call["epoch"] for call in calls] == [0, 0, 0, 1]


def test_a_resumed_trial_has_another_process_too(calls: list[dict[str, Any]]) -> None:
    assert len({call["process"] for call in calls}) == 4


def test_a_process_that_may_be_reused_is_warmed_up_once_and_keeps_its_state(
    cluster: None, make_task: MakeTask, server: ForkServer, folder: Path
) -> None:
    first, second = (
        replace(make_task("reused.jsonl", name, _reuse_process_=True), fork_server=server.address) for name in ("first", "second")
    )
    with worker_of(first) as call:
        to_the_end(call)
        call("reset", {"task": second})
        to_the_end(call)
    calls = noted(folder / "reused.jsonl")
    assert [call["found"]["list"] for call in calls] == [0, 1, 2], "a call that does not count, and two trials"
    assert len({call["process"] for call in calls}) == 1


def test_a_worker_that_cannot_fork_is_replaced_after_each_trial(cluster: None, make_task: MakeTask) -> None:
    class Unforkable(TrialWorker):
        def _fork_address(self, task: TrialTask) -> str | None:
            return None

    with worker_of(make_task("unforkable.jsonl", "unforkable"), Unforkable) as call:
        steps = [call("step") for _ in range(4)]
        assert [step["report"].can_pause for step in steps] == [False] * 4, "its next trial would be in the same process"
        assert [step["is_unfit"] for step in steps] == [False, False, False, True]
        with pytest.raises(RuntimeError, match="this worker is replaced"):
            call("step")


_LEAKING = """
import os
import autotune

leaked = []

def fit(lr=0.1):
    leaked.append(bytearray(os.urandom(1 << 20)) * 10)
    autotune.report(lr)

autotune.tune(
    fit, space={"lr": autotune.uniform(0, 0.5)}, target=autotune.target("score", at_least=1, max_seconds=60), trials=200, name="leaking",
    search="random", stopping="none", confirm="none", tracking="none", cluster={"num_cpus": 2},
)
"""


def test_two_hundred_trials_that_leak_leave_no_process_larger(commands: Any, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_LEAKING)
    rows, began, largest = tmp_path / "outputs/leaking/trials.csv", {}, 0
    with (tmp_path / "out").open("w") as out:
        study = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, env=commands.environment, stdout=out, stderr=out)
    while study.poll() is None:
        time.sleep(0.1)
        if not rows.is_file() or rows.read_text().count("\n") < 2:  # no trial has ended
            continue
        with suppress(psutil.NoSuchProcess):
            for process in [psutil.Process(study.pid), *psutil.Process(study.pid).children(recursive=True)]:
                size = process.memory_info().rss
                largest = max(largest, size - began.setdefault((process.pid, process.create_time()), size))
    assert study.returncode == 0, (tmp_path / "out").read_text()
    assert rows.read_text().count("\n") == 201
    assert largest < 400 << 20
