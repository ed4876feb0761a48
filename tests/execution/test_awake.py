"""CPUs that are kept awake: by processes that give way to all others, end with whoever wants them, and leave quotas alone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from autotune.config.compose import Composer
from autotune.execution import awake, cluster
from autotune.execution.awake import has_idle_priority, kept_awake
from tests.support.patience import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SCHED_IDLE is Linux's")


def children(of: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(of).children() if awake._MAIN in child.cmdline()]


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """This process's, as if nothing limited their use."""
    found = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setattr(awake, "_cpus", lambda: found)
    return found


def test_a_process_that_gives_way_computes_on_each_cpu_while_it_is_wanted(cpus: list[int]) -> None:
    with kept_awake():
        wait_until(lambda: len(children(os.getpid())) == len(cpus))  # a command line may show only a moment after Popen returns
        processes = children(os.getpid())
        wait_until(lambda: all(has_idle_priority(process.pid) for process in processes))
        assert sorted(process.cpu_affinity() for process in processes) == [[cpu] for cpu in cpus]
        assert not has_idle_priority(os.getpid())
    assert not children(os.getpid())


def test_a_session_that_computes_gets_the_cpu_where_linux_shares_it_out_among_sessions(cpus: list[int]) -> None:
    code = f"import os, time\nos.sched_setaffinity(0, [{cpus[0]}])\nwhile time.process_time() < 2: pass"
    with kept_awake():
        wait_until(lambda: all(has_idle_priority(process.pid) for process in children(os.getpid())))
        [rival] = [process for process in children(os.getpid()) if process.cpu_affinity() == cpus[:1]]
        before = rival.cpu_times().user
        subprocess.run([sys.executable, "-I", "-S", "-c", code], start_new_session=True, check=True)
        assert rival.cpu_times().user - before < 0.5  # of CPU time: it had as much as the other


def test_it_ends_with_the_process_that_wanted_it(tmp_path: Path) -> None:
    code = "import time; from autotune.execution import awake; awake._cpus = lambda: [0]\nwith awake.kept_awake(): time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", code.replace("[0]", str(sorted(os.sched_getaffinity(0))[:1]))]) as owner:
        wait_until(lambda: len(children(owner.pid)) == 1)
        (spinner,) = children(owner.pid)
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not spinner.is_running() or spinner.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("settings", "num_gpus", "is_awake"),
    [([], 0, True), (["cluster.keep_cpus_awake=false"], 0, False), ([], 1, False), (["cluster.address=localhost:1"], 0, False)],
)
def test_they_are_kept_awake_while_ray_runs_on_a_machine_without_a_gpu(
    cpus: list[int], monkeypatch: pytest.MonkeyPatch, settings: list[str], num_gpus: int, is_awake: bool
) -> None:
    monkeypatch.setattr("ray.init", lambda **options: None)
    monkeypatch.setattr(cluster.LocalRay, "start", lambda self, **options: None)
    monkeypatch.setattr(cluster, "_RunningCluster", lambda: None)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr(cluster, "_check_answers", lambda *arguments: None)
    monkeypatch.setattr(cluster, "_machines", lambda kind: [{"CPU": 2.0, "GPU": float(num_gpus)}])
    with cluster.connected(Composer(["experiment=cnn", *settings]).compose().config.cluster):
        wait_until(lambda: len(children(os.getpid())) == (len(cpus) if is_awake else 0))
    assert not children(os.getpid())
