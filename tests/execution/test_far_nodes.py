"""A Ray cluster whose nodes are hosts of their own (namespaces): a driver far from its trials, and a node that is cut off for a minute.

No host sees another's processes or Ray's files, and the trials' ones do not see the study's folder.
"""

import csv
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.support.namespaces import Host, hosts
from tests.support.patience import exit_code, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")]

_CUT_OFF_SECONDS = 60
_LONG = (
    "search=random",
    "search.time_budget_seconds=null",
    "stopping=none",
    "confirm=none",
    "target.value=0.9999",
    "target.max_train_seconds=12",
    "epochs=interval(2000.0,3000.0)",
)
"""Trials that take their time, but for the first, which is the baseline."""


@dataclass(frozen=True, kw_only=True)
class FarCluster:
    """A head, three nodes with a CPU each, and one on which the driver runs."""

    head: Host
    nodes: list[Host]
    driver: Host
    folder: Path
    """Of the driver: no node sees it."""

    @property
    def address(self) -> str:
        return f"{self.head.address}:6379"

    def start(self, name: str, *arguments: str) -> Any:
        command = [sys.executable, "-m", "autotune", f"cluster.address={self.address}", f"study.name={name}", *arguments]
        return self.driver.start(*command, folder=self.folder, log=self.folder / f"{name}.txt")

    def join(self, host: Host) -> None:
        """Start Ray on a host."""
        where = ["--head", "--port=6379", "--include-dashboard=false"] if host is self.head else [f"--address={self.address}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *where]
        size = [f"--node-ip-address={host.address}", f"--num-cpus={int(host in self.nodes)}"]
        log = self.folder.parent / f"{host.name}.txt"
        process = host.start("env", "RAY_AUTH_MODE=token", *command, *size, log=log)
        wait_until(lambda: "Ray runtime started" in log.read_text(), process=process, said=log.read_text)

    def rows(self, name: str) -> list[dict[str, str]]:
        path = self.folder / "outputs" / name / "trials.csv"
        if not path.is_file():
            return []
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    def runs(self, name: str) -> list[Any]:
        client = MlflowClient(f"sqlite:///{self.folder}/mlflow.db")
        found = client.search_runs([each.experiment_id for each in client.search_experiments()])
        return [each for each in found if each.data.tags.get("autotune.study") == name and "autotune.trial" in each.data.tags]


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarCluster]:
    folder = tmp_path_factory.mktemp("far") / "driver"
    folder.mkdir()
    with hosts(5) as (head, *nodes, driver):
        cluster = FarCluster(head=head, nodes=nodes, driver=driver, folder=folder)
        for host in (head, *nodes, driver):
            host.hide(Path("/tmp/ray"))
            if host is not driver:
                host.hide(folder)
            cluster.join(host)
        yield cluster


def test_a_driver_on_another_node_than_the_trials_comes_to_a_confirmed_result(far: FarCluster) -> None:
    study = far.start("far", "experiment=cnn_smoke", "target.value=0.88")
    assert exit_code(study) == 0, (far.folder / "far.txt").read_text()
    assert len(far.rows("far")) == 4
    assert (far.folder / "outputs/far/best.yaml").is_file()
    assert "confirmation run 1 of" in (far.folder / "far.txt").read_text()


def test_a_training_of_two_nodes_that_loses_one_is_run_again(far: FarCluster) -> None:
    study = far.start(
        "gang", "experiment=cnn", "parallelism=ddp", "cluster.placement=strict_spread", "search.num_trials=2", *_LONG
    )  # fmt: skip
    wait_until(lambda: len(_others_for(3, far)) == 1, process=study, said=(far.folder / "gang.txt").read_text)
    (cut,) = _others(far)
    cut.pull()
    try:
        assert exit_code(study) in (0, 3), (far.folder / "gang.txt").read_text()
    finally:
        cut.plug()
    _nothing_is_lost(far, "gang", 2)
    far.join(cut)


def test_a_node_that_is_cut_off_for_a_minute_costs_its_trials_another_run(far: FarCluster) -> None:
    study = far.start("cut", "experiment=cnn", "search.num_trials=8", *_LONG)
    wait_until(lambda: any(map(_trains, far.nodes)), process=study)
    cut = next(filter(_trains, far.nodes))
    cut.pull()
    time.sleep(_CUT_OFF_SECONDS)
    cut.plug()
    assert exit_code(study) in (0, 3), (far.folder / "cut.txt").read_text()
    _nothing_is_lost(far, "cut", 8)


def _nothing_is_lost(far: FarCluster, name: str, num_trials: int) -> None:
    """Every trial of the budget has its end once, and each that was lost was run again."""
    rows, runs = far.rows(name), far.runs(name)
    assert len(rows) == num_trials
    assert {row["outcome"] for row in rows} <= {"REACHED", "MISSED", "TIMED_OUT", "DIVERGED"}
    lost = {run.data.tags["autotune.trial"] for run in runs if run.data.tags["autotune.outcome"] == "LOST"}
    again = {run.data.tags["autotune.retry_of"] for run in runs if "autotune.retry_of" in run.data.tags}
    assert lost
    assert again == lost
    assert {run.data.tags["autotune.trial"] for run in runs} - lost == {row["trial"] for row in rows}


def _others(far: FarCluster) -> list[Host]:
    """Hosts on which a worker trains that is not its trial's first."""
    return [host for host in far.nodes if any("_Other.follow" in each for each in _command_lines(host))]


def _others_for(seconds: float, far: FarCluster) -> list[Host]:
    """The hosts that are others now and still are some seconds later: a training that was lost meanwhile is begun again."""
    others = _others(far)
    if others:
        time.sleep(seconds)
    return others if _others(far) == others else []


def _trains(host: Host) -> bool:
    return any("TrialWorker.train" in each for each in _command_lines(host))


def _command_lines(host: Host) -> Iterator[str]:
    """Of the processes in the host's namespace."""
    inside = Path(f"/proc/{host.first}/ns/pid").readlink()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "ns/pid").readlink() == inside:
                yield (path / "cmdline").read_text()
        except OSError:
            continue
