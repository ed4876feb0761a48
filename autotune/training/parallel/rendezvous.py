"""The rendezvous of a training's ranks, and the training of every rank but the first."""

import contextlib
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

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """How one rank finds the others, as plain data: the first rank holds a store at ``host`` and
    ``port``.
    """

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
        """Whether this rank only lost its connection to another one, whose end is the real
        failure.
        """
        return "onnection closed by peer" in self.error or "onnection reset by peer" in self.error


@contextmanager
def joined_at(rendezvous: Rendezvous, config: TrialConfig) -> Iterator[Ranks]:
    """Join the other ranks as the one that ``rendezvous`` names, until the context ends.

    The first rank's store must be open.

    Raises:
        ConfigError: the backend is nccl, and the device is the CPU.
    """
    device, backend = pick_device(config.device), config.parallelism.get("backend")
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError("parallelism.backend: found nccl, use null or gloo on the CPU")
    with (
        _gloo_interface(rendezvous.host),
        joined(
            _store_of(rendezvous),
            rank=rendezvous.rank,
            size=rendezvous.size,
            device=device,
            backend=backend,
        ) as ranks,
    ):
        yield ranks


def _store_of(rendezvous: Rendezvous) -> TCPStore:
    return TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=TIMEOUT)


@contextmanager
def _gloo_interface(host: str) -> Iterator[None]:
    """Let gloo listen at the network interface by which this machine reaches a host, until the
    context ends, unless the user's environment already names one.

    By default gloo listens at the address of the host's name, on many machines 127.0.0.1, which no
    other machine can reach.
    """
    name = _interface_towards(host)
    if name is None or _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]


def _interface_towards(host: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((host, 1))
        except OSError:
            return None
        address = probe.getsockname()[0]
    for name, interface in psutil.net_if_addrs().items():
        if address in [known.address for known in interface]:
            return name
    return None


class StopNotes:
    """Where ranks note that they were stopped, which the first rank cannot see: it only waits
    for them. Notes are in the ranks' store.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    def note_stopped_seconds(self, seconds: float) -> None:
        """Note how long this rank has been stopped in all; may be called in any thread."""
        with contextlib.suppress(RuntimeError):  # the first rank is gone
            _store_of(self._rendezvous).set(f"{_STOPPED}{self._rendezvous.rank}", str(seconds))


def stopped_seconds(store: TCPStore, size: int) -> float:
    """Longest time that one of the other ranks of a training has been stopped, as they have
    noted it in the first rank's store.
    """
    noted = [f"{_STOPPED}{rank}" for rank in range(1, size)]
    return max((float(store.get(key)) for key in noted if store.check([key])), default=0.0)


_STOPPED = "autotune/stopped_seconds/"


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
    # any fault of the trained code is an outcome, told with its traceback
    except Exception as error:  # noqa: BLE001
        return Failure(
            outcome=Outcome.OUT_OF_MEMORY if is_out_of_memory(error) else Outcome.ERRORED,
            error=traceback.format_exc(),
        )
    return None
