"""A worker's watchdog lets a machine fetch its files however long that takes."""

from pathlib import Path
from typing import Any

import pytest

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
