"""The watch of a training: a stop is seen and moves the deadline, hogs are seen, and what hangs
is ended.
"""

import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.config.schema import COMMAND, TrialConfig
from autotune.contention import Contention
from autotune.execution import watchdog
from autotune.execution.process_group import ProcessGroup
from autotune.execution.task import TrialTask, WorkerReport
from autotune.execution.watchdog import Watchdog
from autotune.outcome import Outcome
from tests.support.nvml import Driver, Gpu
from tests.support.records import make_trial_task

STOPPED_SECONDS = 12.0
_HOG = "while True: pass"

_TRAININGS = """
import os, pathlib, time

def computes(seconds):
    # So much computing, by the CPU's own clock: it takes longer where it has to wait.
    pathlib.Path("trains.part").write_text(str(os.getpid()))
    os.replace("trains.part", "trains")
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    yield {"metric": 1.0}

def computes_in_the_second_rank(seconds):
    if os.environ["RANK"] == "1":
        next(computes(seconds))
        pathlib.Path("computed").touch()
    while not pathlib.Path("computed").exists():
        time.sleep(0.1)
    yield {"metric": 1.0}
"""


@pytest.fixture
def make_task(trial_config: Callable[..., TrialConfig], tmp_path: Path) -> Callable[..., TrialTask]:
    (tmp_path / "trainings.py").write_text(_TRAININGS)

    def make(seconds: float, how: str = "computes", **fields: Any) -> TrialTask:
        training = {"_target_": f"trainings.{how}", "seconds": seconds}
        if how == "computes_in_a_command":
            code = "import trainings; next(trainings.computes({seconds})); print({json})"
            training |= {"_target_": COMMAND, "command": f"python -c '{code}'"}
            training["json"] = """'{"accuracy": 1.0}'"""
        num_workers = 2 if how == "computes_in_the_second_rank" else 1
        settings = [
            "allowed_targets=[trainings,autotune.script]",
            f"parallelism.num_workers={num_workers}",
        ]
        config = replace(trial_config(*settings), training=training)
        task = make_trial_task(config, tmp_path, deadline_seconds=300.0, num_cpus=num_workers)
        return replace(task, **fields)

    return make


@pytest.fixture(scope="module")
def group() -> Iterator[ProcessGroup]:
    with closing(ProcessGroup()) as group:
        yield group


def last_of(group: ProcessGroup, task: TrialTask) -> WorkerReport:
    *_, last = group.train(task)
    return last


@contextmanager
def hogs(number: int) -> Iterator[None]:
    """Other programs that compute: of nobody whom the driver has started, as far as a worker can
    see.
    """
    running = [
        subprocess.Popen([sys.executable, "-c", _HOG], start_new_session=True)
        for _ in range(number)
    ]
    try:
        yield
    finally:
        for hog in running:
            hog.kill()
            hog.wait()


@pytest.mark.slow
def test_a_stop_is_seen_told_and_moves_the_deadline(
    group: ProcessGroup, make_task: Any, tmp_path: Path
) -> None:
    # as long as the stop: it would be over at once
    task = make_task(0.6, deadline_seconds=STOPPED_SECONDS)
    stopper = subprocess.Popen(
        [sys.executable, "-c", _STOPS, str(tmp_path / "trains"), str(STOPPED_SECONDS)],
        start_new_session=True,
    )
    last = last_of(group, task)
    assert stopper.wait() == 0
    assert last.outcome is Outcome.REACHED, last.error
    assert last.contention is not None
    assert last.contention.stopped_seconds == pytest.approx(STOPPED_SECONDS, abs=2.0)
    assert last.contention.reason is not None
    assert last.contention.reason.startswith("its process was stopped for ")
    assert last.evaluation is not None
    assert last.evaluation.train_seconds >= STOPPED_SECONDS, (
        "the clock is the clock: what is not to be trusted is marked, not mended"
    )


_STOPS = """
import os, pathlib, signal, sys, time
path = pathlib.Path(sys.argv[1])
while not path.is_file():
    time.sleep(0.01)
process = int(path.read_text())
time.sleep(0.3)
os.kill(process, signal.SIGSTOP)
time.sleep(float(sys.argv[2]))
os.kill(process, signal.SIGCONT)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "seconds"),
    [
        ("computes", 1.5),
        ("computes_in_a_command", 1.5),
        ("computes_in_the_second_rank", 4.0),
    ],
)
def test_hogs_beside_a_single_run_are_seen(
    group: ProcessGroup, make_task: Any, how: str, seconds: float
) -> None:
    # else they would be the study's own: this process has started both
    task = make_task(seconds, how, driver=("elsewhere", 1))
    with hogs(2 * (os.cpu_count() or 1)):
        last = last_of(group, task)
    assert last.contention is not None
    assert last.contention.stopped_seconds == 0
    assert last.contention.reason is not None
    assert "for a CPU while other programs used" in last.contention.reason


@pytest.mark.slow
def test_what_the_study_has_started_itself_is_no_contention(
    group: ProcessGroup, make_task: Any
) -> None:
    with hogs(2 * (os.cpu_count() or 1)):
        last = last_of(group, make_task(1.0))
    assert last.contention is not None
    assert last.contention.waited_seconds > 0
    assert last.contention.study_cpu_seconds > 0.2 * last.contention.seconds
    assert last.contention.waited_for_others_seconds < last.contention.waited_seconds


OTHER = 1_000_002


class Watched:
    """A training on a GPU, by a clock that a test moves; its watchdog thread is the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **deadline: Any) -> None:
        self.has_ended = False
        self.now, self.gpu = 1_000.0, Gpu("a", {os.getpid(): 90, OTHER: 0})
        Driver(monkeypatch, self.gpu)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a")
        )
        clock = SimpleNamespace(
            monotonic=lambda: self.now, clock_gettime=lambda _: self.now, CLOCK_BOOTTIME=7
        )
        monkeypatch.setattr(watchdog, "time", clock)
        # the process runs by another clock
        monkeypatch.setattr(watchdog, "_ran", lambda thread: None)
        self.watchdog = Watchdog(
            **{"deadline_seconds": math.inf, "driver": ("elsewhere", 1), **deadline}
        )
        monkeypatch.setattr(self.watchdog, "_look", lambda: None)
        monkeypatch.setattr(self.watchdog, "_end_process", lambda: setattr(self, "has_ended", True))
        self.watchdog._first = self.watchdog._sample()
        with self.watchdog._changed:
            self.watchdog._switch(is_on=True)

    def train(self, seconds: float, *, neighbour: bool = False, reasons: int = 0) -> None:
        self.gpu.processes[OTHER], self.gpu.reasons = 90 * neighbour, reasons
        self.now += seconds
        with self.watchdog._changed:
            self.watchdog._beat()

    def contention(self) -> Contention:
        measured = self.watchdog.contention(is_last=True)
        assert measured is not None
        return measured


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_deadline_counts_from_the_last_report_and_follows_from_what_was_seen(
    is_fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch, deadline_seconds=240.0, is_deadline_fixed=is_fixed)
    for seconds in (200.0, 200.0, 230.0):  # also of ten hours, each of which makes progress
        with watched.watchdog.on():
            watched.train(seconds)
        watched.now += 5000.0  # the driver decides
        assert not watched.has_ended
    with watched.watchdog.on():
        watched.train(2290.0)
        assert watched.has_ended == is_fixed
        watched.train(20.0)
        assert watched.has_ended


def test_a_deadline_moves_while_a_state_is_saved_and_counts_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, deadline_seconds=240.0, is_deadline_fixed=True)
    with watched.watchdog.on():
        watched.train(200.0)
        with watched.watchdog.saving():
            watched.train(3000.0)
        watched.train(200.0)
        assert not watched.has_ended
        with watched.watchdog.saving():
            watched.train(3700.0)
            assert watched.has_ended, "a disk that never answers is no progress"


def test_a_time_budget_ends_what_reports_and_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, deadline_seconds=240.0, budget_seconds=600.0)
    for _ in range(5):
        with watched.watchdog.on(), watched.watchdog.saving():
            watched.train(100.0)
    assert not watched.has_ended
    with watched.watchdog.on():
        watched.train(100.0)
    assert watched.has_ended


def test_brakes_of_a_gpu_spoil_no_time_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    for look in range(120):
        watched.train(60.0, reasons=0x20 if look < 50 else 0)
    measured = watched.contention()
    assert (measured.seconds, measured.reason) == (7200.0, None)
    assert measured.brakes == (f"GPU-a of {platform.node()} is slowed down by heat",)


@pytest.mark.parametrize(("num_looks", "is_spoilt"), [(1, False), (36, True)])
def test_a_neighbour_on_the_gpu_spoils_the_time_by_its_share(
    num_looks: int, is_spoilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    for look in range(120):
        watched.train(60.0, neighbour=look < num_looks)
    assert watched.contention().shared_seconds == num_looks * 60.0
    assert (watched.contention().reason is not None) == is_spoilt


def test_one_look_at_a_neighbour_spoils_a_training_of_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    watched.train(1.9)
    watched.train(0.1, neighbour=True)
    assert watched.contention().reason == "other programs computed on its GPU for 2.0 s of 2.0 s"


def test_processes_of_the_study_that_are_new_are_no_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    monkeypatch.setattr(watchdog, "_study_processes", lambda driver: {OTHER: None})
    for _ in range(3):
        watched.train(2.0, neighbour=True)
    assert watched.watchdog._shared_seconds == 0


def test_a_driver_that_answers_late_has_stopped_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def looks_slowly(own: Any, started: Any) -> list[Any]:
        time.sleep(1.0)
        seen.append(own)
        return []

    monkeypatch.setattr(watchdog, "look_at_gpus", looks_slowly)
    monkeypatch.setattr(watchdog, "_TELL_EVERY_SECONDS", 0.1)
    slow = Watchdog(deadline_seconds=math.inf, driver=("elsewhere", 1))
    with closing(slow):
        with slow.on():
            time.sleep(2.5)
        measured = slow.contention(is_last=True)
    assert len(seen) >= 3
    assert measured is not None
    assert measured.stopped_seconds == 0


DEADLINE_SECONDS = 8
_DATA = f"""
import time
import torch
from autotune.remote import _opened

def from_far():
    with _opened("memory://data", "data"):
        time.sleep({DEADLINE_SECONDS + 1})
    targets = torch.arange(64) % 2
    pair = (targets.float().view(-1, 1, 1, 1).expand(-1, 1, 8, 8).contiguous(), targets)
    return {{"train": pair, "validation": pair}}
"""
_RUN = f"""
from autotune.training.preload import preload
from autotune.config.compose import Composer
from autotune.execution.task_run import TaskRun
from tests.support.records import make_trial_task

preload()
own = ["allowed_targets=[my_data]", "data._target_=my_data.from_far"]
config = Composer(["experiment=cnn", "device=cpu", "model.widths=[4]", *own])
task = make_trial_task(config.compose().trial, ".", deadline_seconds={DEADLINE_SECONDS}.0)
run = TaskRun(task)
report = run.next_report()
print(report.evaluation.build_seconds if report.evaluation else report.error)
run.close()
"""


@pytest.mark.slow
def test_files_that_take_longer_than_a_trial_may_are_waited_for_and_not_counted(
    commands: Any, tmp_path: Path
) -> None:
    (tmp_path / "my_data.py").write_text(_DATA)
    ended = commands.python("-c", _RUN, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < DEADLINE_SECONDS
    assert list(tmp_path.glob("hang-*")) == []
