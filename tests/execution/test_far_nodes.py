"""A Ray cluster whose nodes are hosts of their own (namespaces): a driver far from its trials.

No host sees another's processes or Ray's files, and the trials' ones do not see the study's folder.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.namespaces import Host, hosts
from tests.support.patience import exit_code, wait_until
from tests.support.studies import rows_of

pytestmark = pytest.mark.slow


@dataclass(frozen=True, kw_only=True)
class FarCluster:
    """A head, two nodes with two CPUs each, and one on which the driver runs."""

    head: Host
    nodes: list[Host]
    driver: Host
    folder: Path
    """Of the driver: no node sees it."""

    @property
    def address(self) -> str:
        return f"{self.head.address}:6379"

    def start(self, name: str, *arguments: str) -> Any:
        command = [
            sys.executable,
            "-m",
            "autotune",
            f"cluster.address={self.address}",
            f"study.name={name}",
            *arguments,
        ]
        return self.driver.start(*command, folder=self.folder, log=self.folder / f"{name}.txt")

    def join(self, host: Host) -> None:
        """Start Ray on a host."""
        where = (
            ["--head", "--port=6379", "--include-dashboard=false"]
            if host is self.head
            else [f"--address={self.address}"]
        )
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            "--disable-usage-stats",
            *where,
        ]
        size = [f"--node-ip-address={host.address}", f"--num-cpus={2 * (host in self.nodes)}"]
        log = self.folder.parent / f"{host.name}.txt"
        process = host.start("env", "RAY_AUTH_MODE=token", *command, *size, log=log)
        wait_until(
            lambda: "Ray runtime started" in log.read_text(), process=process, said=log.read_text
        )


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarCluster]:
    folder = tmp_path_factory.mktemp("far") / "driver"
    folder.mkdir()
    with hosts(4) as (head, *nodes, driver):
        cluster = FarCluster(head=head, nodes=nodes, driver=driver, folder=folder)
        for host in (head, *nodes, driver):
            host.hide(Path("/tmp/ray"))
            if host is not driver:
                host.hide(folder)
            cluster.join(host)
        yield cluster


def test_a_driver_on_another_node_than_the_trials_comes_to_a_confirmed_result(
    far: FarCluster,
) -> None:
    study = far.start("far", "experiment=cnn_smoke", "target.value=0.88")
    assert exit_code(study) == 0, (far.folder / "far.txt").read_text()
    assert len(rows_of(far.folder / "outputs/far/trials.csv")) == 4
    assert (far.folder / "outputs/far/best.yaml").is_file()
    assert "confirmation run 1 of" in (far.folder / "far.txt").read_text()


_OF_FOUR = """
import os, sys, torch, autotune
from torch import distributed

def fit(devices, lr):
    distributed.init_process_group("gloo")
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK")
    ranks = torch.tensor([float(os.environ[name]) for name in names])
    distributed.all_reduce(ranks)
    assert ranks.tolist() == [6, 2, 2], ranks  # 0, 1, 2, 3, and 0, 1 on machines 0 and 1
    assert (os.environ["LOCAL_WORLD_SIZE"], devices) == ("2", 4)
    for epoch in range(1, 4):
        autotune.report(lr * epoch * devices, reduce="mean", epoch=epoch)

def fit_by_lightning(lr):
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Model(BoringModel):
        def validation_step(self, batch, batch_idx):
            self.log("score", lr * self.trainer.world_size * (self.current_epoch + 1))

    Trainer(
        accelerator="cpu", devices=2, num_nodes=2, strategy="ddp", max_epochs=3, logger=False,
        num_sanity_val_steps=0, callbacks=[autotune.lightning.ReportCallback("score")],
    ).fit(Model())

autotune.tune(
    globals()[sys.argv[2]],
    space={"lr": [0.1, 0.2]},
    baseline={"lr": 0.1},
    target=autotune.target("score", at_least=1.1, max_seconds=60),
    devices=4,
    trials=2,
    confirm="none",
    name="four",
    tracking="none",
    cluster={"address": sys.argv[1]},
)
"""


@pytest.mark.parametrize("function", ["fit", "fit_by_lightning"])
def test_a_function_of_four_ranks_trains_on_two_machines(
    far: FarCluster, tmp_path: Path, function: str
) -> None:
    (tmp_path / "four.py").write_text(_OF_FOUR)
    log = tmp_path / "four.txt"
    command = (sys.executable, "four.py", far.address, function)
    study = far.driver.start(*command, folder=tmp_path, log=log)
    exit_code(study)
    rows = rows_of(tmp_path / "outputs/four/trials.csv")
    assert {row["outcome"] for row in rows} == {"REACHED"}, log.read_text()
    assert {row["num_workers"] for row in rows} == {"4"}
