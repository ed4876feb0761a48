"""The way of one evaluation, from a training to the scheduler, is the one that the map of the code
shows.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from autotune.config.schema import TrialConfig
from autotune.execution import worker
from autotune.execution.launcher import TrainingProcess
from autotune.execution.process_group import ProcessGroup
from autotune.execution.ray_tune import Phases, PolicyScheduler
from autotune.execution.task import TrialTask
from autotune.policy import Decision, Run
from autotune.search.scheduler import Scheduler
from tests.execution.test_trial_manager import make_trials  # noqa: F401  # a fixture
from tests.support.records import make_trial_task

MAP = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"

_TRAINING = """
import json, os, pathlib, sys, threading
from tests.execution.test_one_evaluation import callers

def train(folder):
    [asks] = [thread.ident for thread in threading.enumerate() if thread.name == "serve"]
    names = callers(sys._current_frames()[asks])
    pathlib.Path(folder, "calls").write_text(json.dumps([os.getpid(), names]))
    yield {"metric": 0.1}
    yield {"metric": 0.1}
"""


def callers(frame: FrameType | None) -> list[str]:
    """The functions of autotune's engine that have called a function, the nearest one first."""
    names = []
    while frame is not None:
        place = frame.f_code.co_filename.rpartition("/autotune/")[2]
        if place.startswith("execution/"):
            names.append(f"{place}: {frame.f_code.co_qualname}")
        frame = frame.f_back
    return names


def test_an_evaluation_goes_the_way_that_the_map_shows(
    make_trials: Any,  # noqa: F811
    trial_config: Callable[..., TrialConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, list[str]] = {}
    (tmp_path / "walked.py").write_text(_TRAINING)
    config = replace(
        trial_config("allowed_targets=[walked]"),
        training={"_target_": "walked.train", "folder": str(tmp_path)},
    )

    def make_task(run: Run) -> TrialTask:
        repository = str(MAP.parents[1])
        task = make_trial_task(config, tmp_path, name=run.name)
        return replace(task, code_folders=(*task.code_folders, repository))

    def observe(*_: Any, **__: Any) -> Decision:
        seen["driver"] = callers(sys._getframe())
        return Decision.CONTINUE

    def poll(process: TrainingProcess, seconds: float = 0.0) -> bool:
        seen.setdefault("worker", callers(sys._getframe()))
        return bool(process._connection.poll(seconds))

    manager, _ = make_trials(make_task=make_task)
    monkeypatch.setattr(worker, "ray_process_group", lambda task: ProcessGroup())
    monkeypatch.setattr(Scheduler, "observe", observe)
    monkeypatch.setattr(TrainingProcess, "poll", poll)
    tasks = manager.next_tasks("key")
    manager.started("key")
    of_ray = worker.TrialWorker({"tasks": tasks})
    try:
        trial = SimpleNamespace(trial_id="key")
        result = of_ray.step()
        PolicyScheduler(Phases(iter([manager])), lambda: None).on_trial_result(None, trial, result)
    finally:
        of_ray.cleanup()
    process, in_training = json.loads((tmp_path / "calls").read_text())
    walked = [*in_training, *seen["worker"], *reversed(seen["driver"])]
    block = MAP.read_text().split("**One evaluation**")[1].split("```")[1]
    shown = re.findall(r"(execution/\w+\.py: [\w.]+)", block)
    assert walked == shown
    assert len(walked) == 6
    assert process != os.getpid()
