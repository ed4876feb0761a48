"""The rendezvous of a training's ranks, and the training of every rank but the first."""

import os
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in torch's stubs

from autotune.config.schema import TrialConfig
from autotune.errors import AutotuneError, ConfigError
from autotune.outcome import Outcome
from autotune.training.device import is_out_of_memory, pick_device
from autotune.training.parallel.ranks import TIMEOUT, Ranks, joined
from autotune.training.run import start_training


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """How one rank finds the others, as plain data: the first rank holds a store at ``host`` and ``port``."""

    host: str
    port: int
    rank: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error that ended a rank before the first rank ended the training."""

    outcome: Outcome
    error: str

    @property
    def is_lost_connection(self) -> bool:
        """Whether this rank only lost its connection to another one, whose end is the real failure."""
        return "onnection closed by peer" in self.error or "onnection reset by peer" in self.error


@contextmanager
def joined_at(rendezvous: Rendezvous, config: TrialConfig) -> Iterator[Ranks]:
    """Join the other ranks as the one that ``rendezvous`` names, until the context ends; the first rank's store must be open.

    Raises:
        ConfigError: the backend is nccl, and the device is the CPU.
    """
    device, backend = pick_device(config.device), config.parallelism.get("backend")
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError("parallelism.backend: found nccl, accepted on the CPU are null and gloo")
    store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=TIMEOUT)
    with (
        _gloo_interface(_interface_towards(rendezvous.host)),
        joined(store, rank=rendezvous.rank, size=rendezvous.size, device=device, backend=backend) as ranks,
    ):
        yield ranks


@contextmanager
def _gloo_interface(name: str | None) -> Iterator[None]:
    """Let gloo listen at a network interface until the context ends, unless the user's environment already names one.

    By default gloo listens at the address of the host's name, on many machines 127.0.0.1, which no other machine can reach.
    """
    if name is None or _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]


_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def _interface_towards(host: str) -> str | None:
    """Name of the network interface by which this machine reaches a host; None if it cannot be found out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((host, 1))
        except OSError:
            return None
        local = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(address.address == local for address in addresses)), None)


def follow(config: TrialConfig, rendezvous: Rendezvous, **settings: Any) -> Failure | None:
    """Train as a rank other than the first, until the first rank ends the training.

    Args:
        config: the training's configuration, the same for all ranks.
        rendezvous: where the ranks meet, and which one this is.
        settings: further arguments of ``start_training``, the same for all ranks.

    Returns:
        The error that ended this rank; None if there was none.
    """
    try:
        with joined_at(rendezvous, config) as ranks:
            for _ in start_training(config, ranks=ranks, **settings):
                raise AssertionError("only the first rank yields")
    except AutotuneError as error:
        return Failure(outcome=Outcome.INVALID, error=str(error))
    except Exception as error:  # noqa: BLE001  # any fault of the trained code is an outcome, told with its traceback
        return Failure(outcome=Outcome.OUT_OF_MEMORY if is_out_of_memory(error) else Outcome.ERRORED, error=traceback.format_exc())
    return None
