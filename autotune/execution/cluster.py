"""Connecting to Ray: to a local instance started for the study, or to a running cluster."""

import contextlib
import ctypes
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.config.schema import ClusterConfig
from autotune.errors import ClusterError
from autotune.execution.awake import kept_awake
from autotune.execution.task_run import ACCELERATOR, TrialTask

if TYPE_CHECKING:
    from autotune.training.device import Capabilities  # imports torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ClusterSize:
    """Total resources of the cluster, or of its machines with one kind of GPU."""

    num_cpus: int
    num_gpus: int
    num_nodes: int

    def holds(self, tasks: Sequence[TrialTask]) -> bool:
        """Whether tasks surely fit side by side; on several nodes a task of several workers surely fits only by itself."""
        if self.num_nodes > 1 and len(tasks) > 1 and any(task.num_workers > 1 for task in tasks):
            return False
        return sum(task.num_cpus for task in tasks) <= self.num_cpus and sum(task.num_gpus for task in tasks) <= self.num_gpus


class Room:
    """Whether the cluster has room for another trial beside those that are being trained.

    Args:
        num_cpus, num_gpus: resources that one trial takes.
        accelerator_type: kind of GPU of the machines that count; None counts all machines.
        most: upper limit on trials at a time; None means as many as fit.
        can_grow: whether ``most`` trials are started even if they do not fit now, since an elastic cluster grows when it is asked for more.
    """

    def __init__(self, *, num_cpus: int, num_gpus: int, accelerator_type: str | None, most: int | None, can_grow: bool) -> None:
        self._num_cpus, self._num_gpus = num_cpus, num_gpus
        self._accelerator_type = accelerator_type
        self._most = most
        self._can_grow = can_grow and most is not None
        self._size = (0, 0)
        self._asked_at = -math.inf

    def __call__(self, tasks: Sequence[TrialTask]) -> bool:
        """Whether another trial fits beside the tasks that are being trained."""
        if not tasks:
            return True
        if self._most is not None and len(tasks) >= self._most:
            return False
        if self._can_grow:
            return True
        cpus, gpus = self._resources()
        taken_cpus, taken_gpus = sum(task.num_cpus for task in tasks), sum(task.num_gpus for task in tasks)
        return taken_cpus + self._num_cpus <= cpus and taken_gpus + self._num_gpus <= gpus

    def _resources(self) -> tuple[int, int]:
        """Numbers of CPUs and GPUs of the machines that are alive now; asked again every few seconds, since nodes come and go."""
        if time.monotonic() - self._asked_at > _ASK_AGAIN_SECONDS:
            size = _size_of(_machines(self._accelerator_type))
            self._size, self._asked_at = (size.num_cpus, size.num_gpus), time.monotonic()
        return self._size


_ASK_AGAIN_SECONDS = 2.0
_POLL_SECONDS = 0.2
_SIGACTION_BYTES = 512
"""Room for C's ``struct sigaction``, which takes 152 bytes on Linux."""
_START_PATIENCE_SECONDS = 8.0
"""Seconds that an interrupted driver waits for a Ray that is still starting."""


def cluster_capabilities(config: ClusterConfig) -> "Capabilities":
    """What the machines of a running cluster can run, measured by a worker on one of its nodes: a GPU node if it has any.

    Raises:
        ClusterError: the cluster does not answer, or no worker started on it.
    """
    from autotune.training.device import local_capabilities  # noqa: PLC0415  # imports torch

    with connected(config) as size:
        import ray  # noqa: PLC0415  # only after connected() has set the environment

        resources = {"num_cpus": 0, "num_gpus": 1 if size.num_gpus else 0, "accelerator_type": config.accelerator_type}
        probe = ray.remote(local_capabilities).options(**resources).remote()
        try:
            node_capabilities: Capabilities = ray.get(probe, timeout=_PROBE_SECONDS)
        except (ray.exceptions.RayError, ImportError) as error:
            raise ClusterError(f"cluster.address: {config.address}: no worker came up ({_first_line(error)})") from error
        return replace(node_capabilities, num_cpus=size.num_cpus, num_gpus=size.num_gpus)


_PROBE_SECONDS = 60.0


@contextlib.contextmanager
def connected(config: ClusterConfig) -> Iterator[ClusterSize]:
    """Connect to Ray while the context lasts. A local Ray is shut down at the end, and if it has no GPU the CPUs are kept awake meanwhile.

    Raises:
        ClusterError: the cluster does not answer, has no machine of the kind asked for, or cannot hold even one worker.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    address = None if config.address == "local" else config.address
    if address is not None:
        _check_answers(address, config.connect_timeout_seconds)
    import ray  # noqa: PLC0415  # after the environment is set, and only when trials run

    _log_to_autotune("ray")
    options = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    try:
        with _kept_handler(signal.SIGTERM), _in_own_process_groups():
            if address is None:
                os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 lets timed workers wait for all other processes
                for name in ("authentication", "worker"):  # mute: our own Ray wants a token, and its SIGTERM handler is not installed
                    logging.getLogger(f"ray._private.{name}").setLevel(logging.ERROR)
                ray.init(address="local", num_cpus=config.num_cpus, num_gpus=config.num_gpus, include_dashboard=False, **options)
            else:
                ray.init(address=address, **options)
    except Exception as error:  # Ray raises plain Exception where it does not start in time
        raise ClusterError(f"cluster.address: {config.address or 'local'}: {_first_line(error)}{_advice(error, address)}") from error
    try:
        _check_has(config.accelerator_type)
        size = _size_of(_machines(config.accelerator_type))
        if size.num_cpus < config.cpus_per_worker:
            raise ClusterError(
                f"cluster.cpus_per_worker: found {config.cpus_per_worker}, accepted is at most the {size.num_cpus} CPUs of the cluster"
            )
        with kept_awake() if config.keep_cpus_awake and address is None and not size.num_gpus else contextlib.nullcontext():
            yield size
    finally:
        ray.shutdown()


class Connection:
    """A connection to Ray that is made in a thread of its own, so that the driver does not wait while Ray starts.

    The thread lives as long as Ray does: otherwise the kernel would end the processes that it started together with the thread.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._size: Future[ClusterSize] = Future()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to connect, unless that has begun already."""
        if self._thread is None:
            # requests, which Ray imports, ignores this itself, but a catch_warnings() of another thread (Hydra's) may undo that
            warnings.filterwarnings("ignore", message="SOCKS support in urllib3")
            self._thread = threading.Thread(target=self._hold, name="ray", daemon=True)
            self._thread.start()

    def size(self, interrupt: threading.Event) -> ClusterSize:
        """Wait for the connection and return the cluster's resources.

        Raises:
            ClusterError: the cluster does not answer, has no machine of the kind asked for, or cannot hold even one worker.
            KeyboardInterrupt: ``interrupt`` was set meanwhile.
        """
        self.start()
        while not wait([self._size], timeout=_POLL_SECONDS).done:
            if interrupt.is_set():
                raise KeyboardInterrupt
        size = self._size.result()
        if threading.current_thread() is threading.main_thread():  # Ray's own handler, in C++, has replaced Python's
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        return size

    def close(self) -> None:
        """Disconnect and wait until that is done: Ray ends a process that frees a Ray object meanwhile.

        A Ray that is still starting is waited for some seconds only; the kernel ends its processes together with this one.
        """
        self._is_over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(None if self._size.done() else _START_PATIENCE_SECONDS)

    def _hold(self) -> None:
        try:
            with connected(self._config) as size:
                self._size.set_result(size)
                self._is_over.wait()
        except BaseException as error:  # raised again in size()
            if self._size.done():
                logger.exception("Ray did not end as it should")
            else:
                self._size.set_exception(error)


@contextlib.contextmanager
def _kept_handler(number: signal.Signals) -> Iterator[None]:
    """Restore a signal's handler after the context: ``ray.init`` installs some of its own, which end the process at once."""
    handler, libc, action = signal.getsignal(number), ctypes.CDLL(None), ctypes.create_string_buffer(_SIGACTION_BYTES)
    libc.sigaction(number, None, action)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, handler)
        else:  # Python sets handlers in the main thread only
            libc.sigaction(number, action, None)


def _machines(accelerator_type: str | None) -> list[Mapping[str, float]]:
    """Resources of each machine that is alive and has GPUs of the given kind; None selects all machines."""
    import ray  # noqa: PLC0415  # only after connected() has set the environment

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [resources for resources in alive if accelerator_type is None or f"{ACCELERATOR}{accelerator_type}" in resources]


def _size_of(machines: Sequence[Mapping[str, float]]) -> ClusterSize:
    cpus, gpus = (sum(int(resources.get(name, 0)) for resources in machines) for name in ("CPU", "GPU"))
    return ClusterSize(num_cpus=cpus, num_gpus=gpus, num_nodes=len(machines))


def _check_has(accelerator_type: str | None) -> None:
    if accelerator_type is None or _machines(accelerator_type):
        return
    kinds = sorted({name.removeprefix(ACCELERATOR) for machine in _machines(None) for name in machine if name.startswith(ACCELERATOR)})
    accepted = f"accepted are null and {', '.join(kinds)}" if kinds else "accepted is null, since Ray knows of no GPU's kind there"
    raise ClusterError(f"cluster.accelerator_type: found {accelerator_type}, {accepted}")


_QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_SYNCER": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": str(10**9),
    "TUNE_MAX_PENDING_TRIALS_PG": str(10**6),
    "TUNE_RESULT_BUFFER_LENGTH": "1",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "30",
    "TUNE_WARN_THRESHOLD_S": "5",
}
"""Environment variables that keep Ray quiet, make it keep no state of its own and leave the working folder alone: a study resumes from
its storage, and a worker's death is its trial's outcome. Ray may start any number of workers at once: ``Room`` limits their number."""


def _check_answers(address: str, timeout_seconds: float) -> None:
    """Refuse an address at which no Ray head answers: Ray itself would try for minutes and print many lines.

    The address is asked with ``ray status`` in a separate process, which can be ended after the timeout. If RAY_AUTH_MODE is not set, a
    cluster that wants a token gets this machine's: Ray gives that token to a cluster that it starts, but not to its own clients.
    """
    if address != "auto":
        _check_listens(address, timeout_seconds)
    first_error = ""
    for mode in [None] if _AUTH_MODE in os.environ else [None, "token"]:
        environment = {**os.environ, **({_AUTH_MODE: mode} if mode else {})}
        command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
        try:
            status = subprocess.run(  # noqa: S603  # our own interpreter, and an address that the user gave
                command, env=environment, capture_output=True, text=True, timeout=timeout_seconds, start_new_session=True, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"cluster.address: {address} is no Ray head (no answer in {timeout_seconds:g} s); {_ACCEPTED}") from error
        if status.returncode == 0:
            os.environ.update({_AUTH_MODE: mode} if mode else {})
            return
        first_error = first_error or status.stderr
        if "AuthenticationError" not in first_error:
            break
    reason = first_error.strip().rpartition("\n")[2].partition(". ")[0]
    raise ClusterError(f"cluster.address: {address} does not answer ({reason}); {_ACCEPTED}")


_AUTH_MODE = "RAY_AUTH_MODE"
_ACCEPTED = "accepted is the HOST:PORT of a running Ray head, or auto on a machine of a cluster"


def _check_listens(address: str, timeout_seconds: float) -> None:
    host, _, port = address.rpartition(":")
    if not host or "://" in host or not port.isdigit():
        raise ClusterError(f"cluster.address: found {address!r}, accepted are null, auto and HOST:PORT")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_seconds).close()
    except (OSError, OverflowError) as error:  # OverflowError for a port above 65535
        reason = getattr(error, "strerror", None) or error
        raise ClusterError(f"cluster.address: {address} does not answer ({reason}); {_ACCEPTED}") from error


@contextlib.contextmanager
def _in_own_process_groups() -> Iterator[None]:
    """Let Ray start its processes in process groups of their own: signals to the driver's group are for the driver, which ends Ray."""
    from ray._private import services  # noqa: PLC0415  # only after connected() has set the environment

    popen = services.ConsolePopen

    class PopenInOwnGroup(popen):  # type: ignore[misc,valid-type]  # ray has no types
        def __init__(self, *arguments: object, **named: object) -> None:
            super().__init__(*arguments, **named, process_group=0)

    services.ConsolePopen = PopenInOwnGroup
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _advice(error: Exception, address: str | None) -> str:
    """What to do where Ray did not start, as the end of a message; empty where a setting is wrong, or a running cluster's answer."""
    if address is not None or isinstance(error, ValueError):
        return ""
    return "; try again when this machine is less busy, or start Ray with `ray start --head` and add cluster.address=auto"


def _log_to_autotune(name: str) -> None:
    """Send a library's log messages to autotune's log file, not to the terminal."""
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.propagate = True


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
