"""A Ray of this process's own: who reaches it, what is left of it, and what is said where it is gone or never came."""

import fcntl
import os
import stat
import threading
from pathlib import Path

import psutil
import pytest
import ray

from autotune.config.compose import Composer
from autotune.errors import ClusterError
from autotune.execution.cluster import ClusterSize, Connection
from autotune.execution.local_ray import LocalRay, _delete, _delete_stale


def _connection() -> Connection:
    return Connection(Composer(["experiment=cnn_smoke"]).compose().config.cluster)


def _ray_folder() -> Path:
    """The folder that keeps all files of the Ray that runs, sockets too."""
    return Path(ray._private.worker._global_node.get_session_dir_path()).parents[1]


def test_it_is_reached_from_this_machine_and_by_this_user_only(cluster: ClusterSize) -> None:
    @ray.remote
    def umask() -> int:
        mask = os.umask(0)
        os.umask(mask)
        return mask

    mask = os.umask(0)
    os.umask(mask)
    assert ray.get(umask.remote()) == mask, "what trainings write is readable for whom the user says"
    assert stat.S_IMODE(_ray_folder().stat().st_mode) == 0o700
    this = psutil.Process()
    listening = {
        (process.name(), socket.laddr.ip)
        for process in [this, *this.children(recursive=True)]
        for socket in process.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN
    }
    assert {name for name, _ in listening} >= {"raylet", "gcs_server"}
    assert {address.removeprefix("::ffff:") for _, address in listening} == {"127.0.0.1"}


@pytest.mark.parametrize("kind", ["file", "missing"])
def test_a_ray_without_a_folder_is_told_in_one_line(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file" if kind == "file" else "/proc/missing"))
    connection = _connection()
    with pytest.raises(
        ClusterError, match=r"^cluster.address: local: .*(file|/proc/missing) takes no files \(.*\); .*RAY_TMPDIR$"
    ) as caught:
        connection.size(threading.Event())
    assert "\n" not in str(caught.value)
    connection.close()


def test_a_ray_whose_start_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_folders_of_drivers_that_are_gone_are_deleted(tmp_path: Path) -> None:
    for name in ("autotune-ray-gone", "autotune-ray-used", "session_of_another"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    (tmp_path / "autotune-ray-young").mkdir()  # has no lock yet
    (tmp_path / "autotune-ray-link").symlink_to(tmp_path / "session_of_another")
    with (tmp_path / "autotune-ray-used" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _delete_stale(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"autotune-ray-used", "autotune-ray-young", "autotune-ray-link", "session_of_another"}


def test_a_folder_that_is_written_to_while_it_is_deleted_is_deleted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as busy:
        busy.setattr("autotune.execution.local_ray.shutil.rmtree", lambda path, **_: None)  # what is written keeps the folder
        for name in ("with", "without"):
            (tmp_path / f"autotune-ray-{name}" / "r" / "session").mkdir(parents=True)
        (tmp_path / "autotune-ray-with" / "lock").touch()
        _delete(tmp_path / "autotune-ray-with")
    _delete_stale(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["autotune-ray-without"]
    os.utime(tmp_path / "autotune-ray-without", (1e9, 1e9))
    _delete_stale(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_goes_with_its_guard_or_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for kills_guard in (False, True):
        local = LocalRay()
        assert len(list(tmp_path.iterdir())) == 1
        if kills_guard:
            local._guard.kill()
        local.end()
        local.end()
        assert list(tmp_path.iterdir()) == []


class _Gone:
    """A Ray that is gone once it is asked for."""

    def lost(self) -> str | None:
        return "its raylet was ended by SIGKILL"

    def end(self) -> None: ...


def test_work_that_hangs_in_a_ray_that_is_gone_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.execution.cluster._LEAVE_SECONDS", 0.1)
    connection, interrupt, hangs = _connection(), threading.Event(), threading.Event()

    def work() -> None:
        connection._ray = _Gone()
        threading.Timer(0.1, connection._is_gone).start()
        hangs.wait()

    with pytest.raises(ClusterError, match=r"^cluster.address: local: Ray is gone: its raylet was ended by SIGKILL$"):
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
        connection._ray = _Gone()
        raise RuntimeError("the actor died unexpectedly")

    with pytest.raises(ClusterError, match="Ray is gone"):
        connection.run(work, threading.Event())
