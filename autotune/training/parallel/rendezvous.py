"""The rendezvous of a training's ranks, and the training of every rank but the first."""

import contextlib
import json
import os
import socket
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in torch's stubs

from autotune.config.schema import TrialConfig
from autotune.contention import Contention
from autotune.errors import ConfigError, StateError
from autotune.failure import Failure, FailureKind
from autotune.training.device import pick_device
from autotune.training.failures import failure_of
from autotune.training.parallel.ranks import TIMEOUT, Ranks, joined
from autotune.training.parallel.reports import FollowingRank
from autotune.training.run import start_training
from autotune.training.states import TrainingStates
from autotune.training.user_training import follow_function

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
    environment = _gloo_environment(rendezvous.host)
    os.environ.update(environment)
    try:
        with joined(
            _store_of(rendezvous),
            rank=rendezvous.rank,
            size=rendezvous.size,
            device=device,
            backend=backend,
        ) as ranks:
            yield ranks
    finally:
        for name in environment:
            del os.environ[name]


def _store_of(rendezvous: Rendezvous) -> TCPStore:
    return TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=TIMEOUT)


def _gloo_environment(host: str) -> dict[str, str]:
    """The environment variable by which gloo listens at the network interface by which this machine
    reaches a host; none where the user's environment names one.

    By default gloo listens at the address of the host's name, on many machines 127.0.0.1, which no
    other machine can reach.
    """
    if _GLOO_INTERFACE in os.environ:
        return {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((host, 1))
        except OSError:
            return {}
        address = probe.getsockname()[0]
    for name, interface in psutil.net_if_addrs().items():
        if address in [known.address for known in interface]:
            return {_GLOO_INTERFACE: name}
    return {}


def torchrun_environment(
    rendezvous: Rendezvous, *, local_rank: int, local_size: int, machine: int, run: str
) -> dict[str, str]:
    """The environment variables by which PyTorch, and libraries on it, find the other ranks: those
    of torchrun.

    The user's first rank listens at ``MASTER_PORT``, which may be another one where it says so.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables.
    """
    return {
        "RANK": str(rendezvous.rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(rendezvous.size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(machine),
        "MASTER_ADDR": rendezvous.host,
        "MASTER_PORT": _store_of(rendezvous).get(_MASTER_PORT).decode(),
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        **_gloo_environment(rendezvous.host),
    }


def tell_ranks(store: TCPStore, kept: socket.socket, folder: Path) -> None:
    """Tell all ranks the port that the first one keeps for the process group of the user's code,
    and the trial's folder.
    """
    store.set(_FOLDER, str(folder))
    store.set(_MASTER_PORT, str(kept.getsockname()[1]))


def told_folder(rendezvous: Rendezvous) -> Path:
    """The trial's folder on the first rank's machine, once that rank has told it."""
    return Path(_store_of(rendezvous).get(_FOLDER).decode())


_MASTER_PORT, _FOLDER = "autotune/master_port", "autotune/folder"


class ContentionNotes:
    """Where ranks note what disturbed them, which the first rank cannot see: it only waits for
    them. Notes are in the ranks' store.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._store: TCPStore | None = None

    def note(self, contention: Contention) -> None:
        """Note what disturbed this rank so far; may be called in any one thread."""
        with contextlib.suppress(RuntimeError):  # the first rank is gone
            self._store = self._store or _store_of(self._rendezvous)
            self._store.set(f"{_NOTED}{self._rendezvous.rank}", json.dumps(asdict(contention)))


def noted_contention(store: TCPStore, size: int) -> list[Contention]:
    """What disturbed the other ranks of a training, as they have noted it in the first one's
    store.
    """
    noted = [f"{_NOTED}{rank}" for rank in range(1, size)]
    return [Contention.from_dict(json.loads(store.get(key))) for key in noted if store.check([key])]


_NOTED = "autotune/contention/"


def follow(
    config: TrialConfig,
    rendezvous: Rendezvous,
    *,
    num_threads: int,
    state_folder: Path | None = None,
    **settings: Any,
) -> Failure | None:
    """Train as a rank other than the first, until the first rank ends the training.

    Args:
        config: the training's configuration, the same for all ranks.
        rendezvous: where the ranks meet, and which one this is.
        num_threads: number of threads that this rank computes with.
        state_folder: folder of the training's states, whose newest is deleted where this rank
            cannot read its part of it.
        settings: further arguments of ``start_training``, the same for all ranks.

    Returns:
        The error that ended this rank; None if there was none.
    """
    try:
        if config.training is not None:
            follow_function(
                config,
                FollowingRank(
                    _store_of(rendezvous),
                    rendezvous.rank,
                    sees_folder=state_folder is None or state_folder.parent.is_dir(),
                ),
                num_threads=num_threads,
            )
            return None
        with joined_at(rendezvous, config) as ranks:
            for _ in start_training(config, ranks=ranks, num_threads=num_threads, **settings):
                raise AssertionError("only the first rank yields")
    # any fault of the trained code is an outcome
    except (Exception, SystemExit) as error:  # noqa: BLE001
        failure = failure_of(error)
        if failure.kind is FailureKind.LOST and isinstance(error, StateError):
            TrainingStates(state_folder).drop_newest()
        if not failure.has_traceback:
            return failure
        said = textwrap.indent(failure.message, f"[rank{rendezvous.rank}]: ")
        return replace(failure, message=said)
    return None
