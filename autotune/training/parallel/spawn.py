"""Ranks without a cluster: the first rank starts the others as processes on its own machine."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.training.device import pick_device
from autotune.training.parallel.ranks import ALONE, Ranks, open_store
from autotune.training.parallel.rendezvous import Failure, Rendezvous, follow, joined_at

_END_SECONDS = 10.0
"""Seconds that the other ranks may take to end after the first one."""
_HOST = "127.0.0.1"


class RankFailedError(RuntimeError):
    """Another rank met an error; its traceback is the message."""


@contextmanager
def spawned(config: TrialConfig, **settings: Any) -> Iterator[Ranks]:
    """Start the other ranks of a training and join them as the first one; they end with the context.

    Args:
        config: the training's configuration, which gives the number of ranks.
        settings: further arguments of ``start_training``, the same for all ranks.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
        RankFailedError: another rank met an error that ended the training.
    """
    size = config.num_workers
    if size == 1:
        yield ALONE
        return
    if pick_device(config.device).type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(f"parallelism.num_workers: found {size}, accepted are up to {torch.cuda.device_count()}, the GPUs here")
    store, context = open_store(_HOST), multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(1, size)]
    others = [
        context.Process(target=_run_rank, args=(sender, config, _rendezvous(store.port, rank, size), settings), daemon=True)
        for rank, (_, sender) in enumerate(pipes, start=1)
    ]
    for other in others:
        other.start()
    try:
        with joined_at(_rendezvous(store.port, 0, size), config) as ranks:
            yield ranks
    except RuntimeError as error:
        failures = [receiver.recv() for receiver, _ in pipes if receiver.poll(_END_SECONDS)]
        cause = next((failure for failure in failures if failure is not None and not failure.is_lost_connection), None)
        if cause is None:
            raise
        raise RankFailedError(cause.error) from error
    finally:
        for other in others:
            other.join(_END_SECONDS)
            other.kill()


def _rendezvous(port: int, rank: int, size: int) -> Rendezvous:
    return Rendezvous(host=_HOST, port=port, rank=rank, size=size)


def _run_rank(sender: Connection, config: TrialConfig, rendezvous: Rendezvous, settings: dict[str, Any]) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(rendezvous.size)]
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[rendezvous.rank] if rendezvous.rank < len(devices) else ""
    failure: Failure | None = follow(config, rendezvous, **settings)
    sender.send(failure)
