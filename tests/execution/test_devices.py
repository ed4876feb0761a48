"""Devices that fail: what failed there is tried again on another one, and a device on which several
configurations failed in a row is left out, while all others go on training.
"""

from pathlib import Path
from typing import Any

import pytest

from autotune.errors import ClusterError
from autotune.execution.task import TrialTask, WorkerReport
from autotune.execution.trial_manager import TrialManager
from autotune.failure import Failure, FailureKind
from autotune.outcome import Outcome
from autotune.policy import Decision
from autotune.search.scheduler import Scheduler
from autotune.search.study import confirmations, finished_results, read_study
from tests.execution.conftest import Commands
from tests.execution.test_trial_manager import MakeTrials, begin, make_trials, report

__all__ = ["make_trials"]

BAD, GOOD, THIRD = (f"GPU {index} of here" for index in range(3))
_MEMORY = {"memory_held_by_others_bytes": 2**30, "is_tried_twice": True}
FAULTS: dict[str, dict[str, Any]] = {
    "ECC": {"kind": FailureKind.MACHINE},
    "Xid": {"kind": FailureKind.MACHINE},
    "unspecified launch failure": {"kind": FailureKind.MACHINE},
    "device is lost": {"kind": FailureKind.MACHINE},
    "busy or unavailable": {"kind": FailureKind.MACHINE},
    "out of memory held by others": {"kind": FailureKind.MEMORY, **_MEMORY},
    "disk full": {"kind": FailureKind.DISK},
    "worker vanished": {"kind": FailureKind.LOST},
    "hang at deadline": {"kind": FailureKind.DEADLINE},
    "code that works elsewhere": {"kind": FailureKind.USER_CODE},
}


def failed(fault: str, device: str = BAD) -> WorkerReport:
    """The report of a training that failed on a device."""
    failure = Failure(message=fault, device=device, **FAULTS[fault])
    return WorkerReport(
        evaluation=None, outcome=Outcome.of(failure.kind), failure=failure, devices=[device]
    )


class Cluster:
    """GPUs, each with a worker that takes the next trial as soon as it is free."""

    def __init__(self, make_trials: MakeTrials, *devices: str, **settings: Any) -> None:
        def has_room(tasks: list[TrialTask]) -> bool:
            return len(tasks) < len(devices)

        self.trials, self.policy = make_trials(has_room=has_room, **settings)
        self.keys: dict[str, str | None] = dict.fromkeys(devices)
        """The key of the trial that each device trains; None while it is free."""
        self.tasks: dict[str, TrialTask] = {}
        """The last task of each device."""
        self._num_keys = 0

    def resting(self) -> list[str]:
        """The devices whose workers rest."""
        return [device for device, key in self.keys.items() if key and key not in self.trials._runs]

    def hand_out(self) -> None:
        """Give each free device a trial, as Ray does."""
        for device in self.resting():
            if self.trials.goes_on(str(self.keys[device])):
                self.keys[device] = None
        for device, key in self.keys.items():
            if key is not None:
                continue
            self._num_keys += 1
            tasks = self.trials.next_tasks(str(self._num_keys))
            if tasks:
                self.keys[device] = str(self._num_keys)
                [self.tasks[device]] = tasks
                self.trials.started(str(self._num_keys))

    def report(self, device: str, what: WorkerReport) -> Decision:
        """Have the worker of a device report."""
        decision = self.trials.reported(str(self.keys[device]), what)
        if decision is Decision.STOP:
            self.keys[device] = None
        return decision


def evaluated(device: str, outcome: Outcome | None = None) -> WorkerReport:
    return report(outcome, devices=[device])


@pytest.fixture
def make_gpu_trials(make_trials: MakeTrials, tmp_path: Path) -> MakeTrials:
    def make(**settings: Any) -> tuple[TrialManager, Scheduler]:
        return make_trials(task_fields={"num_gpus": 1}, **settings)

    return make


@pytest.mark.parametrize("fault", FAULTS)
def test_a_device_that_fails_is_left_out_and_healthy_trials_stay(
    make_gpu_trials: MakeTrials, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(make_gpu_trials, BAD, GOOD, THIRD)
    num_failed = num_points = 0
    for _ in range(40):
        cluster.hand_out()
        if cluster.keys[THIRD]:  # it trains one long trial
            assert cluster.report(THIRD, evaluated(THIRD)) is Decision.CONTINUE
        if BAD not in cluster.resting() and cluster.keys[BAD] is not None:
            num_failed += 1
            cluster.report(BAD, failed(fault))
        elif cluster.keys[GOOD] is not None:
            num_points += 1
            cluster.report(GOOD, evaluated(GOOD, Outcome.REACHED))
        if num_points == 12:
            break
    # what was lost once is tried again at once
    assert num_failed == 3 + (fault == "worker vanished")
    assert num_points == 12
    [told] = [line for line in caplog.messages if "is left out" in line]
    assert told.startswith(f"{BAD} is left out: {num_failed} trainings in a row failed there, the")
    assert cluster.resting() == [BAD]
    assert cluster.policy.error is None
    assert cluster.trials.refusal is None
    assert cluster.trials._runs[str(cluster.keys[THIRD])].curve.evaluations, "it is still trained"
    results = cluster.policy.results.values()
    if fault != "hang at deadline":  # which may be the configuration's, and takes long
        assert {result.outcome for result in results} <= {Outcome.REACHED, Outcome.ERRORED}
    assert not any(result.outcome is Outcome.STOPPED for result in results)


@pytest.mark.parametrize("fault", ["ECC", "out of memory held by others", "disk full"])
def test_what_a_device_did_is_tried_again_on_another_one(
    make_gpu_trials: MakeTrials, fault: str
) -> None:
    cluster = Cluster(make_gpu_trials, BAD, GOOD)
    cluster.hand_out()
    first = cluster.tasks[BAD].config
    assert cluster.report(BAD, failed(fault)) is Decision.CONTINUE, "it rests"
    cluster.hand_out()
    assert cluster.resting() == [BAD]
    cluster.report(GOOD, evaluated(GOOD, Outcome.REACHED))
    cluster.hand_out()
    assert cluster.tasks[GOOD].config.batch_size == first.batch_size
    cluster.hand_out()
    assert cluster.resting() == [], "its point is begun"
    assert not any(result.failure for result in cluster.policy.results.values())


def test_one_device_that_fails_once_tries_again_itself(make_gpu_trials: MakeTrials) -> None:
    cluster = Cluster(make_gpu_trials, BAD)
    cluster.hand_out()
    assert cluster.report(BAD, failed("ECC")) is Decision.STOP
    cluster.hand_out()
    cluster.report(BAD, evaluated(BAD, Outcome.REACHED))
    [result] = cluster.policy.results.values()
    assert result.outcome is Outcome.REACHED


def test_no_device_left_ends_the_study_and_says_why(make_gpu_trials: MakeTrials) -> None:
    devices = [f"GPU {index} of here" for index in range(8)]
    cluster = Cluster(make_gpu_trials, *devices)
    for _ in range(20):
        cluster.hand_out()
        for device in devices:
            if cluster.keys[device] is not None and device not in cluster.resting():
                cluster.report(device, failed("ECC", device))
        if cluster.trials.has_failed:
            break
    assert isinstance(cluster.trials.refusal, ClusterError)
    assert all(f"{device}: ECC" in str(cluster.trials.refusal) for device in devices)
    assert not cluster.policy.results, "the baseline too is trained once a device works again"


def test_a_full_disk_ends_a_study_on_cpus_and_running_trials_are_kept(
    make_trials: MakeTrials,
) -> None:
    cluster = Cluster(make_trials, "first", "second")
    for _ in range(20):
        cluster.hand_out()
        for worker in ("second", "first"):
            if cluster.keys[worker] is not None and worker not in cluster.resting():
                cluster.report(worker, failed("disk full", "here"))
        if cluster.trials.has_failed:
            break
    assert "here: disk full" in str(cluster.trials.refusal)
    assert not cluster.policy.results


def test_code_that_fails_everywhere_ends_the_study_and_running_trials_are_kept(
    make_gpu_trials: MakeTrials,
) -> None:
    cluster = Cluster(make_gpu_trials, BAD, GOOD, THIRD)
    cluster.hand_out()
    for _ in range(20):
        for device in (BAD, GOOD):
            if cluster.keys[device] is not None and device not in cluster.resting():
                cluster.report(device, failed("code that works elsewhere", device))
        cluster.hand_out()
        if cluster.policy.error is not None:
            break
    assert cluster.policy.error is not None
    results = cluster.policy.results.values()
    assert {result.outcome for result in results} == {Outcome.ERRORED}
    assert {result.values["batch_size"] for result in results} == {16, 32, 64}
    assert cluster.report(THIRD, evaluated(THIRD)) is Decision.CONTINUE
    assert not cluster.trials.next_tasks("another")
    cluster.trials.interrupt_all()
    assert not any(result.outcome is Outcome.STOPPED for result in cluster.policy.results.values())
    assert not cluster.trials.is_finished, "the states of paused trials are needed"


def test_a_worker_that_rested_and_died_holds_no_device(make_gpu_trials: MakeTrials) -> None:
    cluster = Cluster(make_gpu_trials, BAD, GOOD)
    cluster.hand_out()
    cluster.report(BAD, failed("ECC"))
    cluster.trials.died(str(cluster.keys[BAD]), "its node has died", FailureKind.LOST)
    assert begin(cluster.trials, "another").config.batch_size


_TRAININGS = """
import os, time
from pathlib import Path

def train(report, lr, notes, error):
    device = os.environ["CUDA_VISIBLE_DEVICES"]
    with Path(notes, device).open("a") as file:
        file.write(f"{lr}\\n")
    if device == "0":
        raise RuntimeError(error)
    for metric in (0.1, 0.5, 0.95):
        time.sleep(0.5)
        report(metric=metric)
"""
_EXPERIMENT = """# @package _global_
training: {_target_: failing.train, notes: '???', error: '???', lr: 0.9}
target: {metric: accuracy, value: 0.9, max_train_seconds: 100}
search_space:
  - training.lr: interval(0.01,0.9)
"""
_DRIVER = """
import sys
from autotune import tune_study
from autotune.config.command_line import run_command
from autotune.execution import cluster
from autotune.training.capabilities import Capabilities

fake = Capabilities(
    num_cpus=2, num_gpus=2, gpu_name="made up", compute_capability=(9, 0),
    has_compiler=True, has_torchao=False
)
cluster.capabilities_of = lambda config, launcher: fake
sys.exit(run_command(tune_study.tune_command, sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("error", ["uncorrectable ECC error encountered", "it works elsewhere"])
def test_a_study_leaves_a_gpu_out_that_fails_and_trains_all_on_the_other(
    commands: Commands, tmp_path: Path, error: str
) -> None:
    for name, text in (
        ("failing.py", _TRAININGS),
        ("driver.py", _DRIVER),
        ("conf/experiment/failing.yaml", _EXPERIMENT),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "notes").mkdir()
    arguments = [
        "experiment=failing",
        "--config-dir",
        "conf",
        "allowed_targets=[failing]",
        "tracking=none",
        "study.name=n",
        "cluster.num_cpus=2",
        "cluster.num_gpus=2",
        f"training.notes={tmp_path}/notes",
        f"training.error='{error}'",
        "search=random",
        "search.num_trials=8",
        "search.max_retakes=0",
        "confirm=quick",
    ]
    ran = commands.python("driver.py", *arguments, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    study = read_study("n", tmp_path / "outputs/n")
    results, runs = finished_results(study), confirmations(study)
    assert [result.outcome for result in results.values()] == [Outcome.REACHED] * 8
    assert {run.outcome for run in runs.values()} == {Outcome.REACHED}
    failed_first = (tmp_path / "notes/0").read_text().split()
    trained = (tmp_path / "notes/1").read_text().split()
    assert len(failed_first) == 3
    assert len(trained) == 8 + len(runs), "confirmation runs leave it out, too"
    assert set(failed_first) <= set(trained), "they were tried again"
    [told] = [line for line in ran.stdout.splitlines() if "is left out" in line]
    assert told.startswith("GPU 0 of ")
    assert error in told


_MISTAKEN = """
import time
from pathlib import Path

def train(report, lr, notes):
    if lr != 0.9 and not Path(notes, "mended").exists():
        while not Path(notes, "began").exists():
            time.sleep(0.1)
        raise ValueError("a mistake")
    Path(notes, "began").touch()
    for step in range(20):
        time.sleep(0.2)
        report(metric=0.1)
    report(metric=0.95)
"""


@pytest.mark.slow
def test_a_mistake_ends_a_study_that_goes_on_once_it_is_mended(
    commands: Commands, tmp_path: Path
) -> None:
    experiment = _EXPERIMENT.replace(", error: '???'", "").replace("notes: '???'", "notes: .")
    (tmp_path / "failing.py").write_text(_MISTAKEN)
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/failing.yaml").write_text(experiment)
    arguments = [
        "experiment=failing",
        "--config-dir",
        "conf",
        "allowed_targets=[failing]",
        "tracking=none",
        "study.name=n",
        "cluster.num_cpus=2",
        "search=random",
        "search.num_trials=5",
        "search.max_retakes=0",
        "confirm=none",
    ]
    ran = commands.run(*arguments, folder=tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert "3 trials in a row failed" in ran.stderr

    def outcomes() -> list[Outcome]:
        results = finished_results(read_study("n", tmp_path / "outputs/n"))
        return [result.outcome for result in results.values()]

    assert outcomes() == [Outcome.ERRORED] * 3, "the baseline is no result yet"
    (tmp_path / "mended").touch()
    commands.succeed(*arguments, folder=tmp_path)
    assert sorted(outcomes()) == [Outcome.ERRORED] * 3 + [Outcome.REACHED] * 2
    assert outcomes()[0] is Outcome.REACHED, "the baseline continues under its number"
