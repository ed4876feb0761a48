"""The launcher and the processes that it starts: each trains as a new one, ends as it would
anywhere, and leaves nothing behind; several train together as ranks.
"""

import contextlib
import errno
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.execution.launcher import (
    RAY_FOLDER,
    RAY_MARK,
    Launcher,
    TrainingProcess,
    _Children,
    calling,
)
from autotune.execution.process_group import ProcessGroup, rank_environment
from autotune.execution.task import ProcessExited, TrialTask, WorkerReport
from autotune.failure import Failure, FailureKind
from autotune.outcome import Outcome
from tests.support.patience import is_alive, wait_until
from tests.support.records import make_trial_task

ROOT = Path(__file__).resolve().parents[2]

_ENDS = """
import ctypes, multiprocessing, os, pathlib, re, signal, subprocess, sys, time
import torch
import autotune

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
    asleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    helper = subprocess.Popen(asleep, start_new_session=True)  # as torchrun starts its ranks
    note("helper", helper.pid)
    note("trains", os.getpid())
    time.sleep(600)

def hangs_in_c():
    yield {"metric": 0.1}
    re.match("(a+)+$", 60 * "a" + "b")  # keeps Python's lock, and takes longer than anyone lives

def works():
    yield {"metric": 1.0}

def handles_signals(report):
    sent = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    found = []
    for number in sent:
        signal.signal(number, lambda number, frame: found.append(number))
        os.kill(os.getpid(), number)
    report(len(found) / 3)

def handles_signals_and_yields():
    handles_signals(lambda metric: None)
    yield {"metric": 1.0}

def lightning_handles_signals(report):
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    class Told(BoringModel):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    try:
        trainer.fit(Told())
    except SIGTERMException:
        report(1.0)

def sleeps():
    try:
        note("trains" + os.environ.get("RANK", ""), os.getpid())
        time.sleep(1000)
    finally:
        note("cleaned" + os.environ.get("RANK", ""), os.getpid())

def sleeps_and_yields():
    yield {"metric": 0.1}
    sleeps()

def stands_still(report):
    try:
        report(0.1)
    finally:
        note("cleaned", os.getpid())

def catches_what_ends_it():
    while True:
        try:
            sleeps()
        except BaseException:
            pass

def forks():
    child = os.fork()
    if child == 0:
        autotune.report(0.1)
    os.waitpid(child, 0)

def forks_by_multiprocessing():
    child = multiprocessing.get_context("fork").Process(target=autotune.report, args=(0.1,))
    child.start()
    child.join()

class Reporting:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        autotune.report(0.1)

def loads_data():
    autotune.report(0.1)
    for _ in torch.utils.data.DataLoader(Reporting(), num_workers=1):
        pass
"""


@pytest.fixture
def make_task(trial_config: Callable[..., TrialConfig], tmp_path: Path) -> Callable[..., TrialTask]:
    (tmp_path / "ends.py").write_text(_ENDS)

    def make(*overrides: str, how: str | None = None, **fields: Any) -> TrialTask:
        config = trial_config(
            "epochs=3", "target.value=0.999", "seed=11", "allowed_targets=[ends]", *overrides
        )
        if how is not None:
            config = replace(config, training={"_target_": f"ends.{how}"})
        size = config.num_workers
        task = make_trial_task(config, tmp_path, name="confirm-0-0", num_cpus=size)
        return replace(task, **fields)

    return make


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


def reports_of(group: ProcessGroup, task: TrialTask) -> list[WorkerReport]:
    """Train a task in the group's processes, which stay as they are."""
    group.begin(task)
    return rest_of(group)


def rest_of(group: ProcessGroup) -> list[WorkerReport]:
    reports = []
    while not reports or reports[-1].outcome is None:
        report = group.next_report()
        assert report is not None
        reports.append(report)
    return reports


def test_fresh_and_reused_processes_train_as_a_new_one_to_the_last_bit(
    group: ProcessGroup, make_task: Any
) -> None:
    task = make_task("lr_schedule=one_cycle", "model.norm=batch")
    new = subprocess.run(
        [sys.executable, "-c", _NEW_PROCESS],
        input=pickle.dumps(task),
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    expected = pickle.loads(new.stdout)
    fresh = list(group.train(task))
    others = [
        make_task("seed=12", "optimizer=adamw", "precision=bf16", "model.widths=[8,16]"),
        make_task("seed=13", "model.norm=batch", cap_seconds=0.02),
    ]
    capped = [reports_of(group, other)[-1].outcome for other in others][-1]
    reused = reports_of(group, task)
    assert len(numbers(expected)) == 3
    assert numbers(fresh) == numbers(reused) == numbers(expected)
    assert capped is Outcome.CAPPED
    assert fresh[0].fingerprint["sha256"] == reused[0].fingerprint["sha256"]


def test_processes_of_a_fresh_run_have_trained_nothing_and_end_with_it(
    launcher: Launcher, group: ProcessGroup, make_task: Any
) -> None:
    reports_of(group, make_task())
    [trained] = _children_of(launcher)
    group.begin(replace(make_task(), is_fresh=True))
    [fresh] = _children_of(launcher)
    assert fresh != trained
    while (report := group.next_report()) is None or report.outcome is None:
        pass
    assert _children_of(launcher) == []


@pytest.mark.parametrize(
    ("how", "told", "outcome"),
    [("kills", "SIGKILL", Outcome.LOST), ("crashes", "SIGSEGV", Outcome.ERRORED)],
)
def test_what_ended_a_process_is_said_and_the_next_one_trains(
    group: ProcessGroup, make_task: Any, how: str, told: str, outcome: Outcome
) -> None:
    last = reports_of(group, make_task(how=how))[-1]
    assert last.error == f"the worker died: it was ended by {told}"
    assert (last.outcome, last.is_tried_twice) == (outcome, False)
    [report] = reports_of(group, make_task(how="works"))
    assert report.outcome is Outcome.REACHED


@pytest.mark.parametrize(
    "how", ["handles_signals", "handles_signals_and_yields", "lightning_handles_signals"]
)
def test_a_function_runs_in_the_main_thread_where_it_may_handle_signals(
    group: ProcessGroup, make_task: Any, how: str
) -> None:
    last = reports_of(group, make_task(how=how))[-1]
    assert last.outcome is Outcome.REACHED, last.error


@pytest.mark.parametrize(
    ("how", "num_ranks"), [("sleeps", 1), ("sleeps_and_yields", 1), ("sleeps", 2)]
)
def test_a_function_cleans_up_where_it_is_ended_within_a_long_step(
    launcher: Launcher,
    group: ProcessGroup,
    make_task: Any,
    tmp_path: Path,
    how: str,
    num_ranks: int,
) -> None:
    names = [""] if num_ranks == 1 else ["0", "1"]
    task = make_task(f"parallelism.num_workers={num_ranks}", how=how)
    began = [tmp_path / f"trains{name}" for name in names]
    list(group.train(task, lambda: all(path.is_file() for path in began)))
    for name, path in zip(names, began, strict=True):
        assert (tmp_path / f"cleaned{name}").read_text() == path.read_text()
    assert _children_of(launcher) == []


def test_a_function_cleans_up_where_its_worker_ends_between_two_reports(
    group: ProcessGroup, make_task: Any, tmp_path: Path
) -> None:
    group.begin(make_task(how="stands_still"))
    assert group.next_report() is not None
    group._end_processes()
    assert (tmp_path / "cleaned").is_file()


def test_a_function_that_does_not_end_is_killed(
    launcher: Launcher, group: ProcessGroup, make_task: Any, tmp_path: Path
) -> None:
    list(group.train(make_task(how="catches_what_ends_it"), (tmp_path / "trains").is_file))
    assert (tmp_path / "cleaned").is_file()
    wait_until(lambda: _children_of(launcher) == [])


@pytest.mark.parametrize("how", ["forks", "forks_by_multiprocessing", "loads_data"])
def test_a_report_of_a_process_that_a_function_has_started_is_one_line(
    group: ProcessGroup, make_task: Any, how: str
) -> None:
    last = reports_of(group, make_task(how=how))[-1]
    assert last.outcome is Outcome.INVALID
    assert re.fullmatch(r"autotune: was called in process \d+, .* no mp.spawn", last.error or "")


def test_a_training_past_its_deadline_ends_with_all_that_it_started(
    group: ProcessGroup, make_task: Any, tmp_path: Path
) -> None:
    last = reports_of(group, make_task(how="hangs", deadline_seconds=3.0))[-1]
    assert last.outcome is Outcome.TIMED_OUT
    assert last.error is not None
    assert re.match(
        r"not ended at its deadline: nothing was heard of it for [3-9] s, and"
        r" search.trial_deadline_seconds allows 3 s, or ten times the longest time between two"
        r" reports; the worker was ended\n",
        last.error,
    )
    assert "in wait_for_what_never_comes" in last.error
    assert not list(tmp_path.glob("hang-*"))
    wait_until(lambda: _are_gone(tmp_path))


@pytest.mark.slow
def test_what_keeps_pythons_lock_is_ended_by_a_timer(group: ProcessGroup, make_task: Any) -> None:
    last = reports_of(group, make_task(how="hangs_in_c", deadline_seconds=1.0))[-1]
    assert (last.outcome, last.is_tried_twice) == (Outcome.TIMED_OUT, False)
    assert "in hangs_in_c" in (last.error or "")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("parallelism=ddp",),
        pytest.param(("parallelism=fsdp", "optimizer=adamw"), marks=pytest.mark.slow),
    ],
)
def test_a_paused_training_goes_on_in_another_process(
    group: ProcessGroup, make_task: Any, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    whole = numbers(reports_of(group, make_task(*overrides)))
    group.begin(make_task(*overrides, state_folder=str(tmp_path / "state")))
    first = group.next_report()
    assert first is not None
    assert first.can_pause
    group.keep()
    group.close()
    resumed = make_task(*overrides, state_folder=str(tmp_path / "state"), is_resumed=True)
    assert numbers([first, *reports_of(group, resumed)]) == whole


def test_a_process_that_cannot_be_started_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(process: multiprocessing.context.ForkProcess) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", start)
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/launcher")
        listener.listen()
        with contextlib.closing(ours), contextlib.closing(theirs):
            children = _Children(theirs, listener)
            process = TrainingProcess(f"{folder}/launcher", {})
            children._start()
            assert isinstance(process.call("call", "os:getpid"), ProcessExited)


def test_a_training_that_cannot_be_saved_continues(
    group: ProcessGroup, make_task: Any, tmp_path: Path
) -> None:
    whole = numbers(reports_of(group, make_task()))
    (tmp_path / "state").touch()
    group.begin(make_task(state_folder=str(tmp_path / "state")))
    first = group.next_report()
    assert first is not None
    assert first.can_pause
    fault = group.keep()
    assert fault is not None
    assert str(tmp_path / "state") in fault
    assert numbers([first, *rest_of(group)]) == whole


@pytest.mark.parametrize(
    ("overrides", "outcome"),
    [
        (["parallelism=ddp", "target.value=0.5", "optimizer.lr=0.05"], Outcome.REACHED),
        (["parallelism=ddp", "batch_size=33"], Outcome.INVALID),
        pytest.param(
            ["parallelism=fsdp", "optimizer.lr=1e30"], Outcome.DIVERGED, marks=pytest.mark.slow
        ),
        pytest.param(
            ["parallelism=fsdp", "epochs=1000", "target.value=0.9999"],
            Outcome.CAPPED,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_end_together_and_train_the_next_trial(
    group: ProcessGroup, make_task: Any, overrides: list[str], outcome: Outcome
) -> None:
    cap = 0.5 if outcome is Outcome.CAPPED else float("inf")
    last = reports_of(group, make_task(*overrides, cap_seconds=cap))[-1]
    assert last.outcome is outcome, last.error
    group.begin(make_task("parallelism=ddp", "epochs=100"))
    assert group.next_report() is not None
    group.end()  # stopped in the middle
    last = reports_of(group, make_task("parallelism=ddp", "epochs=1"))[-1]
    assert last.outcome is Outcome.MISSED


_FAILS = """
import torch

def on_the_second_rank(outputs, targets):
    if torch.distributed.get_rank() == 1:
        raise ValueError("the second rank failed")
    return torch.nn.functional.cross_entropy(outputs, targets)
"""


def test_an_error_of_one_rank_is_that_of_the_training(
    group: ProcessGroup, make_task: Any, tmp_path: Path
) -> None:
    (tmp_path / "fails.py").write_text(_FAILS)
    task = make_task("parallelism=ddp")
    config = replace(
        task.config,
        loss={"_target_": "fails.on_the_second_rank"},
        allowed_targets=(*task.config.allowed_targets, "fails"),
    )
    last = reports_of(group, replace(task, config=config))[-1]
    assert last.outcome is Outcome.ERRORED
    assert "ValueError: the second rank failed" in (last.error or "")


@pytest.mark.parametrize(
    "sent", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_rank_that_is_gone_or_hangs_ends_the_training_of_all(
    launcher: Launcher, group: ProcessGroup, make_task: Any, sent: int
) -> None:
    before = set(_children_of(launcher))
    group.begin(
        make_task("parallelism=ddp", "epochs=10000", "target.value=1", deadline_seconds=8.0)
    )
    assert group.next_report() is not None
    ranks = sorted(set(_children_of(launcher)) - before)
    assert len(ranks) == 2
    os.kill(ranks[1], sent)
    last = rest_of(group)[-1]
    if sent == signal.SIGKILL:
        assert last.outcome is Outcome.LOST
        assert (last.error or "").startswith("rank 1: the worker died")
    else:
        assert last.outcome is Outcome.TIMED_OUT
    wait_until(lambda: not any(is_alive(rank) for rank in ranks))
    assert reports_of(group, make_task("parallelism=ddp", "epochs=1"))[-1].outcome is not None


class _Ended(TrainingProcess):
    """A first rank whose process ends as soon as it is asked anything."""

    is_gone = True

    def __init__(self) -> None: ...

    def send(self, method: str, *arguments: Any) -> None: ...

    def poll(self, seconds: float = 0.0) -> bool:
        return True

    def receive(self) -> ProcessExited:
        return ProcessExited(reason="it was ended by SIGKILL", exit_code=-signal.SIGKILL)

    def close(self) -> None: ...


class _NeverAsked(_Ended):
    """Another rank, which has no answer to give."""

    def poll(self, seconds: float = 0.0) -> bool:
        raise AssertionError("it was asked nothing")


def test_a_first_rank_that_ends_before_it_begins_is_told_without_the_others(
    make_task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = [_Ended(), _NeverAsked()]
    monkeypatch.setattr(ProcessGroup, "_started", lambda self, task, rank: processes[rank])
    group = ProcessGroup()
    [report] = reports_of(group, make_task("parallelism=ddp"))
    assert report.outcome is Outcome.LOST


class _Answers(_Ended):
    """A rank that answers what it is given."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def receive(self) -> Any:
        return self._answers.pop(0)


def _failed(kind: FailureKind, *, is_consequence: bool = False) -> WorkerReport:
    return WorkerReport.of(Failure(kind=kind, message=kind.value, is_consequence=is_consequence))


_DISCONNECTED = _failed(FailureKind.LOST, is_consequence=True)
_ABORTED = ProcessExited(reason="SIGABRT", exit_code=-signal.SIGABRT)
_KILLED = ProcessExited(reason="SIGKILL", exit_code=-signal.SIGKILL)


@pytest.mark.parametrize(
    ("first", "others", "kind", "told"),
    [
        (_DISCONNECTED, [_KILLED, _DISCONNECTED], FailureKind.LOST, "rank 1: SIGKILL"),
        (_ABORTED, [_ABORTED, _KILLED], FailureKind.LOST, "rank 2: SIGKILL"),
        (_KILLED, [_ABORTED, _DISCONNECTED], FailureKind.LOST, "SIGKILL"),
        (_DISCONNECTED, [_DISCONNECTED, _DISCONNECTED], FailureKind.LOST, "lost"),
        (
            _DISCONNECTED,
            [_failed(FailureKind.MACHINE), _DISCONNECTED],
            FailureKind.MACHINE,
            "machine",
        ),
        (
            _DISCONNECTED,
            [_DISCONNECTED, _failed(FailureKind.USER_CODE)],
            FailureKind.USER_CODE,
            "user code",
        ),
        (_DISCONNECTED, [_ABORTED, _DISCONNECTED], FailureKind.USER_CODE, "rank 1: SIGABRT"),
        (_DISCONNECTED, [None, None], FailureKind.USER_CODE, "rank 1 has returned; lost"),
    ],
)
def test_of_what_all_ranks_met_the_cause_is_told(
    make_task: Any,
    monkeypatch: pytest.MonkeyPatch,
    first: Any,
    others: list[Any],
    kind: FailureKind,
    told: str,
) -> None:
    processes = [_Answers(1, first), *map(_Answers, others)]
    monkeypatch.setattr(ProcessGroup, "_started", lambda self, task, rank: processes[rank])
    task = make_task("parallelism=ddp", "parallelism.num_workers=3")
    [report] = reports_of(ProcessGroup(), task)
    assert report.failure is not None
    assert (report.failure.kind, report.failure.message) == (kind, told)


def test_ranks_of_a_users_function_see_the_gpus_of_all_on_their_machine(
    make_task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")  # which Ray gave the first rank

    class Elsewhere(_Ended):
        def __init__(self, rank: int) -> None:
            self.host, self.devices = ("here", ("7",)) if rank == 1 else ("there", (f"{rank}",))

    group = ProcessGroup(host="here", start_elsewhere=lambda task, rank: Elsewhere(rank))
    group._processes = [_Ended(), *(Elsewhere(rank) for rank in (1, 2, 3))]
    places = group._places(make_task("parallelism=ddp", "parallelism.num_workers=4", num_gpus=4))
    assert [(each.machine, each.local_rank, list(each.devices)) for each in places] == [
        (0, 0, ["6", "7"]),
        (0, 1, ["6", "7"]),
        (1, 0, ["2", "3"]),
        (1, 1, ["2", "3"]),
    ]
    assert {each.local_size for each in places} == {2}


@pytest.mark.parametrize(("given", "of_rank"), [(None, "2"), ("4", "2"), ("1", "1")])
def test_ranks_share_the_threads_that_ray_sets_for_all(
    make_task: Any, monkeypatch: pytest.MonkeyPatch, given: str | None, of_rank: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    task = make_task("parallelism=ddp", num_cpus=4)
    assert rank_environment(task, rank=1)["OMP_NUM_THREADS"] == of_rank


def _children_of(launcher: Launcher) -> list[int]:
    return [child.pid for child in psutil.Process(launcher._process.pid).children()]


def test_a_call_in_another_process_returns_or_raises(launcher: Launcher) -> None:
    with calling(launcher) as call:
        assert call("os:getpid") not in (os.getpid(), launcher._process.pid)
        with pytest.raises(ValueError, match="invalid literal"):
            call("builtins:int", "x")
        with pytest.raises(ConfigError, match="abort: the worker died: it was ended by SIGABRT"):
            call("os:abort")


_OWNER = """
import pickle, sys
from autotune.execution.process_group import ProcessGroup, rank_environment
for report in ProcessGroup().train(pickle.loads(sys.stdin.buffer.read())):
    pass
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder that has room for sockets."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("how", ["hangs", "sleeps"])
def test_nothing_is_left_of_a_training_whose_owner_was_killed(
    make_task: Any, tmp_path: Path, short_folder: Path, how: str
) -> None:
    temporary = short_folder
    (tmp_path / "task").write_bytes(pickle.dumps(make_task(how=how)))
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
    assert (tmp_path / "cleaned").is_file() == (how == "sleeps")


def _are_gone(folder: Path) -> bool:
    """Whether the training's process is, and the one that it started."""
    noted = [folder / name for name in ("trains", "helper")]
    return not any(is_alive(int(path.read_text())) for path in noted if path.is_file())


def test_what_a_training_has_started_ends_with_a_launcher_that_is_killed(
    make_task: Any, tmp_path: Path
) -> None:
    launcher = Launcher()
    with contextlib.closing(ProcessGroup(launcher=launcher.address)) as group:
        group.begin(make_task(how="hangs"))
        first = group.next_report()
        assert first is not None
        assert first.evaluation is not None
        helper = tmp_path / "helper"
        with ThreadPoolExecutor() as threads:
            last = threads.submit(group.next_report)
            wait_until(helper.is_file)
            launcher._process.kill()
            report = last.result()
        assert report is not None
        assert report.failure is not None
        assert report.failure.kind is FailureKind.LOST
        wait_until(lambda: not is_alive(int(helper.read_text())))
    launcher.close()


def test_the_folder_of_a_launcher_that_was_killed_with_its_owner_is_deleted_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,  # of a short path
        monkeypatch.context() as patched,
        contextlib.closing(_launcher_in(folder, patched)) as lives,
    ):
        left = Path(folder) / "autotune-left"
        left.mkdir()
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(left / "launcher"))
            gone.listen()
        of_command, in_use = (Path(folder) / f"autotune-{name}" for name in ("gone", "used"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as used:
            for path in (of_command, in_use):
                path.mkdir()
            used.bind(str(in_use / "session"))
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
                gone.bind(str(of_command / "session"))
            with contextlib.closing(Launcher()):
                assert not left.exists()
                assert not of_command.exists()
                assert lives.folder.is_dir()
                assert in_use.is_dir()


def test_the_folder_of_a_launcher_that_was_killed_stays_while_its_owner_lives() -> None:
    launcher = Launcher()
    os.kill(launcher._process.pid, signal.SIGSTOP)  # and is not started again
    with contextlib.closing(Launcher()):  # that of another study
        assert launcher.folder.is_dir()
    # Ray's sockets lie beneath it, and Linux takes 107 bytes as a socket's path
    assert len(launcher.folder.name) <= len("autotune-12345678")
    launcher.close()
    assert not launcher.folder.exists()


def test_the_owner_of_a_launcher_that_was_killed_ends_what_is_left_of_its_ray() -> None:
    launcher = Launcher()
    launcher._process.kill()
    (launcher.folder / RAY_FOLDER).mkdir()
    agent = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, RAY_MARK: str(launcher.folder)},
    )
    launcher.close()
    assert not is_alive(agent.pid)
    agent.wait()


def _launcher_in(folder: str, patched: pytest.MonkeyPatch) -> Launcher:
    patched.setenv("RAY_TMPDIR", folder)
    return Launcher()


def test_a_launcher_that_was_killed_is_started_again_and_cleans_up_after_its_owner(
    make_task: Any,
) -> None:
    launcher = Launcher()
    for _ in range(2):
        launcher._process.kill()
        launcher._process.wait()
        with contextlib.closing(ProcessGroup(launcher=launcher.address)) as group:
            assert numbers(reports_of(group, make_task()))[-1]
    launcher._connection.close()  # as where the owner is killed, too
    wait_until(lambda: not launcher.folder.exists())
    launcher.close()
