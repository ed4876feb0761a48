"""Ray: a local instance that is started and ended, or a running cluster that is joined.

The environment is set before Ray is imported.
"""

import contextlib
import gc
import logging
import math
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from autotune.config.schema import ClusterConfig
from autotune.errors import ClusterError
from autotune.execution.cluster import LOCAL_CAPABILITIES, ClusterSize, set_handler
from autotune.execution.launcher import RAY_FOLDER, RAY_MARK, call_by_name, private_folder
from autotune.execution.task import ACCELERATOR
from autotune.training.capabilities import Capabilities, together

_ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_TRAIN_COUNT_PREEMPTION_AS_FAILURE": "1",
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
also on a machine that was drained, and Ray does not end this process a minute after it is gone
itself. Ray may start any number of workers at once: ``TrialManager.has_room`` limits their number.
"""
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import ray  # noqa: E402  # after the environment is set

_HEAD_TIMEOUTS = 4
"""Time for which the head of a cluster may not answer before it counts as gone, in units of
``cluster.connect_timeout_seconds``: by default longer than the minute for which the cluster's own
processes wait for a head that is started again."""
_ANSWER_SECONDS = 5.0
"""Longest wait for one answer of a running cluster's head."""
_LOOK_EVERY_SECONDS = 5.0
"""Seconds between two looks for machines that are being drained."""
_PROBE_SECONDS = 60.0
_ADVICE = "; or start Ray with `ray start --head` and add cluster.address=auto"
"""What to do where a local Ray did not start, as the end of a message."""


@contextlib.contextmanager
def connected(config: ClusterConfig, folder: Path | None = None) -> Iterator[ClusterSize]:
    """Connect to Ray while the context lasts; a Ray of this process's own is shut down at the end.

    Args:
        config: which cluster.
        folder: private folder for the files of a Ray of this process's own; None for a new one.

    Raises:
        ClusterError: the cluster does not answer, has no machine of the kind asked for, or cannot
            hold even one worker.
    """
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        if config.is_local:
            # Ray's 15 lets timed workers wait for all other processes
            os.environ.setdefault("RAY_worker_niceness", "0")
            # Ray Tune's workers have another environment
            os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
            if folder is None:
                folder = private_folder()
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            # only while Ray's processes start: others that this process starts are not Ray's
            os.environ[RAY_MARK] = str(folder)
            options = {
                "num_cpus": config.num_cpus,
                "num_gpus": config.num_gpus,
                "include_dashboard": False,
                "_temp_dir": str(folder / RAY_FOLDER),  # Ray lets all users write in it
            }
        logger = logging.getLogger("ray")  # to autotune's log file, not to the terminal
        logger.handlers.clear()
        logger.propagate = True
        # mute: Ray's own processes want a token, and its SIGTERM handler is not installed
        for name in ("authentication", "worker"):
            logging.getLogger(f"ray._private.{name}").setLevel(logging.ERROR)
        handler = signal.getsignal(signal.SIGTERM)
        stack.callback(set_handler, handler)
        # Ray ends a process in which another thread frees one of Ray's objects meanwhile
        if gc.isenabled():
            stack.callback(gc.enable)
        stack.callback(ray.shutdown)
        stack.callback(gc.disable)
        # Ray's processes inherit it: a closed terminal, or a notice, is for the driver
        blocked = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
        )
        try:
            ray.init(
                address=config.address or "local",
                logging_level=logging.ERROR,
                log_to_driver=False,
                configure_logging=False,
                **options,
            )
        except (Exception, SystemExit) as error:  # Ray raises both where it does not start
            advice = _ADVICE if config.is_local else ""
            raise ClusterError(
                f"cluster.address: {config.address or 'local'}: {_first_line(error)}{advice}"
            ) from error
        finally:
            os.environ.pop(RAY_MARK, None)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            set_handler(handler)
        size = size_of(config.accelerator_type)
        if config.accelerator_type is not None and not size.machines:
            kinds = ", ".join(_accelerator_types())
            accepted = f" or {kinds}" if kinds else ", since Ray knows of no GPU's kind there"
            raise ClusterError(
                f"cluster.accelerator_type: found {config.accelerator_type}, use null{accepted}"
            )
        if size.num_cpus < (config.cpus_per_worker or 1):
            raise ClusterError(
                f"cluster.cpus_per_worker: found {config.cpus_per_worker or 1}; the cluster has"
                f" {size.num_cpus} CPUs"
            )
        yield size


class Heartbeat:
    """Tells when the Ray that this process is connected to is gone: its processes here have
    ended, or its head does not answer.
    """

    def __init__(self, config: ClusterConfig) -> None:
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._head = (host.strip("[]"), int(port))
        node = ray._private.worker._global_node  # noqa: SLF001  # no public name
        self._processes = [each.process for some in node.all_processes.values() for each in some]
        children = psutil.Process().children()
        self._own = {
            child: _NEEDED[name] for child in children if (name := child.name()) in _NEEDED
        }
        self._answered_at = time.monotonic()
        self._head_seconds = _HEAD_TIMEOUTS * config.connect_timeout_seconds
        self._accelerator_type = config.accelerator_type
        self._draining: frozenset[str] = frozenset()
        self._looked_at = -math.inf

    def draining(self) -> frozenset[str]:
        """Addresses of the machines that take no more work and are about to leave, as spot machines
        before they are taken back (``ray drain-node``); asked for every few seconds.
        """
        now = time.monotonic()
        if now > self._looked_at + _LOOK_EVERY_SECONDS:
            self._looked_at = now
            nodes = ray._private.state.state.get_draining_nodes()  # noqa: SLF001  # no public name
            self._draining = frozenset(
                node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] in nodes
            )
        return self._draining

    def size(self) -> ClusterSize:
        """The resources of the machines that are alive now and have GPUs of the kind wanted."""
        return size_of(self._accelerator_type)

    def lost(self, *, is_interrupted: bool = False) -> str | None:
        """Why Ray counts as gone; None if it is there.

        Where a signal has interrupted this process, a Ray of its own that has got it, too, is
        ended: its raylet would take ten seconds, and answer nothing.
        """
        if is_interrupted and any(process.poll() is not None for process in self._processes):
            for process in self._processes:
                process.kill()
            return "the signal to this process has ended it"
        for process, what in self._own.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    continue
            return f"its {what} has ended"
        try:
            socket.create_connection(self._head, timeout=_ANSWER_SECONDS).close()
        except OSError as error:
            if time.monotonic() - self._answered_at > self._head_seconds:
                return (
                    f"its head does not answer ({getattr(error, 'strerror', None) or error}) for"
                    f" {self._head_seconds:g} s (4 x cluster.connect_timeout_seconds)"
                )
        else:
            self._answered_at = time.monotonic()
        return None


_NEEDED = {"gcs_server": "control service (gcs_server)", "raylet": "raylet"}
"""The processes without which a local Ray is gone."""


def cluster_capabilities(config: ClusterConfig) -> Capabilities:
    """What the machines of a running cluster can run, measured by a worker on a node of each kind
    of GPU, or on any without GPUs.

    Raises:
        ClusterError: the cluster does not answer, or no worker started on it.
    """
    with connected(config) as size:
        probe = ray.remote(call_by_name)
        kinds: list[str | None] = [config.accelerator_type]
        if config.accelerator_type is None:
            kinds = [*_accelerator_types()] or kinds
        num_gpus = min(1, size.num_gpus)
        probes = [
            probe.options(num_cpus=0, num_gpus=num_gpus, accelerator_type=kind).remote(
                LOCAL_CAPABILITIES
            )
            for kind in kinds
        ]
        try:
            # all GPUs of a kind may be taken
            answered, _ = ray.wait(probes, num_returns=len(probes), timeout=_PROBE_SECONDS)
            nodes: list[Capabilities] = ray.get(answered or probes, timeout=0)
        except (ray.exceptions.RayError, ImportError) as error:
            raise ClusterError(
                f"cluster.address: {config.address}: no worker came up ({_first_line(error)})"
            ) from error
        return replace(together(nodes), num_cpus=size.num_cpus, num_gpus=size.num_gpus)


def _machines() -> list[Mapping[str, float]]:
    """Resources of each machine that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def size_of(accelerator_type: str | None) -> ClusterSize:
    """The resources of the machines that are alive and have GPUs of the given kind, or of all."""
    return ClusterSize(
        tuple(
            (int(resources.get("CPU", 0)), int(resources.get("GPU", 0)))
            for resources in _machines()
            if accelerator_type is None or f"{ACCELERATOR}{accelerator_type}" in resources
        )
    )


def _accelerator_types() -> list[str]:
    """Kinds of GPU of the machines that are alive, as Ray names them."""
    names = {name for machine in _machines() for name in machine}
    return sorted(name.removeprefix(ACCELERATOR) for name in names if name.startswith(ACCELERATOR))


def _first_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "Ray did not start"
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
