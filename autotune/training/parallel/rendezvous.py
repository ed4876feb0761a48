"""Where the ranks of one training meet, and how each of them trains."""

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
    """How one process finds the others, as plain data: the first rank holds a store there."""

    host: str
    port: int
    rank: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What ended a rank before the first one ended the training."""

    outcome: Outcome
    error: str

    @property
    def is_of_another(self) -> bool:
        """Whether this rank only met that another one was gone."""
        return "onnection closed by peer" in self.error or "onnection reset by peer" in self.error


@contextmanager
def attended(rendezvous: Rendezvous, config: TrialConfig) -> Iterator[Ranks]:
    """This process as one of the ranks that meet, until the context ends; the first one's store must be open.

    Raises:
        ConfigError: a backend that the device does not have.
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
    """Have gloo listen there, unless the user's environment says where.

    Left alone it listens where the host's name leads, which on many machines is 127.0.0.1: no other one can reach that.
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
    """This machine's network interface by which it reaches a host; None where that is not told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((host, 1))
        except OSError:
            return None
        own = probe.getsockname()[0]
    return next((name for name, found in psutil.net_if_addrs().items() if any(each.address == own for each in found)), None)


def follow(config: TrialConfig, rendezvous: Rendezvous, **settings: Any) -> Failure | None:
    """Train as a rank that is not the first, until that one ends the training.

    Args:
        settings: of ``start_training``, the same for all ranks.

    Returns:
        What went wrong here; None where nothing did.
    """
    try:
        with attended(rendezvous, config) as ranks:
            for _ in start_training(config, ranks=ranks, **settings):
                raise AssertionError("only the first rank yields")
    except AutotuneError as error:
        return Failure(outcome=Outcome.INVALID, error=str(error))
    except Exception as error:  # noqa: BLE001  # any fault of the trained code is an outcome, told with its traceback
        return Failure(outcome=Outcome.OUT_OF_MEMORY if is_out_of_memory(error) else Outcome.ERRORED, error=traceback.format_exc())
    return None
