"""Trials whose ranks lie in several of Ray's bundles: they start and end together, and free what
they held.
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from autotune.config.compose import Composer
from autotune.execution.ray_ranks import bundles
from autotune.execution.task import TrialTask, WorkerReport
from autotune.execution.worker import TrialWorker
from autotune.outcome import Outcome
from tests.support.patience import PATIENCE_SECONDS, wait_until
from tests.support.records import make_trial_task
from tests.support.studies import rows_of

pytestmark = pytest.mark.ray


def task(*overrides: str) -> TrialTask:
    config = (
        Composer(
            [
                "experiment=cnn_smoke",
                "runtime.num_threads=1",
                "target.max_train_seconds=60",
                *overrides,
            ]
        )
        .compose()
        .trial
    )
    size = config.num_workers
    return make_trial_task(config, num_cpus=size)


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
    ran = commands.run(*command, folder=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    best = json.loads((tmp_path / "outputs/p/best.json").read_text())
    assert best["best"]["num_reached"] == best["best"]["num_runs"] == 2
    first = min(
        rows_of(tmp_path / "outputs/p/trace.csv"), key=lambda row: float(row["started_seconds"])
    )
    assert first["trial"] == "0", (
        "the baseline does not wait for larger trials that were asked for after it"
    )


@contextmanager
def training(first: TrialTask) -> Iterator[Any]:
    """A trial's first worker in a placement group of the trial's size, as Ray Tune places it.

    At the end all it held is free.
    """
    group = ray.util.placement_group(bundles(first), strategy="PACK")
    assert group.wait(PATIENCE_SECONDS), "an earlier test left something that is not free"
    where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    worker = (
        ray.remote(TrialWorker)
        .options(num_cpus=1, scheduling_strategy=where)
        .remote({"task": first})
    )
    try:
        yield worker
    finally:
        ray.kill(worker)
        ray.util.remove_placement_group(group)
    wait_until(lambda: ray.available_resources().get("CPU") == 3)


def answer(call: Any) -> Any:
    """What a worker's method returns.

    Without a time limit of its own ``ray.get`` waits for ever: it swallows pytest-timeout's signal.
    """
    return ray.get(call, timeout=PATIENCE_SECONDS)


def last_report(worker: Any) -> WorkerReport:
    report: WorkerReport = answer(worker.step.remote())["report"]
    while report.outcome is None:
        report = answer(worker.step.remote())["report"]
    return report


@pytest.mark.slow
def test_ranks_in_several_bundles_train_one_trial_after_another(cluster: None) -> None:
    first = task("parallelism=ddp", "target.value=0.9", "optimizer.lr=0.05")
    with training(first) as worker:
        report = last_report(worker)
        assert report.outcome is Outcome.REACHED, report.error
        long = task("parallelism=ddp", "epochs=100", "target.value=0.9999")
        answer(worker.reset.remote({"task": long}))
        answer(worker.step.remote())
        answer(worker.reset.remote({"task": task("parallelism=ddp", "epochs=1")}))
        assert last_report(worker).outcome is Outcome.MISSED
        answer(worker.stop.remote())


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


@pytest.mark.slow
def test_a_worker_that_is_gone_is_said_to_be_lost(cluster: None) -> None:
    with training(task("parallelism=ddp", "epochs=1000", "target.value=0.9999")) as worker:
        answer(worker.step.remote())
        os.kill(_other_rank(), signal.SIGKILL)
        report = last_report(worker)
        assert report.outcome is Outcome.LOST
        assert report.error.startswith("a worker was lost: ")
