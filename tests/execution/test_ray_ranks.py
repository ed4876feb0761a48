"""Trials whose ranks lie in several of Ray's bundles: they start and end together, and free what
they held.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from autotune.config.compose import Composer
from autotune.execution.ray_ranks import bundles
from autotune.execution.task import WorkerReport
from autotune.execution.worker import TrialWorker
from autotune.outcome import Outcome
from tests.support.patience import PATIENCE_SECONDS, wait_until
from tests.support.records import make_trial_task
from tests.support.studies import rows_of


@pytest.mark.slow
def test_a_study_over_strategies_is_confirmed(commands: Any, tmp_path: Path) -> None:
    command = [
        "experiment=cnn_parallel",
        "study.name=p",
        "cluster.num_cpus=2",
        "search.num_trials=6",
        "confirm=quick",
        "tracking=none",
    ]
    commands.succeed(*command, folder=tmp_path)
    best = json.loads((tmp_path / "outputs/p/best.json").read_text())
    assert best["best"]["num_reached"] == best["best"]["num_runs"] == 2
    first = min(
        rows_of(tmp_path / "outputs/p/trace.csv"), key=lambda row: float(row["started_seconds"])
    )
    assert first["trial"] == "0", (
        "the baseline does not wait for larger trials that were asked for after it"
    )


def _command_line(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _other_rank() -> int:
    (other,) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"ray::_RankWorker" in _command_line(path)
    ]
    return other


def _step(worker: Any) -> WorkerReport:
    # without a time limit of its own ray.get swallows pytest-timeout's signal
    return ray.get(worker.step.remote(), timeout=PATIENCE_SECONDS)["report"]


@pytest.mark.slow
def test_a_rank_in_another_bundle_that_is_gone_is_said_to_be_lost(cluster: None) -> None:
    overrides = ["parallelism=ddp", "epochs=1000", "target.value=0.9999"]
    config = Composer(["experiment=cnn_smoke", "runtime.num_threads=1", *overrides]).compose().trial
    task = make_trial_task(config, num_cpus=config.num_workers)
    group = ray.util.placement_group(bundles(task), strategy="PACK")
    assert group.wait(PATIENCE_SECONDS)
    where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    worker = (
        ray.remote(TrialWorker)
        .options(num_cpus=1, scheduling_strategy=where)
        .remote({"tasks": [task]})
    )
    report = _step(worker)
    os.kill(_other_rank(), signal.SIGKILL)
    while report.outcome is None:
        report = _step(worker)
    assert report.outcome is Outcome.LOST, report.error
    assert (report.error or "").startswith("rank 1: ")
    ray.kill(worker)
    ray.util.remove_placement_group(group)
    wait_until(lambda: ray.available_resources().get("CPU") == 3)
