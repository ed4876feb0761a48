"""Ranks in processes of their own, as a trial's workers are.

They are started once, and train one configuration after another.
"""

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from autotune.config.compose import Composer

MAX_RANKS = 4


def losses(overrides: Sequence[str], **settings: Any) -> list[float]:
    """The loss of every evaluation of a training."""
    from autotune.training.loop import train

    return [each.loss for each in train(Composer(overrides).compose().trial, **settings)]


def _work(orders: Connection) -> None:
    import torch
    from torch.distributed import TCPStore

    from autotune.training.parallel.ranks import joined

    torch.set_num_threads(1)
    while (order := orders.recv()) is not None:
        rank, size, port, work, arguments, settings = order
        try:
            store = TCPStore("127.0.0.1", port, is_master=False)
            with joined(store, rank=rank, size=size, device=torch.device("cpu")) as ranks:
                orders.send(work(*arguments, ranks=ranks, **settings))
        except Exception:  # noqa: BLE001  # told where it is waited for
            orders.send(traceback.format_exc())


class Ranks:
    """Processes that are ranks of one training after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = [context.Pipe() for _ in range(MAX_RANKS)]
        self._processes = [
            context.Process(target=_work, args=(theirs,), daemon=True) for _, theirs in self._pipes
        ]
        for process in self._processes:
            process.start()

    def train(self, size: int, overrides: Sequence[str], **settings: Any) -> list[Any]:
        """What each rank found: its losses, or a traceback."""
        return self.call(size, losses, list(overrides), **settings)

    def call(
        self, size: int, work: Callable[..., Any], *arguments: Any, **settings: Any
    ) -> list[Any]:
        """What a function returned on each rank, which it is given as ``ranks``.

        A traceback where it failed.
        """
        from autotune.training.parallel.ranks import open_store

        store = open_store()
        for rank in range(size):
            self._pipes[rank][0].send((rank, size, store.port, work, arguments, settings))
        return [self._pipes[rank][0].recv() for rank in range(size)]

    def end(self) -> None:
        """End the processes."""
        for ours, _ in self._pipes:
            ours.send(None)
        for process in self._processes:
            process.join(10)
