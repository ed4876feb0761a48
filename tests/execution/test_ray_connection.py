"""A Ray of this process's own: who reaches it, what is left of it, and what is said where it is
gone or never came.
"""

import atexit
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
from ray.tune import registry

from autotune.config.command_line import Interrupt
from autotune.config.compose import Composer
from autotune.config.schema import ClusterConfig
from autotune.errors import ClusterError
from autotune.execution import cluster
from autotune.execution.cluster import ClusterSize, RaySession, check_answers
from autotune.execution.ray_cluster import Heartbeat
from autotune.training.main_thread import in_thread


def _config() -> ClusterConfig:
    return Composer(["experiment=cnn_smoke"]).compose().config.cluster


def _connection() -> RaySession:
    return RaySession(_config())


def _ray_folder() -> Path:
    """The folder that keeps all files of the Ray that runs, sockets too."""
    return Path(ray._private.worker._global_node.get_session_dir_path()).parents[1]


def test_it_is_reached_by_this_user_only(
    cluster: ClusterSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    @ray.remote
    def umask() -> int:
        mask = os.umask(0)
        os.umask(mask)
        return mask

    mask = os.umask(0)
    os.umask(mask)
    assert ray.get(umask.remote()) == mask, (
        "what trainings write is readable for whom the user says"
    )
    assert stat.S_IMODE(_ray_folder().stat().st_mode) == 0o700
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # as somebody else without the token
    with pytest.raises(ClusterError, match="does not answer"):
        check_answers(ray.get_runtime_context().gcs_address, timeout_seconds=60)


@pytest.mark.parametrize("kind", ["file", "missing"])
def test_a_ray_without_a_folder_is_told_in_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file" if kind == "file" else "/proc/missing"))
    connection = _connection()
    with pytest.raises(
        ClusterError,
        match=(
            r"^cluster.address: local: .*(file|/proc/missing) takes no files \(.*\); set RAY_TMPDIR"
            r" to .* short path$"
        ),
    ) as caught:
        connection.size(Interrupt())
    assert "\n" not in str(caught.value)
    connection.close()


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_work_that_only_the_end_of_ray_interrupted_is_not_taken_for_the_users_interrupt(
    is_interrupted: bool,
) -> None:
    connection, interrupt = _connection(), Interrupt()
    connection._lost.set_result("its raylet has ended")
    if is_interrupted:  # and the work, which ends in good order as soon as it is, is kept
        interrupt.set()
        assert connection.run(interrupt.wait, interrupt)
    else:
        with pytest.raises(ClusterError, match="Ray is gone: its raylet has ended"):
            connection.run(interrupt.wait, interrupt)


def test_a_ray_that_the_signal_to_the_driver_reached_is_ended_and_not_waited_for(
    cluster: ClusterSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.execution.cluster._LEAVE_SECONDS", 0.1)
    connection, interrupt = _connection(), Interrupt()
    interrupt.set()
    heartbeat = Heartbeat(_config())
    ended, lives = (subprocess.Popen(command) for command in (["true"], ["sleep", "60"]))
    ended.wait()
    heartbeat._processes, connection._heartbeat = [lives], heartbeat
    assert connection.run(lambda: "in good order", interrupt) == "in good order"
    heartbeat._processes = [ended, lives]
    with pytest.raises(KeyboardInterrupt):
        connection.run(lambda: lives.wait() and threading.Event().wait(60), interrupt)
    assert lives.returncode == -signal.SIGKILL


FREES = """
import gc, threading, time
from types import SimpleNamespace

import ray

from autotune.config.compose import Composer
from autotune.execution.ray_cluster import connected

references, is_over = [], threading.Event()


def make_garbage():
    while not is_over.is_set():
        garbage = SimpleNamespace(held=references.pop())
        garbage.itself = garbage
        time.sleep(0.0002)


with connected(Composer(["experiment=cnn_smoke"]).compose().config.cluster):
    references += [ray.put(0) for _ in range(40000)]
    threading.Thread(target=make_garbage).start()
    gc.set_threshold(1000, 1, 1)
    time.sleep(0.3)
is_over.set()
assert references, "garbage was made all the while"
assert gc.isenabled()
"""


@pytest.mark.slow
@pytest.mark.ray
def test_a_process_outlasts_rays_end_whose_other_threads_hold_objects_of_rays() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FREES],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_a_head_that_is_silent_for_a_minute_is_waited_for(cluster: ClusterSize) -> None:
    heartbeat = Heartbeat(_config())
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        heartbeat._head = unused.getsockname()  # nothing listens there
        heartbeat._answered_at = time.monotonic() - 90.0
        assert heartbeat.lost() is None
        heartbeat._answered_at = time.monotonic() - 121.0
        assert heartbeat.lost() == (
            "its head does not answer (Connection refused) for 120 s"
            " (4 x cluster.connect_timeout_seconds)"
        )


def test_runs_that_end_as_ray_is_gone_are_not_taken_for_interrupted() -> None:
    connection, interrupt = _connection(), Interrupt()
    connection._lost.set_result("its raylet has ended")
    with pytest.raises(ClusterError, match="Ray is gone"):
        connection.run(connection.check, interrupt)
    assert not interrupt.is_set(), "a signal alone sets it: the study would end with 130"


def test_the_program_does_not_wait_at_its_end_for_a_ray_that_is_still_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection, started, unregistered = _connection(), threading.Event(), []
    monkeypatch.setattr(cluster, "_SHUTDOWN_SECONDS", 0.1)
    monkeypatch.setattr(atexit, "unregister", unregistered.append)
    connection._held = in_thread("ray", started.wait)
    connection.close()
    started.set()
    assert unregistered == [ray.shutdown, registry._unregister_all]
