"""A worker's watchdog: it ends what hangs, and lets a machine fetch its files however long that takes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.execution import task_run
from autotune.execution.task_run import WorkerReport, warn_of_worker
from tests.support.records import make_trial_task

DEADLINE_SECONDS = 8

DATA = f"""
import time

import torch

from autotune.remote import waiting


def images():
    targets = torch.arange(64) % 2
    pair = (targets.float().view(-1, 1, 1, 1).expand(-1, 1, 8, 8).contiguous(), targets)
    return {{"train": pair, "validation": pair}}


def from_far():
    with waiting():
        time.sleep({DEADLINE_SECONDS + 1})
    return images()


def slow():
    time.sleep({DEADLINE_SECONDS + 1})
    return images()
"""

RUN = """
import sys

from autotune.training.preload import preload
from autotune.config.compose import Composer
from autotune.execution.task_run import TaskRun, TrialTask

preload()
data, folder, deadline_seconds = sys.argv[1:]
config = Composer(["experiment=cnn", "device=cpu", "model.widths=[4]", "allowed_targets=[my_data]", f"data._target_=my_data.{data}"])
task = TrialTask(
    name="trial-0", config=config.compose().trial, cap_seconds=100, num_threads=1, deadline_seconds=float(deadline_seconds),
    code_folders=(folder,), working_folder=folder, hang_folder=folder, num_cpus=1, num_gpus=0,
)
run = TaskRun(task)
report = run.next_report()
print(report.evaluation.build_seconds if report.evaluation else report.error)
run.close()
"""


def run_task(data: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    (folder / "my_data.py").write_text(DATA)
    arguments = [sys.executable, "-c", RUN, data, str(folder), str(DEADLINE_SECONDS)]
    return subprocess.run(arguments, cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_files_that_take_longer_than_a_trial_may_are_waited_for_and_not_counted(tmp_path: Path) -> None:
    ended = run_task("from_far", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < DEADLINE_SECONDS
    assert list(tmp_path.glob("hang-*")) == []


@pytest.mark.slow
def test_what_hangs_is_ended(tmp_path: Path) -> None:
    ended = run_task("slow", tmp_path)
    assert ended.returncode == 1
    assert "in slow" in (tmp_path / "hang-trial-0.txt").read_text()


def test_what_a_worker_cannot_tell_of_its_gpu_is_logged_once(trial_config: Any, caplog: pytest.LogCaptureFixture) -> None:
    task_run._warn_once.cache_clear()
    task = make_trial_task(trial_config(), num_gpus=1)
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    for fingerprint in ({"untold": ["whether it is hot"], "niceness": niceness}, {}, {"untold": ["whether it is hot", "how it is"]}):
        warn_of_worker(task, WorkerReport(evaluation=None, outcome=None, fingerprint=fingerprint))
    assert caplog.messages == ["whether it is hot", "how it is"]
