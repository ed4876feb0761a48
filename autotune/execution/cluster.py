"""Connecting to Ray, to a local instance started for the study or to a running cluster, and hearing
when it is gone.

Calls to a Ray that is gone may hang for good, and after a minute Ray would end the process that
makes them. So the driver makes them in a thread that it can leave, and another thread looks whether
Ray is there.
"""

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from autotune.config.command_line import Interrupt
from autotune.config.schema import ClusterConfig
from autotune.errors import ClusterError
from autotune.execution.launcher import Launcher, calling
from autotune.execution.task import TrialTask
from autotune.training.capabilities import Capabilities
from autotune.training.main_thread import in_thread

if TYPE_CHECKING:
    from autotune.execution.ray_cluster import Heartbeat  # imports ray

logger = logging.getLogger(__name__)

LOCAL_CAPABILITIES = "autotune.training.device:local_capabilities"
"""What ``calling`` calls to find out what a machine can run."""
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

    def split(self, trials_per_gpu: int) -> Self:
        """The resources where each GPU counts as so many."""
        return replace(
            self, machines=tuple((cpus, gpus * trials_per_gpu) for cpus, gpus in self.machines)
        )

    def has_room(self, tasks: Sequence[TrialTask], num_cpus: int, num_gpus: int) -> bool:
        """Whether a training that takes so much fits beside the tasks that are being trained."""
        return (
            sum(task.num_cpus for task in tasks) + num_cpus <= self.num_cpus
            and sum(task.num_gpus for task in tasks) + num_gpus <= self.num_gpus
        )

    def places(self, num_cpus: int, num_gpus: int) -> list[int]:
        """How many workers that take so many CPUs and GPUs each machine holds."""
        return [
            min(cpus // num_cpus, gpus // num_gpus if num_gpus else cpus)
            for cpus, gpus in self.machines
        ]

    def num_side_by_side(self, task: TrialTask) -> int:
        """Number of trainings of a task's size that the GPUs hold side by side with the CPUs that
        they take; 1 if they take no GPU, and of several workers on several machines, where it is
        uncertain what fits.
        """
        if not task.num_gpus or (task.num_workers > 1 and len(self.machines) > 1):
            return 1
        return max(1, sum(self.places(task.num_cpus, task.num_gpus)))

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
        most = {"strict_pack": max(places, default=0), "strict_spread": sum(map(bool, places))}
        if num_workers <= most.get(placement.lower(), sum(places)):
            return None
        wanted = f"{num_cpus} CPU and {num_gpus} GPU"
        if num_workers > 1:
            wanted += f" in {num_workers} workers ({placement.lower()})"
        having = "; ".join(f"{cpus} CPU and {gpus} GPU" for cpus, gpus in self.machines)
        return f"it takes {wanted}, and Ray has {having or 'no machine'}"

    def check_holds(self, what: str, *training: Any) -> None:
        """Refuse a training that the cluster cannot place, for which Ray would wait for ever.

        Args:
            training: the arguments of ``shortage``.

        Raises:
            ClusterError: what the training takes, and what Ray has.
        """
        if (shortage := self.shortage(*training)) is not None:
            raise ClusterError(f"cluster: {what} cannot start: {shortage}")


_POLL_SECONDS = 0.05
_WATCH_SECONDS = 1.0
"""Seconds between two looks whether Ray is there."""
_LEAVE_SECONDS = 3.0
"""Seconds that work with Ray may take to end once it is interrupted at once, or Ray is gone;
then it is left where it hangs."""
_SHUTDOWN_SECONDS = 10.0
"""Seconds that Ray may take to end its part of this process."""


def capabilities_of(config: ClusterConfig, launcher: Launcher | None) -> Capabilities:
    """What the machines that trainings run on can run, found out by another process where possible.

    Raises:
        ClusterError: the cluster does not answer, or no worker started on it.
        ConfigError: the process that was to find it out ended.
    """
    if not config.is_local:
        check_answers(str(config.address), config.connect_timeout_seconds)
        # imports ray
        from autotune.execution.ray_cluster import cluster_capabilities  # noqa: PLC0415

        return cluster_capabilities(config)
    with calling(launcher) as call_there:
        return call_there(LOCAL_CAPABILITIES)  # type: ignore[no-any-return]  # called by its name


class RaySession:
    """A connection to Ray that is made in a thread of its own, so that the driver does not wait
    while Ray starts.

    The thread lives as long as Ray does: the kernel ends the processes that it started together
    with it.
    """

    def __init__(self, config: ClusterConfig, launcher: Launcher | None = None) -> None:
        self._config = config
        self._folder = None if launcher is None else launcher.folder
        self._size: Future[ClusterSize] = Future()
        self._heartbeat: Heartbeat | None = None
        self._lost: Future[str] = Future()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._held: Future[None] | None = None
        """Done once the connection is closed; None before it is begun."""

    @property
    def is_lost(self) -> bool:
        """Whether Ray was there and is gone."""
        return self._lost.done()

    def start(self) -> None:
        """Begin to connect, unless that has begun already."""
        if self._held is None:
            # requests, which Ray imports, ignores this itself, but a catch_warnings() of another
            # thread (Hydra's) may undo that
            warnings.filterwarnings("ignore", message="SOCKS support in urllib3")
            self._held = in_thread("ray", self._hold)

    def size(self, interrupt: Interrupt) -> ClusterSize:
        """Wait for the connection and return the cluster's resources.

        Raises:
            ClusterError: the cluster does not answer, has no machine of the kind asked for, or
                cannot hold even one worker.
            KeyboardInterrupt: ``interrupt`` was set meanwhile.
        """
        self.start()
        while not wait([self._size], timeout=_POLL_SECONDS).done:
            set_handler(signal.getsignal(signal.SIGTERM))
            if interrupt.is_set():
                raise KeyboardInterrupt
        size = self._size.result()
        set_handler(signal.getsignal(signal.SIGTERM))
        return size

    def size_now(self) -> ClusterSize:
        """The resources of the machines that are alive now; called once Ray is there."""
        assert self._heartbeat is not None, "it is connected"
        return self._heartbeat.size()

    def draining(self) -> frozenset[str]:
        """Addresses of the machines that are about to leave, see ``Heartbeat.draining``."""
        assert self._heartbeat is not None, "it is connected"
        return self._heartbeat.draining()

    def run(self, work: Callable[[], Result], interrupt: Interrupt) -> Result:
        """Call ``work``, which may call Ray, in a thread of its own, and return what it returns.

        Args:
            interrupt: ends ``work`` in good order when set; it is set here if Ray is gone.

        Raises:
            ClusterError: Ray is gone.
            KeyboardInterrupt: Ray is gone, too, after ``interrupt`` had its notice.
        """
        done = in_thread("with-ray", work)
        either: list[Future[Any]] = [done, self._lost]
        try:
            while not wait(either, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED).done:
                # handlers run between waits, also of a signal that reached another thread, as after
                # SIGSTOP
                if interrupt.notice.is_set():
                    self._is_gone(is_interrupted=True)
        finally:
            is_interrupted = interrupt.notice.is_set()
            is_cut = not (done.done() or is_interrupted)  # by the end of Ray alone
            if not done.done():  # Ray is gone, or a second Ctrl-C came
                interrupt.set()
                wait([done], _LEAVE_SECONDS)
        # work that was cut may still end in good order, as the user's Ctrl-C has it end
        if self._is_gone() and (is_cut or not done.done() or done.exception() is not None):
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

    def _is_gone(self, *, is_interrupted: bool = False) -> bool:
        with self._lock:
            if self._lost.done() or self._heartbeat is None:
                return self._lost.done()
            if (reason := self._heartbeat.lost(is_interrupted=is_interrupted)) is not None:
                self._lost.set_result(reason)
            return self._lost.done()

    def close(self) -> None:
        """Disconnect, and wait until that is done.

        A Ray that is gone, or still starting, is waited for some seconds only.
        """
        self._is_over.set()
        held, self._held = self._held, None
        if held is not None:
            until = time.monotonic() + _SHUTDOWN_SECONDS
            while wait([held], _POLL_SECONDS).not_done and time.monotonic() < until:
                set_handler(signal.getsignal(signal.SIGTERM))  # at once, not when Ray is gone
            # what Ray does at exit would wait for the thread, or for a Ray
            if not held.done():
                atexit.unregister(sys.modules["ray"].shutdown)
                if (registry := sys.modules.get("ray.tune.registry")) is not None:
                    atexit.unregister(registry._unregister_all)  # noqa: SLF001  # no public name
            set_handler(signal.getsignal(signal.SIGTERM))

    def _hold(self) -> None:
        try:
            if not self._config.is_local:
                check_answers(str(self._config.address), self._config.connect_timeout_seconds)
            # imports ray
            from autotune.execution.ray_cluster import Heartbeat, connected  # noqa: PLC0415

            with connected(self._config, self._folder) as size:
                self._heartbeat = Heartbeat(self._config)
                self._size.set_result(size)
                while not self._is_over.wait(_WATCH_SECONDS):
                    self._is_gone()
        except BaseException as error:  # raised again in size()
            if self._size.done():
                logger.exception("Ray did not end as it should")
            else:
                self._size.set_exception(error)


def set_handler(handler: Any) -> None:
    """Install a handler of SIGTERM: ``ray.init`` and ``ray.shutdown`` put others in its place,
    also below Python.
    """
    if threading.current_thread() is threading.main_thread():  # Python sets handlers in no other
        signal.signal(signal.SIGTERM, handler)


def check_answers(address: str, timeout_seconds: float) -> None:
    """Refuse an address at which no Ray head answers: Ray itself would try for minutes and print
    many lines.

    The address is asked with ``ray status`` in a separate process, which can be ended after the
    timeout. If RAY_AUTH_MODE is not set, a cluster that wants a token gets this machine's: Ray
    gives that token to a cluster that it starts, but not to its own clients. It reads the mode
    when it is imported, so this is called before.
    """
    if address != "auto":
        _check_listens(address, timeout_seconds)
    first_error = ""
    for mode in ({},) if _AUTH_MODE in os.environ else ({}, {_AUTH_MODE: "token"}):
        command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
        try:
            # our own interpreter, and an address that the user gave
            status = subprocess.run(  # noqa: S603
                command,
                env={**os.environ, **mode},
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
            os.environ.update(mode)
            return
        first_error = first_error or status.stderr
        if "AuthenticationError" not in first_error:
            break
    reason = first_error.strip().rpartition("\n")[2].partition(". ")[0]
    raise ClusterError(f"cluster.address: {address} does not answer ({reason}); {_ACCEPTED}")


_AUTH_MODE = "RAY_AUTH_MODE"
_ACCEPTED = "use the HOST:PORT of a running Ray head, or auto on a machine of a cluster"


def _check_listens(address: str, timeout_seconds: float) -> None:
    host, _, port = address.rpartition(":")
    if not host or "://" in host or not port.isdigit():
        raise ClusterError(f"cluster.address: found {address!r}, must be null, auto or HOST:PORT")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_seconds).close()
    except (OSError, OverflowError) as error:  # OverflowError for a port above 65535
        reason = getattr(error, "strerror", None) or error
        raise ClusterError(
            f"cluster.address: {address} does not answer ({reason}); {_ACCEPTED}"
        ) from error
