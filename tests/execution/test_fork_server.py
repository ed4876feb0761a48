"""A fork server: each training in a process that never trained, which ends as it would anywhere
and leaves nothing behind.
"""

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.config.schema import TrialConfig
from autotune.execution.fork_server import Died, ForkedProcess, ForkedRun, ForkServer
from autotune.execution.task_run import TrialTask, WorkerReport, outcome_of_death
from autotune.outcome import Outcome
from tests.support.patience import is_alive, wait_until
from tests.support.records import make_trial_task

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]

_ENDS = """
import ctypes, os, pathlib, re, signal, subprocess, sys, time

def note(name, number):
    pathlib.Path(name + ".part").write_text(str(number))
    os.replace(name + ".part", name)

def kills():
    yield {"metric": 0.1}
    os.kill(os.getpid(), signal.SIGKILL)

def crashes():
    ctypes.string_at(0)
    yield {"metric": 0.1}

def hangs():
    yield {"metric": 0.1}
    wait_for_what_never_comes()

def wait_for_what_never_comes():
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note("helper", helper.pid)
    note("trains", os.getpid())
    time.sleep(600)

def hangs_in_c():
    yield {"metric": 0.1}
    re.match("(a+)+$", 60 * "a" + "b")  # keeps Python's lock, and takes longer than anyone lives

def works():
    note("process", os.getpid())
    yield {"metric": 1.0}
"""


@pytest.fixture
def make_task(trial_config: Callable[..., TrialConfig], tmp_path: Path) -> Callable[..., TrialTask]:
    (tmp_path / "ends.py").write_text(_ENDS)

    def make(how: str | None = None, **fields: Any) -> TrialTask:
        task = make_trial_task(
            trial_config("epochs=3", "target.value=0.999", "seed=11", "allowed_targets=[ends]"),
            tmp_path,
            name="confirm-0-0",
        )
        if how is not None:
            task = replace(task, config=replace(task.config, training={"_target_": f"ends.{how}"}))
        return replace(task, **fields)

    return make


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    assert server.fault() is None
    yield server
    server.close()


def numbers(reports: list[Any]) -> list[tuple[int, float, float]]:
    return [
        (report.evaluation.step, report.evaluation.metric, report.evaluation.loss)
        for report in reports
        if report.evaluation
    ]


_NEW_PROCESS = """
import pickle, sys
from autotune.execution.task_run import TaskRun
run = TaskRun(pickle.loads(sys.stdin.buffer.read()))
reports = [run.next_report()]
while reports[-1].outcome is None:
    reports.append(run.next_report())
sys.stdout.buffer.write(pickle.dumps(reports))
"""


def test_a_forked_process_trains_as_a_new_one_to_the_last_bit_and_never_trained(
    server: ForkServer, make_task: Any
) -> None:
    task = make_task()
    new = subprocess.run(
        [sys.executable, "-c", _NEW_PROCESS],
        input=pickle.dumps(task),
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    forked = [list(server.train(task)) for _ in range(2)]
    assert len(numbers(forked[0])) == 3
    assert numbers(forked[0]) == numbers(forked[1]) == numbers(pickle.loads(new.stdout))
    assert all(reports[0].is_first_in_process for reports in forked)
    assert forked[0][0].fingerprint["sha256"] == forked[1][0].fingerprint["sha256"]


@pytest.mark.parametrize(
    ("how", "told", "outcome"),
    [("kills", "SIGKILL", Outcome.LOST), ("crashes", "SIGSEGV", Outcome.ERRORED)],
)
def test_what_ended_a_process_is_said_and_the_next_one_trains(
    server: ForkServer, make_task: Any, how: str, told: str, outcome: Outcome
) -> None:
    last = list(server.train(make_task(how)))[-1]
    assert last == Died(reason=f"the worker died: it was ended by {told}")
    death = outcome_of_death(make_task(), seconds=1.0, reason=last.reason)
    assert (death.outcome, death.error, death.num_retries > 0) == (
        outcome,
        last.reason,
        outcome is Outcome.LOST,
    )
    [report, *_] = server.train(make_task("works"))
    assert isinstance(report, WorkerReport)
    assert report.outcome is Outcome.REACHED


def test_a_training_past_its_deadline_ends_with_all_that_it_started(
    server: ForkServer, make_task: Any, tmp_path: Path
) -> None:
    task = make_task("hangs", deadline_seconds=15.0)
    last = list(server.train(task))[-1]
    assert last == Died(reason="the worker died: it ended with exit code 1")
    outcome, error, _ = outcome_of_death(task, seconds=16.0, reason=last.reason)
    assert outcome is Outcome.TIMED_OUT
    assert "in wait_for_what_never_comes" in error
    wait_until(lambda: _are_gone(tmp_path))


@pytest.mark.slow
def test_what_keeps_pythons_lock_is_ended_by_a_timer(server: ForkServer, make_task: Any) -> None:
    task = make_task("hangs_in_c", deadline_seconds=1.0)
    last = list(server.train(task))[-1]
    assert last == Died(reason="the worker died: it ended with exit code 1")
    death = outcome_of_death(task, seconds=1.0, reason=last.reason)
    assert (death.outcome, death.num_retries) == (Outcome.TIMED_OUT, 0)
    assert "in hangs_in_c" in death.error


def test_one_process_trains_one_trial_after_another_until_nobody_wants_it(
    server: ForkServer, make_task: Any, tmp_path: Path
) -> None:
    with contextlib.closing(ForkedProcess(server.address, {})) as process:
        whole = numbers(reports_of(ForkedRun(process, make_task())))
        again = ForkedRun(process, make_task(state_folder=str(tmp_path / "state")))
        first = again.next_report()
        assert first.can_pause
        assert not first.is_first_in_process
        again.keep()
        again.close()
        assert (tmp_path / "state").is_dir()
        resumed = ForkedRun(
            process, make_task(state_folder=str(tmp_path / "state"), is_paused=True)
        )
        assert numbers([first, *reports_of(resumed)]) == whole
        never_paused = ForkedRun(process, make_task())
        never_paused.next_report()
        with pytest.raises(AssertionError, match="never paused"):
            never_paused.keep()
        reports_of(ForkedRun(process, make_task("works")))
        trains = int((tmp_path / "process").read_text())
        assert is_alive(trains)
    assert not is_alive(trains), "who closes it waits for its end"


def reports_of(run: ForkedRun) -> list[WorkerReport]:
    reports = [run.next_report()]
    while reports[-1].outcome is None:
        reports.append(run.next_report())
    run.close()
    return reports


_OWNER = """
import pickle, sys
from autotune.execution.fork_server import ForkServer
server = ForkServer()
assert server.fault() is None
for report in server.train(pickle.loads(sys.stdin.buffer.read())):
    pass
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder that has room for sockets."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_nothing_is_left_of_a_training_whose_owner_was_killed(
    make_task: Any, tmp_path: Path, short_folder: Path
) -> None:
    temporary = short_folder
    (tmp_path / "task").write_bytes(pickle.dumps(make_task("hangs")))
    with (tmp_path / "task").open("rb") as task:
        environment = {**os.environ, "TMPDIR": str(temporary)}
        owner = subprocess.Popen(
            [sys.executable, "-c", _OWNER],
            stdin=task,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
    wait_until((tmp_path / "trains").is_file, process=owner)
    assert not _are_gone(tmp_path)
    assert any(temporary.glob("autotune-*"))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: _are_gone(tmp_path) and not any(temporary.glob("autotune-*")))


def _are_gone(folder: Path) -> bool:
    """Whether the training's process is, and the one that it started."""
    return not any(is_alive(int((folder / name).read_text())) for name in ("trains", "helper"))
