"""Ranks without a cluster: the others are processes that this one starts on its own machine."""

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
from autotune.training.parallel.rendezvous import Failure, Rendezvous, attended, follow

_END_SECONDS = 10.0
"""What the others may take to end once the first one has."""
_HOST = "127.0.0.1"


class RankFailedError(RuntimeError):
    """Another rank met an error; its traceback is the message."""


@contextmanager
def spawned(config: TrialConfig, **settings: Any) -> Iterator[Ranks]:
    """This process as the first of the configuration's ranks, the others started beside it; they end with the context.

    Args:
        config: what they train.
        settings: of ``start_training``, the same for all ranks.

    Raises:
        ConfigError: there are not as many GPUs.
        RankFailedError: another one met an error that ended the training.
    """
    size = config.parallelism["num_workers"]
    if size == 1:
        yield ALONE
        return
    if pick_device(config.device).type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(f"parallelism.num_workers: found {size}, accepted are up to {torch.cuda.device_count()}, the GPUs here")
    store, context = open_store(_HOST), multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(1, size)]
    others = [
        context.Process(target=_work, args=(theirs, config, _rendezvous(store.port, rank, size), settings), daemon=True)
        for rank, (_, theirs) in enumerate(pipes, start=1)
    ]
    for other in others:
        other.start()
    try:
        with attended(_rendezvous(store.port, 0, size), config) as ranks:
            yield ranks
    except RuntimeError as error:
        failures = [ours.recv() for ours, _ in pipes if ours.poll(_END_SECONDS)]
        told = next((each for each in failures if each is not None and not each.is_of_another), None)
        if told is None:
            raise
        raise RankFailedError(told.error) from error
    finally:
        for other in others:
            other.join(_END_SECONDS)
            other.kill()


def _rendezvous(port: int, rank: int, size: int) -> Rendezvous:
    return Rendezvous(host=_HOST, port=port, rank=rank, size=size)


def _work(said: Connection, config: TrialConfig, rendezvous: Rendezvous, settings: dict[str, Any]) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(each) for each in range(rendezvous.size)]
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[rendezvous.rank] if rendezvous.rank < len(devices) else ""
    failure: Failure | None = follow(config, rendezvous, **settings)
    said.send(failure)
