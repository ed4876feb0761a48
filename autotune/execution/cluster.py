"""Connecting to Ray: a local one started for the study, or a running cluster."""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.config.schema import ClusterConfig
from autotune.errors import ClusterError


@dataclass(frozen=True, kw_only=True)
class ClusterSize:
    """What the cluster holds in all."""

    num_cpus: int
    num_gpus: int
    num_nodes: int

    def num_at_once(self, num_cpus: int, num_gpus: int) -> int:
        """How many trials of these resources fit, at least one."""
        return max(1, min(self.num_cpus // num_cpus, self.num_gpus // num_gpus if num_gpus else self.num_cpus))


@contextlib.contextmanager
def connected(config: ClusterConfig) -> Iterator[ClusterSize]:
    """Ray, while the context lasts; a local one ends with it.

    Raises:
        ClusterError: the cluster does not answer, or cannot hold even one worker.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if config.address not in (None, "auto", "local"):
        _check_answers(str(config.address), config.connect_timeout_seconds)
    import ray  # noqa: PLC0415  # after the environment is set, and only when trials run

    _log_to_autotune("ray")
    options = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    try:
        if config.address in (None, "local"):
            ray.init(address="local", num_cpus=config.num_cpus, num_gpus=config.num_gpus, include_dashboard=False, **options)
        else:
            ray.init(address=config.address, **options)
    except (ConnectionError, TimeoutError, RuntimeError, ValueError, OSError) as error:
        raise ClusterError(f"cluster.address: {config.address or 'local'}: {_first_line(error)}") from error
    try:
        resources = ray.cluster_resources()
        size = ClusterSize(
            num_cpus=int(resources.get("CPU", 0)),
            num_gpus=int(resources.get("GPU", 0)),
            num_nodes=sum(1 for node in ray.nodes() if node["Alive"]),
        )
        if size.num_cpus < config.cpus_per_worker:
            raise ClusterError(
                f"cluster.cpus_per_worker: found {config.cpus_per_worker}, accepted is at most the {size.num_cpus} CPUs of the cluster"
            )
        yield size
    finally:
        ray.shutdown()


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
    "TUNE_RESULT_BUFFER_LENGTH": "1",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "30",
    "TUNE_WARN_THRESHOLD_S": "5",
}
"""Ray keeps quiet (that a worker died is told as its trial's outcome), keeps no state of its own, and leaves the working
folder alone: the study's storage is what resumes."""


def _check_answers(address: str, timeout_seconds: float) -> None:
    """Refuse an address at which nothing listens, which Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(f"cluster.address: found {address!r}, accepted are null, auto and HOST:PORT")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_seconds):
            pass
    except OSError as error:
        raise ClusterError(
            f"cluster.address: {address} does not answer ({error.strerror or error}); accepted is the HOST:PORT of a running Ray head"
        ) from error


def _log_to_autotune(name: str) -> None:
    """What a library logs goes to autotune's log file, not to the terminal."""
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.propagate = True


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
