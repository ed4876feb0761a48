"""Ray is killed under a running command: one line, everything closed, nothing left, and the same
study goes on.
"""

import os
import shlex
import shutil
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.execution.conftest import Commands
from tests.support.patience import exit_code, wait_until
from tests.support.studies import rows_of

pytestmark = pytest.mark.slow

AGENTS_SECONDS = 120
"""Seconds within which Ray's own agents have ended after their raylet, for which they take a
minute."""
_TRAINS = (
    "experiment=cnn_smoke",
    "target.value=0.9999",
    "target.max_train_seconds=60",
    "epochs=20",
)
_STUDY = (
    *_TRAINS,
    "study.name=gone",
    "search=tpe",
    "stopping=none",
    "optimizer.lr=interval(1e-4,1e-3)",
    "confirm.max_runs=0",
)


@pytest.fixture
def ray_folder(commands: Commands) -> Iterator[Path]:
    """An empty folder for Ray's files, of a path short enough for sockets, that the commands of
    the test have.
    """
    folder = Path(tempfile.mkdtemp(prefix="gone-", dir="/tmp"))
    commands.environment["RAY_TMPDIR"] = str(folder)
    yield folder
    del commands.environment["RAY_TMPDIR"]
    shutil.rmtree(folder, ignore_errors=True)


def _rows(folder: Path) -> list[dict[str, str]]:
    return rows_of(folder / "outputs/gone/trials.csv")


def _ended_by(driver: Any, name: str) -> list[psutil.Process]:
    """Kill a process of a driver's Ray, or the driver; return what of it was left."""
    below = psutil.Process(driver.pid).children(recursive=True)
    process = (
        psutil.Process(driver.pid)
        if name == "driver"
        else next(child for child in below if _runs(child) and child.name() == name)
    )
    process.kill()
    exit_code(driver)
    until = time.monotonic() + AGENTS_SECONDS
    while (left := [child for child in below if _runs(child)]) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _statuses(folder: Path) -> Counter[str]:
    with sqlite3.connect(folder / "mlflow.db") as database:
        return Counter(status for (status,) in database.execute("select status from runs"))


@pytest.mark.parametrize(
    ("name", "is_called"),
    [("raylet", "its raylet"), ("gcs_server", "its control service (gcs_server)")],
)
def test_a_study_ends_in_good_order_and_goes_on(
    name: str, is_called: str, commands: Commands, ray_folder: Path, tmp_path: Path
) -> None:
    study = commands.start(*_STUDY, "search.num_trials=1000", folder=tmp_path)
    wait_until(
        lambda: len(_rows(tmp_path)) >= 3, process=study, said=(tmp_path / "err.txt").read_text
    )
    left = _ended_by(study, name)
    said = (tmp_path / "err.txt").read_text()
    assert study.returncode == 2, said
    assert said.startswith(
        f"autotune: cluster.address: local: Ray is gone: {is_called} has ended; "
    )
    assert said.count("\n") == 1
    assert (left, list(ray_folder.iterdir())) == ([], [])
    assert "RUNNING" not in _statuses(tmp_path)

    ended = _rows(tmp_path)
    goes_on = shlex.split(said.partition("goes on with: ")[2])
    assert goes_on[:3] == ["python", "-m", "autotune"]
    num_trials = len(ended) + 2
    resumed = commands.run(
        *[
            f"search.num_trials={num_trials}" if "num_trials" in each else each
            for each in goes_on[3:]
        ],
        folder=tmp_path,
    )
    assert resumed.returncode in (0, 3), resumed.stderr
    rows = _rows(tmp_path)
    assert [row for row in rows if row in ended] == ended
    assert len(rows) == len({row["trial"] for row in rows}) == num_trials
    assert {row["outcome"] for row in rows} <= {
        "REACHED",
        "MISSED",
        "TIMED_OUT",
        "DIVERGED",
    }, "no worker's death is held against a trial"
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        recorded = database.execute(
            "select value from tags join runs using (run_uuid) where key = 'autotune.trial' and"
            " status = 'FINISHED'"
        ).fetchall()
    assert sorted(number for (number,) in recorded) == sorted(row["trial"] for row in rows)
    assert "RUNNING" not in _statuses(tmp_path)
    assert list(ray_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "shows_it_runs", "name"),
    [
        (
            (
                "experiment=cnn_smoke",
                "target.value=0.3",
                "search.num_trials=2",
                "confirm.max_runs=1000",
                "confirm.num_seeds=500",
                "confirm.budget_fraction=null",
            ),
            "*/confirm-*.safetensors",
            "raylet",
        ),
        (
            ("compare", *_TRAINS, "a=[]", "b=[optimizer.lr=0.002]", "num_seeds=500"),
            "compare.json",
            "gcs_server",
        ),
    ],
    ids=["confirmation", "comparison"],
)
def test_a_confirmation_and_a_comparison_end_in_good_order(
    arguments: tuple[str, ...],
    shows_it_runs: str,
    name: str,
    commands: Commands,
    ray_folder: Path,
    tmp_path: Path,
) -> None:
    process = commands.start(*arguments, "study.name=gone", folder=tmp_path)
    wait_until(
        lambda: bool(list((tmp_path / "outputs/gone").glob(shows_it_runs))),
        process=process,
        said=(tmp_path / "err.txt").read_text,
    )
    left = _ended_by(process, name)
    said = (tmp_path / "err.txt").read_text()
    assert (process.returncode, said.count("\n")) == (2, 1), said
    assert "Ray is gone" in said
    assert (left, list(ray_folder.iterdir())) == ([], [])
    assert "RUNNING" not in _statuses(tmp_path)


def test_a_driver_that_is_killed_leaves_no_ray(
    commands: Commands, ray_folder: Path, tmp_path: Path
) -> None:
    study = commands.start(*_STUDY, "search.num_trials=1000", "tracking=none", folder=tmp_path)
    wait_until(lambda: len(_rows(tmp_path)) >= 1, process=study)
    left = _ended_by(study, "driver")
    assert left == []


def test_a_study_on_a_cluster_whose_head_is_gone_ends_in_good_order(
    commands: Commands, tmp_path: Path
) -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    address = cluster.address
    try:
        study = commands.start(
            *_STUDY,
            "search.num_trials=1000",
            f"cluster.address={address}",
            "cluster.connect_timeout_seconds=10",
            folder=tmp_path,
        )
        wait_until(
            lambda: len(_rows(tmp_path)) >= 2, process=study, said=(tmp_path / "err.txt").read_text
        )
        head = cluster.head_node.all_processes["gcs_server"][0].process
        os.kill(head.pid, signal.SIGKILL)
        assert exit_code(study) == 2
    finally:
        cluster.shutdown()
    said = (tmp_path / "err.txt").read_text()
    assert said.startswith(
        f"autotune: cluster.address: {address}: Ray is gone: its head does not answer (Connection"
        " refused) for 40 s (4 x cluster.connect_timeout_seconds); "
    )
    assert said.count("\n") == 1
    assert "RUNNING" not in _statuses(tmp_path)
    assert {row["outcome"] for row in _rows(tmp_path)} <= {
        "REACHED",
        "MISSED",
        "TIMED_OUT",
        "DIVERGED",
    }
