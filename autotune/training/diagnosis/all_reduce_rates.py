"""How fast processes on this machine add up what each of them has: what data-parallel training does with its gradients.

Each rank is a process of its own, as in training, and joins the others in training's own way. So none that crashes or hangs takes the
diagnosis with it.
"""

import contextlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in torch's stubs

from autotune.machine import AllReduceRate, NotMeasured
from autotune.training.device import synchronizer
from autotune.training.diagnosis.rounds import seconds_a_run
from autotune.training.parallel.ranks import Ranks, joined, open_store

SIZES = {"cpu": (2**16, 2**20, 2**24), "cuda": (2**20, 2**24, 2**28)}
"""Bytes of each rank's tensor, by kind of device: from where the time is all latency to where it is all bandwidth."""
_HOST = "127.0.0.1"
_START_SECONDS = 60.0
"""What processes may take to start, import torch and meet; and what a few runs may take beyond their limit."""


def all_reduce_rates(
    device_type: str, *, num_ranks: int, limit_seconds: float, sizes: Sequence[int] | None = None
) -> Iterator[AllReduceRate | NotMeasured]:
    """The rate at each size: of float32 tensors, over gloo between processes on the CPU, over NCCL with a GPU for each rank.

    Args:
        device_type: ``cpu`` or ``cuda``.
        num_ranks: processes, two at least.
        limit_seconds: of each size, beside starting the processes.
        sizes: bytes of each rank's tensor; None for a few that suit the device.
    """
    sizes = SIZES[device_type] if sizes is None else sizes
    backend = "nccl" if device_type == "cuda" else "gloo"
    what = f"all-reduce of {num_ranks} processes over {backend}"
    context = multiprocessing.get_context("spawn")
    store = open_store()
    heard: dict[Connection, BaseProcess] = {}
    try:
        for rank in range(num_ranks):
            told_to, tells = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(
                target=_run_rank, args=(rank, num_ranks, store.port, device_type, limit_seconds, tuple(sizes), tells), daemon=True
            )
            process.start()
            heard[told_to] = process
            tells.close()  # so that the pipe ends with the process
        yield from _heard_rates(dict(heard), what, backend, num_ranks, sizes, limit_seconds)
    except OSError as error:
        yield NotMeasured(what=what, reason=f"processes do not start: {error.strerror}")
    finally:
        for process in heard.values():
            process.kill()
            process.join()


def _heard_rates(
    heard: dict[Connection, BaseProcess], what: str, backend: str, num_ranks: int, sizes: Sequence[int], limit_seconds: float
) -> Iterator[AllReduceRate | NotMeasured]:
    """What the ranks tell, until they have told all or one of them fails."""
    until = time.monotonic() + _START_SECONDS
    for num_bytes in sizes:
        until += limit_seconds
        told = _next_told(heard, until)
        if isinstance(told, str):
            yield NotMeasured(what=what, reason=f"{told}, at {num_bytes} bytes")
            return
        yield AllReduceRate(
            backend=backend,
            num_ranks=num_ranks,
            num_bytes=num_bytes,
            seconds=told,
            bus_bytes_per_second=bus_bandwidth(num_bytes, told, num_ranks),
        )


def _next_told(heard: dict[Connection, BaseProcess], until: float) -> float | str:
    """The seconds that the first rank tells next, or in words what went wrong with any; a rank that has ended well is heard no more."""
    while True:
        ready = wait(list(heard), max(0.0, until - time.monotonic()))
        if not ready:
            return "no answer in time"
        for each in ready:
            assert isinstance(each, Connection)
            try:
                told: float | str = each.recv()
            except EOFError:
                process = heard.pop(each)
                process.join()
                if process.exitcode:
                    return f"a process ended with exit code {process.exitcode}"
            else:
                return told


def bus_bandwidth(num_bytes: int, seconds: float, num_ranks: int) -> float:
    """Bytes a second over each link, as nccl-tests counts them for all-reduce: num_bytes / seconds * 2 (n - 1) / n for n ranks.

    Whatever the algorithm, at least so many bytes go into and out of each rank; so the number compares with what a link can, for any n.
    Source: nccl-tests, doc/PERFORMANCE.md, "Bandwidth".
    """
    return num_bytes / seconds * 2 * (num_ranks - 1) / num_ranks


def _run_rank(rank: int, size: int, port: int, device_type: str, limit_seconds: float, sizes: Sequence[int], tells: Connection) -> None:
    """One rank's part; the first one tells the seconds that an all-reduce takes at each size, and any in words why it cannot."""
    torch.set_num_threads(1)  # as the others compute at the same time
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    try:
        store = TCPStore(_HOST, port, is_master=False)
        with joined(store, rank=rank, size=size, device=device) as ranks:
            for num_bytes in sizes:
                seconds = _seconds(torch.zeros(num_bytes // 4, device=device), limit_seconds, ranks)
                if ranks.is_first:
                    tells.send(seconds)
    except RuntimeError as error:  # what torch.distributed raises is one
        with contextlib.suppress(OSError):  # nobody listens any more
            tells.send(str(error).splitlines()[0])


def _seconds(tensor: torch.Tensor, limit_seconds: float, ranks: Ranks) -> float:
    return seconds_a_run(lambda: distributed.all_reduce(tensor), synchronizer(tensor.device), limit_seconds=limit_seconds, ranks=ranks)
