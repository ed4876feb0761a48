"""A Ray cluster of three nodes (and a head that takes no trials) on one machine, which loses one
in the middle of a study.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from autotune.files import STATE_FILE
from tests.support.patience import exit_code, wait_until
from tests.support.studies import rows_of, runs_of, trained_at_once

pytestmark = pytest.mark.slow

NUM_TRIALS = 10


def num_ended(folder: Path) -> int:
    return len(rows_of(folder / "outputs/lost/trials.csv"))


def is_training(node: Any) -> bool:
    """Whether a worker of the node has a trial: it is a child of the node's raylet, and says
    what it runs.
    """
    raylets = {each.process.pid for each in node.all_processes["raylet"]}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent in raylets and b"TrialWorker.train" in (path.parent / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


def test_the_trials_of_a_node_that_is_killed_run_again_elsewhere(
    commands: Any, tmp_path: Path
) -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    training: list[Any] = []

    def has_one_to_kill() -> bool:
        training[:] = filter(is_training, nodes) if num_ended(tmp_path) >= 2 else []
        return bool(training)

    try:
        study = commands.start(
            "experiment=cnn",
            f"cluster.address={cluster.address}",
            "study.name=lost",
            "search=random",
            "stopping=none",
            "confirm=none",
            f"search.num_trials={NUM_TRIALS}",
            "search.time_budget_seconds=null",
            "target.value=0.9999",
            "target.max_train_seconds=4",
            "epochs=interval(200.0,300.0)",
            folder=tmp_path,
        )
        wait_until(has_one_to_kill, process=study, said=(tmp_path / "out.txt").read_text)
        cluster.remove_node(training[0], allow_graceful=False)
        assert exit_code(study) in (0, 3), (tmp_path / "err.txt").read_text()
    finally:
        cluster.shutdown()
    rows = rows_of(tmp_path / "outputs/lost/trials.csv")
    assert len(rows) == NUM_TRIALS, "the whole budget, nothing counted twice"
    assert {row["outcome"] for row in rows} <= {"REACHED", "MISSED", "TIMED_OUT", "DIVERGED"}
    assert trained_at_once(tmp_path / "outputs/lost/trace.csv"), (
        "workers start beside each other, none is given up for one that is free"
    )
    stretches = rows_of(tmp_path / "outputs/lost/trace.csv")
    lost = {row["trial"] for row in stretches if row["outcome"] == "LOST"}
    assert lost
    assert lost <= {row["trial"] for row in rows}, "they continue under their own numbers"
    runs = [run for run in runs_of(tmp_path) if "autotune.trial" in run.data.tags]
    of_trials = [run.data.tags["autotune.trial"] for run in runs]
    assert sorted(of_trials) == sorted(row["trial"] for row in rows), "one run each"


def test_what_trains_on_a_node_that_is_drained_is_saved_and_continues_elsewhere(
    commands: Any, tmp_path: Path
) -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    node = cluster.add_node(num_cpus=1)
    out, states = tmp_path / "out.txt", tmp_path / "outputs/lost/states/trial-0"
    try:
        study = commands.start(
            "experiment=cnn",
            f"cluster.address={cluster.address}",
            "study.name=lost",
            "search=random",
            "stopping=none",
            "confirm=none",
            "search.num_trials=1",
            "search.time_budget_seconds=null",
            "checkpoint.every_minutes=null",
            "target.value=0.9999",
            "target.max_train_seconds=40",
            "epochs=3000",
            folder=tmp_path,
        )
        wait_until(lambda: is_training(node), process=study, said=out.read_text)
        drain = ["-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
        drain += ["--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        drain += ["--reason-message", "spot", "--deadline-remaining-seconds", "25"]
        subprocess.run([sys.executable, *drain], check=True)
        wait_until(lambda: any(states.glob(f"*/{STATE_FILE}")), process=study, said=out.read_text)
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=1)
        assert exit_code(study) in (0, 3), (tmp_path / "err.txt").read_text()
    finally:
        cluster.shutdown()
    assert "is being drained: what trains there is saved" in " ".join(out.read_text().split())
    [row] = rows_of(tmp_path / "outputs/lost/trials.csv")
    assert row["outcome"] in ("TIMED_OUT", "REACHED")
    stretches = rows_of(tmp_path / "outputs/lost/trace.csv")
    assert [stretch["outcome"] for stretch in stretches] == ["LOST", row["outcome"]]
    assert float(stretches[1]["from_train_seconds"]) > 0, "it continues from its state"


def test_a_study_whose_machines_have_all_left_says_so_and_goes_on_when_one_comes(
    commands: Any, tmp_path: Path
) -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    node = cluster.add_node(num_cpus=1)
    out = tmp_path / "out.txt"
    try:
        study = commands.start(
            "experiment=cnn",
            f"cluster.address={cluster.address}",
            "study.name=lost",
            "search=random",
            "confirm=none",
            "search.num_trials=6",
            "search.time_budget_seconds=null",
            "target.value=0.9",
            folder=tmp_path,
        )
        wait_until(lambda: num_ended(tmp_path) >= 2, process=study, said=out.read_text)
        cluster.remove_node(node, allow_graceful=False)
        waiting = "waits for machines: it takes 1 CPU and 0 GPU, and Ray has 0 CPU and 0 GPU"
        wait_until(
            lambda: waiting in " ".join(out.read_text().split()), process=study, said=out.read_text
        )
        cluster.add_node(num_cpus=1)
        assert exit_code(study) == 0, (tmp_path / "err.txt").read_text()
    finally:
        cluster.shutdown()
    assert num_ended(tmp_path) == 6
