"""A cluster of several kinds of GPU, made up: a study that asks for one kind is trained on
machines that have it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.slow

_MODULE = """
import os
import time
from pathlib import Path

def train(report, log, lr):
    with Path(log).open("a") as file:
        file.write(os.environ["RAY_RAYLET_PID"] + "\\n")
    time.sleep(0.05)
    report(metric=0.95)
"""

_EXPERIMENT = """# @package _global_
training: {_target_: noting.train, log: '???', lr: 0.1}
target: {metric: accuracy, value: 0.9, max_train_seconds: 10}
search_space:
  - training.lr: interval(0.01,0.5)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head with no GPU, a machine with an A100 and one with two H100, as Ray is told."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    for name, number in (("A100", 1), ("H100", 2)):
        cluster.add_node(num_cpus=2, num_gpus=number, resources={f"accelerator_type:{name}": 1})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def arguments(cluster: Cluster, tmp_path: Path) -> list[str]:
    """Of a study whose trainings note in nodes.txt where they ran."""
    (tmp_path / "noting.py").write_text(_MODULE)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "noting.yaml").write_text(_EXPERIMENT)
    log = f"training.log={tmp_path}/nodes.txt"
    where = [f"cluster.address={cluster.address}", "tracking=none", "study.name=n"]
    return ["experiment=noting", "--config-dir", "conf", "allowed_targets=[noting]", log, *where]


def test_trials_and_their_confirmation_are_trained_where_such_gpus_are(
    cluster: Cluster, arguments: list[str], commands: Any, tmp_path: Path
) -> None:
    budget = ["search=random", "search.num_trials=4", "confirm=quick"]
    commands.succeed(*arguments, *budget, "cluster.accelerator_type=H100", folder=tmp_path)
    [wanted] = [
        each
        for each in cluster.worker_nodes
        if "accelerator_type:H100" in each.get_resource_and_label_spec().resources
    ]
    where = (tmp_path / "nodes.txt").read_text().split()
    best = json.loads((tmp_path / "outputs/n/best.json").read_text())
    assert len(where) == 4 + best["best"]["num_runs"] + best["baseline"]["num_runs"]
    assert set(where) == {str(wanted.all_processes["raylet"][0].process.pid)}


def test_a_kind_that_the_cluster_has_not_is_one_line(
    arguments: list[str], commands: Any, tmp_path: Path
) -> None:
    ran = commands.run(*arguments, "cluster.accelerator_type=T4", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "autotune: cluster.accelerator_type: found T4, use null or A100, H100\n"
