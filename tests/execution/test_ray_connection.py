"""A Ray of this process's own: who reaches it, what is left of it, and what is said where it is
gone or never came.
"""

import os
import stat
import threading
from pathlib import Path

import pytest
import ray

from autotune.config.compose import Composer
from autotune.errors import ClusterError
from autotune.execution.cluster import ClusterSize, RayConnection
from autotune.execution.ray_cluster import _check_answers


def _connection() -> RayConnection:
    return RayConnection(Composer(["experiment=cnn_smoke"]).compose().config.cluster)


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
        _check_answers(ray.get_runtime_context().gcs_address, timeout_seconds=60)


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
        connection.size(threading.Event())
    assert "\n" not in str(caught.value)
    connection.close()


def test_a_ray_whose_start_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: str) -> None:
        Path(options["_temp_dir"]).mkdir()
        raise SystemExit(1)  # as Ray does where a process of its own cannot be started

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    connection = _connection()
    with pytest.raises(ClusterError, match=r"^cluster.address: local: Ray did not start; "):
        connection.size(threading.Event())
    connection.close()
    assert list(tmp_path.iterdir()) == []


class _Gone:
    """A Ray that is gone once it is asked for."""

    def lost(self) -> str | None:
        return "its raylet was ended by SIGKILL"


def test_work_that_hangs_in_a_ray_that_is_gone_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.execution.cluster._LEAVE_SECONDS", 0.1)
    connection, interrupt, hangs = _connection(), threading.Event(), threading.Event()

    def work() -> None:
        connection._heartbeat = _Gone()  # type: ignore[assignment]
        threading.Timer(0.1, connection._is_gone).start()
        hangs.wait()

    with pytest.raises(
        ClusterError,
        match=r"^cluster.address: local: Ray is gone: its raylet was ended by SIGKILL$",
    ):
        connection.run(work, interrupt)
    assert interrupt.is_set()
    assert connection.is_lost
    hangs.set()


def test_work_with_ray_returns_and_raises_as_if_called() -> None:
    connection, interrupt = _connection(), threading.Event()
    assert connection.run(lambda: 3, interrupt) == 3
    with pytest.raises(ZeroDivisionError):
        connection.run(lambda: 1 // 0, interrupt)
    assert not interrupt.is_set()
    connection.check()


def test_an_error_that_is_due_to_a_ray_that_is_gone_is_told_as_that() -> None:
    connection = _connection()

    def work() -> None:
        connection._heartbeat = _Gone()  # type: ignore[assignment]
        raise RuntimeError("the actor died unexpectedly")

    with pytest.raises(ClusterError, match="Ray is gone"):
        connection.run(work, threading.Event())
