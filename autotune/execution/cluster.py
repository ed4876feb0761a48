"""Connecting to Ray, to a local instance started for the study or to a running cluster, and hearing
when it is gone.

Calls to a Ray that is gone may hang for good, and after a minute Ray would end the process that
makes them. So the driver makes them in a thread that it can leave, and another thread looks whether
Ray is there.
"""

import atexit
import contextlib
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from autotune.config.schema import ClusterConfig
from autotune.errors import ClusterError
from autotune.execution.launcher import Launcher, call_by_name, calling
from autotune.execution.task import ACCELERATOR, TrialTask
from autotune.training.capabilities import Capabilities, together, visible_devices_environment

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class ClusterSize:
    """The resources of the cluster's machines, or of those with one kind of GPU."""

    machines: tuple[tuple[int, int], ...]
    """Numbers of CPUs and GPUs of each machine."""

    @property
    def num_cpus(self) -> int:
        """Number of CPUs of all machines."""
        return sum(cpus for cpus, _ in self.machines)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all machines."""
        return sum(gpus for _, gpus in self.machines)

    def holds(self, tasks: Sequence[TrialTask]) -> bool:
        """Whether tasks surely fit side by side.

        On several nodes a task of several workers surely fits only by itself.
        """
        if (
            len(self.machines) > 1
            and len(tasks) > 1
            and any(task.num_workers > 1 for task in tasks)
        ):
            return False
        return (
            sum(task.num_cpus for task in tasks) <= self.num_cpus
            and sum(task.num_gpus for task in tasks) <= self.num_gpus
        )

    def places(self, num_cpus: int, num_gpus: int) -> list[int]:
        """How many workers that take so many CPUs and GPUs each machine holds."""
        return [
            min(cpus // num_cpus, gpus // num_gpus if num_gpus else cpus)
            for cpus, gpus in self.machines
        ]

    def shortage(
        self, num_workers: int, num_cpus: int, num_gpus: int, placement: str
    ) -> str | None:
        """Why a training that has the cluster to itself cannot be placed, in a few words.

        None if it can.

        Args:
            num_workers: number of the training's workers, each of which lies on one machine.
            num_cpus, num_gpus: numbers that all workers take together.
            placement: how workers are laid out over machines: ``pack``, ``spread``, ``strict_pack``
                or ``strict_spread``.
        """
        places = self.places(num_cpus // num_workers, num_gpus // num_workers)
        most = {"strict_pack": max(places, default=0), "strict_spread": sum(map(bool, places))}.get(
            placement.lower(), sum(places)
        )
        if num_workers <= most:
            return None
        wanted = f"{num_cpus} CPU and {num_gpus} GPU" + (
            f" in {num_workers} workers ({placement.lower()})" if num_workers > 1 else ""
        )
        having = (
            "; ".join(f"{cpus} CPU and {gpus} GPU" for cpus, gpus in self.machines) or "no machine"
        )
        return f"it takes {wanted}, and Ray has {having}"


def check_can_start(
    what: str,
    size: ClusterSize,
    cluster: ClusterConfig,
    num_workers: int,
    num_cpus: int,
    num_gpus: int,
) -> None:
    """Refuse a training that the cluster cannot place, for which Ray would wait for ever.

    Numbers are of all its workers.

    Raises:
        ClusterError: what the training takes, and what Ray has.
    """
    shortage = size.shortage(num_workers, num_cpus, num_gpus, cluster.placement)
    if shortage is None:
        return
    is_unseen = num_gpus and not size.num_gpus and cluster.num_gpus is None and cluster.is_local
    advice = (
        f"; torch sees GPUs that Ray does not count: accepted are cluster.num_gpus={num_gpus} and"
        " device=cpu"
        if is_unseen
        else ""
    )
    raise ClusterError(f"cluster: {what} cannot start: {shortage}{advice}")


class FreeResources:
    """Whether the cluster has room for another trial beside those that are being trained.

    Args:
        num_cpus, num_gpus: resources that one trial takes.
        accelerator_type: kind of GPU of the machines that count; None counts all machines.
        most: upper limit on trials at a time; None means as many as fit.
        can_grow: whether ``most`` trials are started even if they do not fit now, since an elastic
            cluster grows when it is asked for more.
    """

    def __init__(
        self,
        *,
        num_cpus: int,
        num_gpus: int,
        accelerator_type: str | None,
        most: int | None,
        can_grow: bool,
    ) -> None:
        self._num_cpus, self._num_gpus = num_cpus, num_gpus
        self._accelerator_type = accelerator_type
        self._most = most
        self._can_grow = can_grow and most is not None
        self._size = ClusterSize(())
        self._asked_at = -math.inf

    def __call__(self, tasks: Sequence[TrialTask]) -> bool:
        """Whether another trial fits beside the tasks that are being trained."""
        if not tasks:
            return True
        if self._most is not None and len(tasks) >= self._most:
            return False
        if self._can_grow:
            return True
        size = self._cluster()
        taken_cpus, taken_gpus = (
            sum(task.num_cpus for task in tasks),
            sum(task.num_gpus for task in tasks),
        )
        return (
            taken_cpus + self._num_cpus <= size.num_cpus
            and taken_gpus + self._num_gpus <= size.num_gpus
        )

    def shortage(self, task: TrialTask) -> str | None:
        """Why the machines that are alive now cannot place a task even if it has them to itself.

        None if they can.
        """
        return self._cluster().shortage(
            task.num_workers, task.num_cpus, task.num_gpus, task.placement
        )

    def _cluster(self) -> ClusterSize:
        """The machines that are alive now.

        Asked again every few seconds, since nodes come and go.
        """
        if time.monotonic() - self._asked_at > _ASK_AGAIN_SECONDS:
            self._size, self._asked_at = (
                _size_of(_machines(self._accelerator_type)),
                time.monotonic(),
            )
        return self._size


_ASK_AGAIN_SECONDS = 2.0
_POLL_SECONDS = 0.2
_WATCH_SECONDS = 1.0
"""Seconds between two looks whether Ray is there."""
_LEAVE_SECONDS = 3.0
"""Seconds that work with Ray may take to end once it is interrupted at once, or Ray is gone;
then it is left where it hangs."""
_SHUTDOWN_SECONDS = 10.0
"""Seconds that Ray may take to end its part of this process."""
_HEAD_SECONDS = 10.0
"""Seconds for which the head of a running cluster may not answer before it counts as gone."""
_ANSWER_SECONDS = 5.0
"""Longest wait for one answer of a running cluster's head."""


def capabilities_of(config: ClusterConfig, launcher: Launcher | None) -> Capabilities:
    """What the machines that trainings run on can run, found out by another process where possible.

    Raises:
        ClusterError: the cluster does not answer, or no worker started on it.
        ConfigError: the process that was to find it out ended.
    """
    if not config.is_local:
        return cluster_capabilities(config)
    with calling(launcher) as call_there:
        found: Capabilities = call_there(_CAPABILITIES)
    return found


_CAPABILITIES = "autotune.training.device:local_capabilities"


def cluster_capabilities(config: ClusterConfig) -> Capabilities:
    """What the machines of a running cluster can run, measured by a worker on a node of each kind
    of GPU, or on any without GPUs.

    Raises:
        ClusterError: the cluster does not answer, or no worker started on it.
    """
    with connected(config) as size:
        import ray  # noqa: PLC0415  # only after connected() has set the environment

        probe = ray.remote(call_by_name)
        kinds: list[str | None] = [config.accelerator_type]
        if config.accelerator_type is None:
            kinds = [*_accelerator_types()] or kinds
        resources = [
            {"num_cpus": 0, "num_gpus": 1 if size.num_gpus else 0, "accelerator_type": kind}
            for kind in kinds
        ]
        probes = [probe.options(**options).remote(_CAPABILITIES) for options in resources]
        try:
            # all GPUs of a kind may be taken
            answered, _ = ray.wait(probes, num_returns=len(probes), timeout=_PROBE_SECONDS)
            nodes: list[Capabilities] = ray.get(answered or probes, timeout=0)
        except (ray.exceptions.RayError, ImportError) as error:
            raise ClusterError(
                f"cluster.address: {config.address}: no worker came up ({_first_line(error)})"
            ) from error
        return replace(together(nodes), num_cpus=size.num_cpus, num_gpus=size.num_gpus)


_PROBE_SECONDS = 60.0


def take_assigned_devices() -> None:
    """Limit this process, a worker of Ray's, and all that it starts to the GPUs that Ray gave it.

    Called before it uses a GPU.

    Ray does so itself, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES or its like keeps it from
    that: every trial would then train on the machine's first GPU.
    """
    # the driver imports it only after connected() has set the environment
    import ray  # noqa: PLC0415

    devices: list[str] = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if devices:
        os.environ.update(visible_devices_environment(devices))


@contextlib.contextmanager
def connected(config: ClusterConfig) -> Iterator[ClusterSize]:
    """Connect to Ray while the context lasts; a Ray of this process's own is shut down at the end.

    Raises:
        ClusterError: the cluster does not answer, has no machine of the kind asked for, or cannot
            hold even one worker.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        if config.is_local:
            # Ray's 15 lets timed workers wait for all other processes
            os.environ.setdefault("RAY_worker_niceness", "0")
            # Ray Tune's workers have another environment
            os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
            folder = stack.enter_context(_folder_for_ray())
            options = {
                "num_cpus": config.num_cpus,
                "num_gpus": config.num_gpus,
                "include_dashboard": False,
                "_temp_dir": folder,
            }
        else:
            _check_answers(str(config.address), config.connect_timeout_seconds)
        import ray  # noqa: PLC0415  # after the environment is set, and only when trials run

        _log_to_autotune("ray")
        # mute: Ray's own processes want a token, and its SIGTERM handler is not installed
        for name in ("authentication", "worker"):
            logging.getLogger(f"ray._private.{name}").setLevel(logging.ERROR)
        handler = signal.getsignal(signal.SIGTERM)
        stack.callback(_set_handler, handler)
        stack.callback(ray.shutdown)
        blocked = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGHUP}
        )  # Ray's processes inherit it: a closed terminal is for the driver
        try:
            ray.init(
                address=config.address or "local",
                logging_level=logging.ERROR,
                log_to_driver=False,
                configure_logging=False,
                **options,
            )
        except (Exception, SystemExit) as error:  # Ray raises both where it does not start
            advice = _advice(error) if config.is_local else ""
            raise ClusterError(
                f"cluster.address: {config.address or 'local'}: {_first_line(error)}{advice}"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            _set_handler(handler)
        _check_has(config.accelerator_type)
        size = _size_of(_machines(config.accelerator_type))
        if size.num_cpus < (config.cpus_per_worker or 1):
            raise ClusterError(
                f"cluster.cpus_per_worker: found {config.cpus_per_worker or 1}; the cluster has"
                f" {size.num_cpus} CPUs"
            )
        yield size


@contextlib.contextmanager
def _folder_for_ray() -> Iterator[str]:
    """Yield a new folder for Ray's files that no other user may open.

    Its path is short, since Ray makes sockets in it.
    """
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="autotune-ray-", dir=parent)
    except OSError as error:
        raise ClusterError(
            f"cluster.address: local: {parent} takes no files ({error.strerror}); set RAY_TMPDIR to"
            " a writable folder of a short path"
        ) from error
    try:
        yield str(Path(folder, "r"))  # Ray makes it and all in it writable by all
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Heartbeat:
    """Tells when the Ray that this process is connected to is gone: its processes here have
    ended, or its head does not answer.
    """

    def __init__(self) -> None:
        import ray  # noqa: PLC0415  # only after connected() has set the environment

        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._head = (host.strip("[]"), int(port))
        self._own = [child for child in psutil.Process().children() if child.name() in _NEEDED]
        self._answered_at = time.monotonic()

    def lost(self) -> str | None:
        """Why Ray counts as gone; None if it is there."""
        for process in self._own:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return f"its {_NEEDED[process.name()]} has ended"
        try:
            socket.create_connection(self._head, timeout=_ANSWER_SECONDS).close()
        except OSError as error:
            if time.monotonic() - self._answered_at > _HEAD_SECONDS:
                return f"its head does not answer ({getattr(error, 'strerror', None) or error})"
        else:
            self._answered_at = time.monotonic()
        return None


_NEEDED = {"gcs_server": "control service (gcs_server)", "raylet": "raylet"}
"""The processes without which a local Ray is gone."""


class RayConnection:
    """A connection to Ray that is made in a thread of its own, so that the driver does not wait
    while Ray starts.

    The thread lives as long as Ray does: the kernel ends the processes that it started together
    with it.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._size: Future[ClusterSize] = Future()
        self._heartbeat: _Heartbeat | None = None
        self._lost: Future[str] = Future()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_lost(self) -> bool:
        """Whether Ray was there and is gone."""
        return self._lost.done()

    def start(self) -> None:
        """Begin to connect, unless that has begun already."""
        if self._thread is None:
            # requests, which Ray imports, ignores this itself, but a catch_warnings() of another
            # thread (Hydra's) may undo that
            warnings.filterwarnings("ignore", message="SOCKS support in urllib3")
            self._thread = threading.Thread(target=self._hold, name="ray", daemon=True)
            self._thread.start()

    def size(self, interrupt: threading.Event) -> ClusterSize:
        """Wait for the connection and return the cluster's resources.

        Raises:
            ClusterError: the cluster does not answer, has no machine of the kind asked for, or
                cannot hold even one worker.
            KeyboardInterrupt: ``interrupt`` was set meanwhile.
        """
        self.start()
        while not wait([self._size], timeout=_POLL_SECONDS).done:
            if interrupt.is_set():
                raise KeyboardInterrupt
        size = self._size.result()
        _set_handler(signal.getsignal(signal.SIGTERM))
        return size

    def run(self, work: Callable[[], Result], interrupt: threading.Event) -> Result:
        """Call ``work``, which may call Ray, in a thread of its own, and return what it returns.

        Args:
            interrupt: ends ``work`` in good order when set; it is set here if Ray is gone.

        Raises:
            ClusterError: Ray is gone.
            KeyboardInterrupt: Ray is gone, too, after ``interrupt`` was set.
        """
        done: Future[Result] = Future()
        thread = threading.Thread(target=call, args=(work, done), name="with-ray", daemon=True)
        thread.start()
        either: list[Future[Any]] = [done, self._lost]
        try:
            while not wait(either, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED).done:
                # handlers run between waits, also of a signal that reached another thread, as after
                # SIGSTOP
                pass
        finally:
            is_interrupted = interrupt.is_set()
            if not done.done():  # Ray is gone, or a second Ctrl-C came
                interrupt.set()
                thread.join(_LEAVE_SECONDS)
        if self._is_gone() and (not done.done() or done.exception() is not None):
            if is_interrupted:  # by a signal to the process group, which ended Ray as well
                raise KeyboardInterrupt
            self.check()
        return done.result()

    def check(self) -> None:
        """Raise if Ray is gone: a worker that seems to have died may have gone with it.

        Raises:
            ClusterError: Ray is gone.
        """
        if self._is_gone():
            raise ClusterError(
                f"cluster.address: {self._config.address or 'local'}: Ray is gone:"
                f" {self._lost.result()}"
            )

    def _is_gone(self) -> bool:
        with self._lock:
            reason = (
                None if self._lost.done() or self._heartbeat is None else self._heartbeat.lost()
            )
            if reason is not None:
                self._lost.set_result(reason)
            return self._lost.done()

    def close(self) -> None:
        """Disconnect, and wait until that is done.

        A Ray that is gone, or still starting, is waited for some seconds only.
        """
        self._is_over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_SHUTDOWN_SECONDS)
            if thread.is_alive():
                import ray  # noqa: PLC0415  # only after connected() has set the environment

                atexit.unregister(ray.shutdown)  # it would wait for the thread
            _set_handler(signal.getsignal(signal.SIGTERM))

    def _hold(self) -> None:
        try:
            with connected(self._config) as size:
                self._heartbeat = _Heartbeat()
                self._size.set_result(size)
                while not self._is_over.wait(_WATCH_SECONDS):
                    self._is_gone()
        except BaseException as error:  # raised again in size()
            if self._size.done():
                logger.exception("Ray did not end as it should")
            else:
                self._size.set_exception(error)


def _set_handler(handler: Any) -> None:
    """Install a handler of SIGTERM: ``ray.init`` and ``ray.shutdown`` put others in its place,
    also below Python.
    """
    if threading.current_thread() is threading.main_thread():  # Python sets handlers in no other
        signal.signal(signal.SIGTERM, handler)


def call(work: Callable[[], Result], done: "Future[Result]") -> None:
    """Call ``work`` and put what it returns or raises into ``done``: the target of a thread that
    the driver can leave.
    """
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001  # raised again by who asks for the result
        done.set_exception(error)


def _machines(accelerator_type: str | None) -> list[Mapping[str, float]]:
    """Resources of each machine that is alive and has GPUs of the given kind.

    None selects all machines.
    """
    import ray  # noqa: PLC0415  # only after connected() has set the environment

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [
        resources
        for resources in alive
        if accelerator_type is None or f"{ACCELERATOR}{accelerator_type}" in resources
    ]


def _size_of(machines: Sequence[Mapping[str, float]]) -> ClusterSize:
    return ClusterSize(
        tuple(
            (int(resources.get("CPU", 0)), int(resources.get("GPU", 0))) for resources in machines
        )
    )


def num_side_by_side(task: TrialTask) -> int:
    """Number of trainings of a task's size that the cluster's GPUs hold side by side with the CPUs
    that they take; 1 if they take no GPU.

    On several machines a training of several workers counts as one that fits only by itself, see
    ``ClusterSize.holds``.
    """
    size = _size_of(_machines(task.accelerator_type))
    if not task.num_gpus or (task.num_workers > 1 and len(size.machines) > 1):
        return 1
    return max(1, sum(size.places(task.num_cpus, task.num_gpus)))


def _accelerator_types() -> list[str]:
    """Kinds of GPU of the machines that are alive, as Ray names them."""
    return sorted(
        {
            name.removeprefix(ACCELERATOR)
            for machine in _machines(None)
            for name in machine
            if name.startswith(ACCELERATOR)
        }
    )


def _check_has(accelerator_type: str | None) -> None:
    if accelerator_type is None or _machines(accelerator_type):
        return
    kinds = _accelerator_types()
    accepted = (
        f"accepted are null and {', '.join(kinds)}"
        if kinds
        else "accepted is null, since Ray knows of no GPU's kind there"
    )
    raise ClusterError(f"cluster.accelerator_type: found {accelerator_type}, {accepted}")


_QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
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
"""Environment variables that keep Ray quiet, make it keep no state of its own and leave the
working folder alone: a study resumes from its storage, a worker's death is its trial's outcome,
and Ray does not end this process a minute after it is gone itself. Ray may start any number of
workers at once: ``FreeResources`` limits their number."""


def _check_answers(address: str, timeout_seconds: float) -> None:
    """Refuse an address at which no Ray head answers: Ray itself would try for minutes and print
    many lines.

    The address is asked with ``ray status`` in a separate process, which can be ended after the
    timeout. If RAY_AUTH_MODE is not set, a cluster that wants a token gets this machine's: Ray
    gives that token to a cluster that it starts, but not to its own clients.
    """
    if address != "auto":
        _check_listens(address, timeout_seconds)
    first_error = ""
    for mode in [None] if _AUTH_MODE in os.environ else [None, "token"]:
        environment = {**os.environ, **({_AUTH_MODE: mode} if mode else {})}
        command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
        try:
            # our own interpreter, and an address that the user gave
            status = subprocess.run(  # noqa: S603
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                f"cluster.address: {address} is no Ray head (no answer in {timeout_seconds:g} s);"
                f" {_ACCEPTED}"
            ) from error
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
        raise ClusterError(
            f"cluster.address: found {address!r}, accepted are null, auto and HOST:PORT"
        )
    try:
        socket.create_connection((host, int(port)), timeout=timeout_seconds).close()
    except (OSError, OverflowError) as error:  # OverflowError for a port above 65535
        reason = getattr(error, "strerror", None) or error
        raise ClusterError(
            f"cluster.address: {address} does not answer ({reason}); {_ACCEPTED}"
        ) from error


def _advice(error: BaseException) -> str:
    """What to do where a local Ray did not start, as the end of a message.

    Empty where a setting is wrong.
    """
    if isinstance(error, ValueError):
        return ""
    if isinstance(error, OSError):
        return "; set RAY_TMPDIR to a folder for Ray's files that has room and a short path"
    return (
        "; try again when this machine is less busy, or start Ray with `ray start --head` and add"
        " cluster.address=auto"
    )


def _log_to_autotune(name: str) -> None:
    """Send a library's log messages to autotune's log file, not to the terminal."""
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.propagate = True


def _first_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "Ray did not start"
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
