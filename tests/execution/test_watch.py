"""The watch of a training: a stop is seen and moves the deadline, hogs are seen, and what hangs is ended."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.config.schema import TrialConfig
from autotune.execution import awake, watch
from autotune.execution.fork_server import ForkServer
from autotune.execution.task_run import TrialTask, WorkerReport
from autotune.measurement import Evaluation
from autotune.outcome import Outcome
from tests.support.nvml import Driver, Gpu
from tests.support.records import make_trial_task

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
STOPPED_SECONDS = 12.0
_HOG = "while True: pass"

_TRAININGS = """
import ctypes, os, pathlib, signal, subprocess, sys, time

def note():
    pathlib.Path("trains.part").write_text(str(os.getpid()))
    os.replace("trains.part", "trains")

def computes(seconds):
    # So much computing, by the CPU's own clock: it takes longer where it has to wait.
    note()
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    yield {"metric": 1.0}

def reports_at_once(seconds):
    # Goes on so fast that no other thread has the lock before the report.
    sys.setswitchinterval(0.1)
    note()
    os.kill(os.getpid(), signal.SIGSTOP)
    yield {"metric": 1.0}

def stops_after_a_report(seconds):
    # Is stopped before the thread that is to see it has heard that the training goes on.
    sys.setswitchinterval(0.1)
    yield {"metric": 0.1}
    note()
    os.kill(os.getpid(), signal.SIGSTOP)
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    yield {"metric": 1.0}

def waits_for_a_helper(seconds):
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2)"])
    pathlib.Path("trains.part").write_text(str(helper.pid))
    os.replace("trains.part", "trains")
    helper.wait()
    yield {"metric": 1.0}

def keeps_pythons_lock(seconds):
    ctypes.PyDLL(None).sleep(2)
    yield {"metric": 1.0}
"""


@pytest.fixture
def make_task(trial_config: Callable[..., TrialConfig], tmp_path: Path) -> Callable[..., TrialTask]:
    (tmp_path / "trainings.py").write_text(_TRAININGS)

    def make(seconds: float, how: str = "computes", **fields: Any) -> TrialTask:
        training = {"_target_": f"trainings.{how}", "seconds": seconds}
        config = replace(trial_config("allowed_targets=[trainings]"), training=training)
        task = make_trial_task(config, tmp_path, deadline_seconds=300.0)
        return replace(task, **fields)

    return make


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    assert server.fault() is None
    yield server
    server.close()


def last_of(server: ForkServer, task: TrialTask) -> WorkerReport:
    *_, last = server.train(task)
    assert isinstance(last, WorkerReport)
    return last


@contextmanager
def hogs(number: int) -> Iterator[None]:
    """Other programs that compute: of nobody whom the driver has started, as far as a worker can see."""
    running = [subprocess.Popen([sys.executable, "-c", _HOG], start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for hog in running:
            hog.kill()
            hog.wait()


def test_a_stop_is_seen_told_and_moves_the_deadline(server: ForkServer, make_task: Any, tmp_path: Path) -> None:
    task = make_task(0.6, deadline_seconds=STOPPED_SECONDS)  # as long as the stop: it would be over at once
    stopper = subprocess.Popen([sys.executable, "-c", _STOPS, str(tmp_path / "trains"), str(STOPPED_SECONDS)], start_new_session=True)
    last = last_of(server, task)
    assert stopper.wait() == 0
    assert last.outcome is Outcome.REACHED, last.error
    assert last.contention is not None
    assert last.contention.stopped_seconds == pytest.approx(STOPPED_SECONDS, abs=2.0)
    assert last.contention.reason is not None
    assert last.contention.reason.startswith("its process was stopped for ")
    assert last.evaluation is not None
    assert last.evaluation.contention == last.contention
    assert last.evaluation.train_seconds >= STOPPED_SECONDS, "the clock is the clock: what is not to be trusted is marked, not mended"
    assert Evaluation.from_dict(last.evaluation.as_dict()).contention == last.contention


@pytest.mark.parametrize("how", ["reports_at_once", "stops_after_a_report", "waits_for_a_helper"])
def test_a_stop_is_seen_however_short_the_way_to_the_report_and_whichever_process_is_stopped(
    server: ForkServer, make_task: Any, tmp_path: Path, how: str
) -> None:
    stopper = subprocess.Popen([sys.executable, "-c", _STOPS, str(tmp_path / "trains"), "3"], start_new_session=True)
    last = last_of(server, make_task(1.0, how))
    assert stopper.wait() == 0
    assert last.contention is not None
    assert last.contention.stopped_seconds >= 1.5
    assert str(last.contention.reason).startswith("its process was stopped for ")


_STOPPED_AT_WORK = """
import os, signal, subprocess, sys, threading, time
from autotune.execution import watch

name, turn = sys.argv[1], int(sys.argv[2])
works, turns = getattr(watch, name), iter(range(1000))

def is_stopped_first(argument):
    if next(turns) == turn:
        subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(2); os.kill({os.getpid()}, {int(signal.SIGCONT)})"])
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    return works(argument)

watched = watch.Watch(deadline_seconds=60, driver=("", 0), hang_file=lambda: sys.stderr)
with watched.on():
    setattr(watch, name, is_stopped_first)
    time.sleep(4)
print(watched.contention(is_last=True).stopped_seconds)
"""


@pytest.mark.parametrize(("name", "turn"), [("_ran", 0), ("_ran", 1), ("_ran", 2), ("descendants", 0), ("descendants", 1)])
def test_a_stop_is_seen_while_the_thread_that_sees_it_is_at_work(name: str, turn: int) -> None:
    script = [sys.executable, "-c", _STOPPED_AT_WORK, name, str(turn)]
    stopped = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert float(stopped.stdout) == pytest.approx(2.0, abs=0.5), stopped.stderr


def test_a_call_that_keeps_pythons_lock_is_no_stop(server: ForkServer, make_task: Any) -> None:
    last = last_of(server, make_task(1.0, "keeps_pythons_lock"))
    assert last.contention is not None
    assert last.contention.stopped_seconds == 0
    assert last.evaluation is not None
    assert last.evaluation.train_seconds >= 2


def test_a_machine_that_was_suspended_is_a_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    samples = [watch._Sample(at, 0.0, {}, {}, suspended) for at, suspended in [(0.0, 5.0), (1.0, 35.0)]]
    monkeypatch.setattr(watch, "_sample", lambda driver: samples.pop(0))
    seen = watch.Watch(deadline_seconds=60.0, driver=("nowhere", 0), hang_file=(tmp_path / "hang").open)
    seen._first = watch._sample(("nowhere", 0))
    found = seen.contention(is_last=True)
    assert found is not None
    assert found.stopped_seconds == 30
    assert found.reason is not None


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


def test_hogs_beside_a_single_run_are_seen(server: ForkServer, make_task: Any) -> None:
    task = make_task(1.5, driver=("elsewhere", 1))  # else they would be the study's own: this process has started both
    with hogs(2 * (os.cpu_count() or 1)):
        last = last_of(server, task)
    assert last.contention is not None
    assert last.contention.stopped_seconds == 0
    assert last.contention.reason is not None
    assert "for a CPU while other programs used" in last.contention.reason


def test_what_the_study_has_started_itself_is_no_contention(server: ForkServer, make_task: Any) -> None:
    with hogs(2 * (os.cpu_count() or 1)):
        last = last_of(server, make_task(1.0))
    assert last.contention is not None
    assert last.contention.waited_seconds > 0
    assert last.contention.study_cpu_seconds > 0.2 * last.contention.seconds
    assert last.contention.waited_for_others_seconds < last.contention.waited_seconds


def test_what_keeps_the_cpus_awake_makes_nobody_wait(server: ForkServer, make_task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "_cpus", lambda: sorted(os.sched_getaffinity(0)))
    with awake.kept_awake():
        last = last_of(server, make_task(1.0))
    assert last.contention is not None
    assert last.contention.study_cpu_seconds < 0.2 * last.contention.seconds


def test_a_process_of_the_studys_that_ends_meanwhile_is_no_other_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, ended = os.getpid(), 1
    samples = [
        watch._Sample(0.0, 100.0, {own: 1.0, ended: 40.0}, {}),
        watch._Sample(1.0, 101.5, {own: 2.0}, {}),
    ]
    monkeypatch.setattr(watch, "_sample", lambda driver: samples.pop(0))
    seen = watch.Watch(deadline_seconds=60.0, driver=("nowhere", 0), hang_file=(tmp_path / "hang").open)
    seen._first = watch._sample(("nowhere", 0))
    seen._on_seconds = 1.0
    found = seen.contention(is_last=True)
    assert found is not None
    assert found.others_cpu_seconds == pytest.approx(0.5)


def test_what_the_training_has_started_is_no_contention_on_its_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    script = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gpu = Gpu("a", {os.getpid(): 0, script.pid: 90})
    Driver(monkeypatch, gpu)
    seen = watch.Watch(deadline_seconds=60.0, driver=("elsewhere", 1), hang_file=(tmp_path / "hang").open)
    seen._first = watch._sample(("elsewhere", 1))
    first = seen.contention(is_last=True)
    gpu.processes[1] = 90
    later = seen.contention(is_last=True)
    script.communicate(b"\n")
    assert first is not None
    assert later is not None
    assert (first.device, later.device) == (None, "1 other process computed on its GPU")
