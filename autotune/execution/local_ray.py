"""A Ray on this machine that belongs to this process, listens on loopback only, and leaves nothing behind.

Ray's files lie in a folder that no other user may open. A guard, a process of its own, is told of all that Ray starts here. Once this
process says so, or is gone, however that came, the guard ends those processes with all of their sessions and deletes the folder: Ray itself
would leave its agents, workers of a raylet that was killed, and its folder. The folder of a driver that was killed together with its guard
is deleted by the next driver.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import ClusterError
from autotune.imports import absent

_FOLDERS = "autotune-ray-"
"""What the names of the folders begin with; short, since Ray makes sockets in them and the kernel limits a socket's path."""
_LOCK = "lock"
_LOCKED_SECONDS = 60.0
"""Age of a folder that would have its lock if its driver were still about to make that."""
_ACCEPTED = "accepted is a folder of a short path that can be written, said by RAY_TMPDIR"
_HOST = "127.0.0.1"
_GUARD = """
import os, shutil, signal, sys, time
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
sessions = {line.strip() for line in sys.stdin}
def of_ray():
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/stat") as file:
                state, _, _, session = file.read().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if session in sessions and state not in "ZX":
            yield int(process)
for _ in range(100):
    left = list(of_ray())
    for process in left:
        try:
            os.kill(process, signal.SIGKILL)
        except OSError:
            pass
    if not left:
        break
    time.sleep(0.05)
shutil.rmtree(sys.argv[1] + "/r", ignore_errors=True)
if not os.path.exists(sys.argv[1] + "/r"):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
"""Its end is ``_delete``."""


class LocalRay:
    """A Ray that this process starts and ends.

    Raises:
        ClusterError: the folder for Ray's files cannot be made.
    """

    def __init__(self) -> None:
        base = _base()
        _delete_stale(base)
        try:
            base.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=_FOLDERS, dir=base))  # no other user may open it
            self._lock = _locked(self._folder)
        except OSError as error:
            raise ClusterError(f"cluster.address: local: {base} takes no files ({error.strerror}); {_ACCEPTED}") from error
        self._guard: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603  # our own interpreter and code
            [sys.executable, "-I", "-S", "-c", _GUARD, str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # signals to the driver's group are for the driver
        )
        self._needed: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, **options: Any) -> None:
        """Call ``ray.init`` with these options."""
        import ray  # noqa: PLC0415  # only after the environment is set

        folder = self._folder / "r"  # Ray makes it and all in it writable by all
        with _started_private(self._tell_guard), absent("ray.dashboard.optional_deps"):  # without them, Ray's agent does what is needed
            ray.init(address="local", include_dashboard=False, _node_ip_address=_HOST, _temp_dir=str(folder), **options)
        processes: Mapping[str, Any] = ray._private.worker._global_node.all_processes  # noqa: SLF001  # nothing public has them
        self._needed = {name: processes[kind][0].process for kind, name in _NEEDED.items()}

    def lost(self) -> str | None:
        """Which of the processes that Ray cannot do without has ended, and how; None if all are there."""
        for name, process in self._needed.items():
            code = process.poll()
            if code is not None:
                return f"its {name} {'was ended by ' + signal.Signals(-code).name if code < 0 else f'ended with exit code {code}'}"
        return None

    def end(self) -> None:
        """End what Ray has started and still runs, and delete its folder; called again, delete what was written there since."""
        assert self._guard.stdin is not None
        if not self._guard.stdin.closed:
            with contextlib.suppress(OSError):  # the guard was killed
                self._guard.stdin.close()
            self._guard.wait()
            os.close(self._lock)
        _delete(self._folder)

    def _tell_guard(self, session: int) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{session}\n".encode())
        self._guard.stdin.flush()


_NEEDED = {"gcs_server": "control service (gcs_server)", "raylet": "raylet"}
"""The processes that Ray cannot do without: name by Ray's kind of process."""
_UNUSED = ("start_api_server", "start_log_monitor", "start_monitor")
"""Methods of Ray's ``Node`` that start what nothing here uses, which takes seconds: its dashboard's server, which it starts also without a
dashboard, the process that shows workers' logs, and the autoscaler."""


def _base() -> Path:
    """The folder for temporary files that Ray would take, which it tells only by private functions of changing names."""
    short = "/tmp"  # noqa: S108  # as Ray takes on macOS; LocalRay makes a folder of its own there
    return Path(os.environ.get("RAY_TMPDIR") or (tempfile.gettempdir() if sys.platform == "linux" else short))


def _locked(folder: Path) -> int:
    """Lock a folder of Ray's files as long as this process lives; return the lock's file descriptor."""
    path = folder / f"{_LOCK}.new"  # only a folder that has a lock can be stale
    lock = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    path.rename(folder / _LOCK)
    return lock


def _delete(folder: Path) -> None:
    """Delete a folder of Ray's files; while something still writes there it keeps its lock, by which the next driver knows it as stale."""
    shutil.rmtree(folder / "r", ignore_errors=True)
    if not (folder / "r").exists():
        shutil.rmtree(folder, ignore_errors=True)


def _delete_stale(base: Path) -> None:
    """Delete folders of Ray's files whose drivers, of this user, are gone."""
    for folder in base.glob(f"{_FOLDERS}*"):
        try:
            status = folder.stat(follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            if not (folder / _LOCK).exists() and time.time() - status.st_mtime > _LOCKED_SECONDS:
                _delete(folder)  # something was written there after all had been deleted
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete(folder)
        except OSError:  # in use, or another process deletes it
            continue


@contextlib.contextmanager
def _started_private(on_session: Callable[[int], None]) -> Iterator[None]:
    """Have Ray start the processes that it needs, in sessions of their own, and at loopback in place of another interface.

    Args:
        on_session: called with each new session's id. Signals to the driver's process group do not reach it.
    """
    from ray._private import node, services  # noqa: PLC0415  # only after the environment is set

    popen, resolve = services.ConsolePopen, services.resolve_ip_for_localhost
    unused = {name: getattr(node.Node, name) for name in _UNUSED if hasattr(node.Node, name)}

    class PopenInSession(popen):  # type: ignore[misc,valid-type]  # ray has no types
        def __init__(self, *arguments: object, **named: object) -> None:
            super().__init__(*arguments, **named, start_new_session=True)
            on_session(self.pid)

    services.ConsolePopen, services.resolve_ip_for_localhost = PopenInSession, lambda host: host
    for name in unused:
        setattr(node.Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in unused.items():
            setattr(node.Node, name, method)
        services.ConsolePopen, services.resolve_ip_for_localhost = popen, resolve
