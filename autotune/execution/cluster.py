"""Connecting to Ray, to a local instance started for the study or to a running cluster, and hearing when it is gone.

Calls to a Ray that is gone may hang for good, and after a minute Ray would end the process that makes them. So the driver makes them in a
thread that it can leave, and another thread looks whether Ray is there.
"""

import atexit
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from autotune.config.schema import ClusterConfig
from autotune.errors import ClusterError
from autotune.execution.awake import kept_awake
from autotune.execution.fork_server import ForkServer, capabilities_in_this_process
from autotune.execution.local_ray import LocalRay
from autotune.execution.task_run import ACCELERATOR, TrialTask
from autotune.training.capabilities import Capabilities, num_visible_slices, together, visible_devices_environment

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
        """Whether tasks surely fit side by side; on several nodes a task of several workers surely fits only by itself."""
        if len(self.machines) > 1 and len(tasks) > 1 and any(task.num_workers > 1 for task in tasks):
            return False
        return sum(task.num_cpus for task in tasks) <= self.num_cpus and sum(task.num_gpus for task in tasks) <= self.num_gpus

    def places(self, num_cpus: int, num_gpus: int) -> list[int]:
        """How many workers that take so many CPUs and GPUs each machine holds."""
        return [min(cpus // num_cpus, gpus // num_gpus if num_gpus else cpus) for cpus, gpus in self.machines]

    def shortage(self, num_workers: int, num_cpus: int, num_gpus: int, placement: str) -> str | None:
        """Why a training that has the cluster to itself cannot be placed, in a few words; None if it can.

        Args:
            num_workers: number of the training's workers, each of which lies on one machine.
            num_cpus, num_gpus: numbers that all workers take together.
            placement: how workers are laid out over machines: ``pack``, ``spread``, ``strict_pack`` or ``strict_spread``.
        """
        places = self.places(num_cpus // num_workers, num_gpus // num_workers)
        most = {"strict_pack": max(places, default=0), "strict_spread": sum(map(bool, places))}.get(placement.lower(), sum(places))
        if num_workers <= most:
            return None
        wanted = f"{num_cpus} CPU and {num_gpus} GPU" + (f" in {num_workers} workers ({placement.lower()})" if num_workers > 1 else "")
        having = "; ".join(f"{cpus} CPU and {gpus} GPU" for cpus, gpus in self.machines) or "no machine"
        return f"it takes {wanted}, and Ray has {having}"


def check_can_start(what: str, size: ClusterSize, cluster: ClusterConfig, num_workers: int, num_cpus: int, num_gpus: int) -> None:
    """Refuse a training that the cluster cannot place, for which Ray would wait for ever; numbers are of all its workers.

    Raises:
        ClusterError: what the training takes, and what Ray has.
    """
    shortage = size.shortage(num_workers, num_cpus, num_gpus, cluster.placement)
    if shortage is None:
        return
    is_unseen = num_gpus and not size.num_gpus and cluster.num_gpus is None and cluster.is_local
    advice = f"; torch sees GPUs that Ray does not count: accepted are cluster.num_gpus={num_gpus} and device=cpu" if is_unseen else ""
    raise ClusterError(f"cluster: {what} cannot start: {shortage}{advice}")


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
        taken_cpus, taken_gpus = sum(task.num_cpus for task in tasks), sum(task.num_gpus for task in tasks)
        return taken_cpus + self._num_cpus <= size.num_cpus and taken_gpus + self._num_gpus <= size.num_gpus

    def shortage(self, task: TrialTask) -> str | None:
        """Why the machines that are alive now cannot place a task even if it has them to itself; None if they can."""
        return self._cluster().shortage(task.num_workers, task.num_cpus, task.num_gpus, task.placement)

    def _cluster(self) -> ClusterSize:
        """The machines that are alive now; asked again every few seconds, since nodes come and go."""
        if time.monotonic() - self._asked_at > _ASK_AGAIN_SECONDS:
            self._size, self._asked_at = _size_of(_machines(self._accelerator_type)), time.monotonic()
        return self._size


_ASK_AGAIN_SECONDS = 2.0
_POLL_SECONDS = 0.2
_SIGACTION_BYTES = 512
"""Room for C's ``struct sigaction``, which takes 152 bytes on Linux."""
_START_PATIENCE_SECONDS = 8.0
"""Seconds that an interrupted driver waits for a Ray that is still starting."""
_WATCH_SECONDS = 1.0
"""Seconds between two looks whether Ray is there."""
_LEAVE_SECONDS = 3.0
"""Seconds that work with Ray may take to end once it is interrupted at once, or Ray is gone; then it is left where it hangs."""
_SHUTDOWN_SECONDS = 10.0
"""Seconds that Ray may take to end its part of this process."""
_RESTORE_SECONDS = 0.02
"""Seconds for which a signal may end this process at once meanwhile, because Ray has taken its handler away."""
_HEAD_SECONDS = 10.0
"""Seconds for which the head of a running cluster may not answer before it counts as gone."""
_ANSWER_SECONDS = 5.0
"""Longest wait for one answer of a running cluster's head."""


def capabilities_of(config: ClusterConfig, fork_server: ForkServer | None) -> Capabilities:
    """What the machines that trainings run on can run, found out by another process where possible.

    Raises:
        ClusterError: the cluster does not answer, or no worker started on it.
        ConfigError: the process that was to find it out ended.
    """
    if not config.is_local:
        return cluster_capabilities(config)
    return capabilities_in_this_process() if fork_server is None else fork_server.capabilities()


def cluster_capabilities(config: ClusterConfig) -> Capabilities:
    """What the machines of a running cluster can run, measured by a worker on a node of each kind of GPU, or on any without GPUs.

    Raises:
        ClusterError: the cluster does not answer, or no worker started on it.
    """
    with connected(config) as size:
        import ray  # noqa: PLC0415  # only after connected() has set the environment

        probe = ray.remote(capabilities_in_this_process)
        kinds: list[str | None] = [config.accelerator_type]
        if config.accelerator_type is None:
            kinds = [*_accelerator_types()] or kinds
        resources = [{"num_cpus": 0, "num_gpus": 1 if size.num_gpus else 0, "accelerator_type": kind} for kind in kinds]
        probes = [probe.options(**options).remote() for options in resources]
        try:
            answered, _ = ray.wait(probes, num_returns=len(probes), timeout=_PROBE_SECONDS)  # all GPUs of a kind may be taken
            nodes: list[Capabilities] = ray.get(answered or probes, timeout=0)
        except (ray.exceptions.RayError, ImportError) as error:
            raise ClusterError(f"cluster.address: {config.address}: no worker came up ({_first_line(error)})") from error
        return replace(together(nodes), num_cpus=size.num_cpus, num_gpus=size.num_gpus)


_PROBE_SECONDS = 60.0


def take_assigned_devices() -> None:
    """Limit this process, a worker of Ray's, and all that it starts to the GPUs that Ray gave it; called before it uses a GPU.

    Ray does so itself, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES or its like keeps it from that: every trial would then train
    on the machine's first GPU.
    """
    import ray  # noqa: PLC0415  # the driver imports it only after connected() has set the environment

    devices: list[str] = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if devices:
        os.environ.update(visible_devices_environment(devices))


@contextlib.contextmanager
def connected(config: ClusterConfig) -> Iterator[ClusterSize]:
    """Connect to Ray while the context lasts. A local Ray is shut down at the end, and if it has no GPU the CPUs are kept awake meanwhile.

    Raises:
        ClusterError: the cluster does not answer, has no machine of the kind asked for, or cannot hold even one worker.
    """
    with _linked(config) as (size, _):
        yield size


class _Ray(Protocol):
    """The Ray that this process is connected to."""

    def lost(self) -> str | None:
        """Why Ray counts as gone; None if it is there."""
        ...

    def end(self) -> None:
        """End what this process has started of it."""
        ...


@contextlib.contextmanager
def _linked(config: ClusterConfig) -> Iterator[tuple[ClusterSize, _Ray]]:
    """Connect to Ray as ``connected`` does, and also yield the Ray itself."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    address = None if config.address == "local" else config.address
    if address is not None:
        _check_answers(address, config.connect_timeout_seconds)
    import ray  # noqa: PLC0415  # after the environment is set, and only when trials run

    _log_to_autotune("ray")
    options = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    with contextlib.ExitStack() as stack:
        running: _Ray
        stack.enter_context(_errors_logged())
        try:
            with _kept_handler(signal.SIGTERM):
                if address is None:
                    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 lets timed workers wait for all other processes
                    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # Ray Tune's workers have an environment of their own
                    for name in ("authentication", "worker"):  # mute: our own Ray wants a token, and its SIGTERM handler is not installed
                        logging.getLogger(f"ray._private.{name}").setLevel(logging.ERROR)
                    running = local = LocalRay()
                    stack.callback(local.end)
                    stack.callback(_shut_down, local)
                    num_gpus = (num_visible_slices() or None) if config.num_gpus is None else config.num_gpus
                    local.start(num_cpus=config.num_cpus, num_gpus=num_gpus, **options)
                else:
                    stack.callback(_shut_down, None)
                    ray.init(address=address, **options)
                    running = _RunningCluster()
        except ClusterError:
            raise
        except (Exception, SystemExit) as error:  # Ray raises both where it does not start
            raise ClusterError(f"cluster.address: {config.address or 'local'}: {_first_line(error)}{_advice(error, address)}") from error
        _check_has(config.accelerator_type)
        size = _size_of(_machines(config.accelerator_type))
        if size.num_cpus < (config.cpus_per_worker or 1):
            raise ClusterError(
                f"cluster.cpus_per_worker: found {config.cpus_per_worker or 1}, accepted is at most the {size.num_cpus} CPUs of the cluster"
            )
        if config.keep_cpus_awake and address is None and not size.num_gpus:
            stack.enter_context(kept_awake())
        yield size, running


@contextlib.contextmanager
def _errors_logged() -> Iterator[None]:
    """Send to the log what Ray would print of errors on its machines, such as the last lines of a raylet's log."""
    from ray._private import worker  # noqa: PLC0415  # only after connected() has set the environment

    def to_log(data: Mapping[str, Sequence[str]], **named: object) -> None:
        logging.getLogger("ray").warning("%s", "\n".join(data["lines"]))

    of_ray, worker.print_to_stdstream = worker.print_to_stdstream, to_log
    try:
        yield
    finally:
        worker.print_to_stdstream = of_ray


def _shut_down(local: LocalRay | None) -> None:
    """Disconnect from Ray, which may hang if it is gone; its processes on this machine are then ended first.

    Ray takes away the handler of SIGTERM early in its shutdown, and the study has yet to be concluded.
    """
    import ray  # noqa: PLC0415  # only after connected() has set the environment

    is_lost = local is not None and local.lost() is not None
    if local is not None and is_lost:
        local.end()
    thread = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    seconds = _LEAVE_SECONDS if is_lost else _SHUTDOWN_SECONDS
    until = time.monotonic() + seconds
    with _kept_handler(signal.SIGTERM) as restore:
        thread.start()
        while thread.is_alive() and time.monotonic() < until:
            thread.join(_RESTORE_SECONDS)
            restore()
    if thread.is_alive():
        if not is_lost:
            logger.warning("Ray did not end its part of this process in %g s", seconds)
        atexit.unregister(ray.shutdown)  # it would wait for the thread


class _RunningCluster:
    """A cluster of others that this process has joined."""

    def __init__(self) -> None:
        import ray  # noqa: PLC0415  # only after connected() has set the environment

        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._head = (host.strip("[]"), int(port))
        self._raylet: str = ray._private.worker._global_node.raylet_socket_name  # noqa: SLF001  # nothing public has it
        self._answered_at = time.monotonic()

    def lost(self) -> str | None:
        """Why the cluster counts as gone: the raylet of this machine has ended, or the head has not answered for a while."""
        try:
            with socket.socket(socket.AF_UNIX) as raylet:
                raylet.connect(self._raylet)
        except OSError:
            return "the raylet of this machine has ended"
        try:
            socket.create_connection(self._head, timeout=_ANSWER_SECONDS).close()
        except OSError as error:
            if time.monotonic() - self._answered_at > _HEAD_SECONDS:
                return f"its head does not answer ({getattr(error, 'strerror', None) or error})"
        else:
            self._answered_at = time.monotonic()
        return None

    def end(self) -> None:
        """End nothing: it is the cluster of others."""


class Connection:
    """A connection to Ray that is made in a thread of its own, so that the driver does not wait while Ray starts.

    The thread lives as long as Ray does: otherwise the kernel would end the processes that it started together with the thread.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._size: Future[ClusterSize] = Future()
        self._ray: _Ray | None = None
        self._lost: Future[str] = Future()
        self._losing = threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_lost(self) -> bool:
        """Whether Ray was there and is gone."""
        return self._lost.done()

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

    def run(self, work: Callable[[], Result], interrupt: threading.Event) -> Result:
        """Call ``work``, which may call Ray, in a thread of its own, and return what it returns.

        Args:
            interrupt: ends ``work`` in good order when set; it is set here if Ray is gone.

        Raises:
            ClusterError: Ray is gone.
            KeyboardInterrupt: raised in this thread meanwhile; it is then raised in ``work``, too.
        """
        done: Future[Result] = Future()
        thread = threading.Thread(target=call, args=(work, done), name="with-ray", daemon=True)
        thread.start()
        try:
            either: list[Future[Any]] = [done, self._lost]
            while not wait(either, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED).done:
                pass  # handlers run between waits, also of a signal that reached another thread, as after SIGSTOP
        except KeyboardInterrupt:
            interrupt.set()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt))
            thread.join(_LEAVE_SECONDS)
            raise
        if self.is_lost or (done.exception() is not None and self._is_gone()):
            interrupt.set()
            thread.join(_LEAVE_SECONDS)
            self.check()
        return done.result()

    def check(self) -> None:
        """Raise if Ray is gone: a worker that seems to have died may have gone with it.

        Raises:
            ClusterError: Ray is gone.
        """
        if self._is_gone():
            raise ClusterError(f"cluster.address: {self._config.address or 'local'}: Ray is gone: {self._lost.result()}")

    def _is_gone(self) -> bool:
        with self._losing:
            reason = None if self._lost.done() or self._ray is None else self._ray.lost()
            if reason is not None:
                self._lost.set_result(reason)
            return self._lost.done()

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
            with _linked(self._config) as (size, running):
                self._ray = running
                self._size.set_result(size)
                while not self._is_over.wait(_WATCH_SECONDS):
                    if self._is_gone():
                        running.end()
                        self._is_over.wait()
        except BaseException as error:  # raised again in size()
            if self._size.done():
                logger.exception("Ray did not end as it should")
            else:
                self._size.set_exception(error)


def call(work: Callable[[], Result], done: "Future[Result]") -> None:
    """Call ``work`` and put what it returns or raises into ``done``: the target of a thread that the driver can leave."""
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001  # raised again by who asks for the result
        done.set_exception(error)


@contextlib.contextmanager
def _kept_handler(number: signal.Signals) -> Iterator[Callable[[], None]]:
    """Restore a signal's handler after the context, and whenever the function that it yields is called.

    ``ray.init`` installs handlers that end the process at once, and ``ray.shutdown`` leaves the default ones, which do so, too.
    """
    handler, libc, action = signal.getsignal(number), ctypes.CDLL(None), ctypes.create_string_buffer(_SIGACTION_BYTES)
    libc.sigaction(number, None, action)

    def restore() -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, handler)
        else:  # Python sets handlers in the main thread only
            libc.sigaction(number, action, None)

    try:
        yield restore
    finally:
        restore()


def _machines(accelerator_type: str | None) -> list[Mapping[str, float]]:
    """Resources of each machine that is alive and has GPUs of the given kind; None selects all machines."""
    import ray  # noqa: PLC0415  # only after connected() has set the environment

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [resources for resources in alive if accelerator_type is None or f"{ACCELERATOR}{accelerator_type}" in resources]


def _size_of(machines: Sequence[Mapping[str, float]]) -> ClusterSize:
    return ClusterSize(tuple((int(resources.get("CPU", 0)), int(resources.get("GPU", 0))) for resources in machines))


def num_side_by_side(task: TrialTask) -> int:
    """Number of trainings of a task's size that the cluster's GPUs hold side by side with the CPUs that they take; 1 if they take no GPU.

    On several machines a training of several workers counts as one that fits only by itself, see ``ClusterSize.holds``.
    """
    size = _size_of(_machines(task.accelerator_type))
    if not task.num_gpus or (task.num_workers > 1 and len(size.machines) > 1):
        return 1
    return max(1, sum(size.places(task.num_cpus, task.num_gpus)))


def _accelerator_types() -> list[str]:
    """Kinds of GPU of the machines that are alive, as Ray names them."""
    return sorted({name.removeprefix(ACCELERATOR) for machine in _machines(None) for name in machine if name.startswith(ACCELERATOR)})


def _check_has(accelerator_type: str | None) -> None:
    if accelerator_type is None or _machines(accelerator_type):
        return
    kinds = _accelerator_types()
    accepted = f"accepted are null and {', '.join(kinds)}" if kinds else "accepted is null, since Ray knows of no GPU's kind there"
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
"""Environment variables that keep Ray quiet, make it keep no state of its own and leave the working folder alone: a study resumes from
its storage, a worker's death is its trial's outcome, and Ray does not end this process a minute after it is gone itself. Ray may start any
number of workers at once: ``Room`` limits their number."""


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


def _advice(error: BaseException, address: str | None) -> str:
    """What to do where Ray did not start, as the end of a message; empty where a setting is wrong, or a running cluster's answer."""
    if address is not None or isinstance(error, ValueError):
        return ""
    if isinstance(error, OSError):
        return "; RAY_TMPDIR says in which folder Ray's files are: it has to have room, and a short path"
    return "; try again when this machine is less busy, or start Ray with `ray start --head` and add cluster.address=auto"


def _log_to_autotune(name: str) -> None:
    """Send a library's log messages to autotune's log file, not to the terminal."""
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.propagate = True


def _first_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "Ray did not start"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
