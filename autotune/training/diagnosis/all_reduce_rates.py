"""All-reduce rates between processes on this machine: data-parallel training all-reduces its gradients in every step.

Each rank is a process of its own, and ranks join as those of a training do. A rank that crashes or hangs therefore does not take the
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
from autotune.training.diagnosis.rounds import median_run_seconds
from autotune.training.parallel.ranks import Ranks, joined, open_store

SIZES = {"cpu": (2**16, 2**20, 2**24), "cuda": (2**20, 2**24, 2**28)}
"""Bytes of each rank's tensor, by device type: from a size whose time is all latency to one whose time is all bandwidth."""
_HOST = "127.0.0.1"
_START_SECONDS = 60.0
"""Seconds that processes may take to start, import torch and meet, and a few runs may take beyond their time limit."""


def all_reduce_rates(
    device_type: str, *, num_ranks: int, limit_seconds: float, sizes: Sequence[int] | None = None
) -> Iterator[AllReduceRate | NotMeasured]:
    """Measure all-reduce of float32 tensors at each size: over gloo between CPU processes, over NCCL with one GPU for each rank.

    Args:
        device_type: ``cpu`` or ``cuda``.
        num_ranks: number of processes, at least two.
        limit_seconds: time limit for each size; starting the processes is not counted.
        sizes: bytes of each rank's tensor; None for the ``SIZES`` of the device type.
    """
    sizes = SIZES[device_type] if sizes is None else sizes
    backend = "nccl" if device_type == "cuda" else "gloo"
    what = f"all-reduce of {num_ranks} processes over {backend}"
    context = multiprocessing.get_context("spawn")
    store = open_store()
    processes: dict[Connection, BaseProcess] = {}
    try:
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(
                target=_run_rank, args=(rank, num_ranks, store.port, device_type, limit_seconds, tuple(sizes), sender), daemon=True
            )
            process.start()
            processes[receiver] = process
            sender.close()  # so that the pipe closes when the process ends
        yield from _received_rates(dict(processes), what, backend, num_ranks, sizes, limit_seconds)
    except OSError as error:
        yield NotMeasured(what=what, reason=f"processes do not start: {error.strerror}")
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _received_rates(
    processes: dict[Connection, BaseProcess], what: str, backend: str, num_ranks: int, sizes: Sequence[int], limit_seconds: float
) -> Iterator[AllReduceRate | NotMeasured]:
    """Yield the rate at each size as the first rank sends it; after a failure of any rank, one ``NotMeasured`` and no more."""
    deadline = time.monotonic() + _START_SECONDS
    for num_bytes in sizes:
        deadline += limit_seconds
        answer = _next_answer(processes, deadline)
        if isinstance(answer, str):
            yield NotMeasured(what=what, reason=f"{answer}, at {num_bytes} bytes")
            return
        yield AllReduceRate(
            backend=backend,
            num_ranks=num_ranks,
            num_bytes=num_bytes,
            seconds=answer,
            bus_bytes_per_second=bus_bandwidth(num_bytes, answer, num_ranks),
        )


def _next_answer(processes: dict[Connection, BaseProcess], deadline: float) -> float | str:
    """The next seconds that the first rank sends, or the failure of any rank in words; drops processes that ended without an error."""
    while True:
        ready = wait(list(processes), max(0.0, deadline - time.monotonic()))
        if not ready:
            return "no answer in time"
        for receiver in ready:
            assert isinstance(receiver, Connection)
            try:
                answer: float | str = receiver.recv()
            except EOFError:
                process = processes.pop(receiver)
                process.join()
                if process.exitcode:
                    return f"a process ended with exit code {process.exitcode}"
            else:
                return answer


def bus_bandwidth(num_bytes: int, seconds: float, num_ranks: int) -> float:
    """Bus bandwidth of an all-reduce in bytes per second, as nccl-tests defines it: num_bytes / seconds * 2 (n - 1) / n for n ranks.

    At least that many bytes go into and out of each rank whatever the algorithm, so the number compares with a link's own bandwidth for
    any n.

    Source: nccl-tests, doc/PERFORMANCE.md, "Bandwidth".
    """
    return num_bytes / seconds * 2 * (num_ranks - 1) / num_ranks


def _run_rank(rank: int, size: int, port: int, device_type: str, limit_seconds: float, sizes: Sequence[int], sender: Connection) -> None:
    """Run as one rank: the first rank sends the seconds of one all-reduce at each size, and a rank that fails sends its error message."""
    torch.set_num_threads(1)  # the other ranks compute at the same time
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    try:
        store = TCPStore(_HOST, port, is_master=False)
        with joined(store, rank=rank, size=size, device=device) as ranks:
            for num_bytes in sizes:
                seconds = _all_reduce_seconds(torch.zeros(num_bytes // 4, device=device), limit_seconds, ranks)
                if ranks.is_first:
                    sender.send(seconds)
    except RuntimeError as error:  # the base class of torch.distributed's errors
        with contextlib.suppress(OSError):  # nobody listens any more
            sender.send(str(error).splitlines()[0])


def _all_reduce_seconds(tensor: torch.Tensor, limit_seconds: float, ranks: Ranks) -> float:
    return median_run_seconds(lambda: distributed.all_reduce(tensor), synchronizer(tensor.device), limit_seconds=limit_seconds, ranks=ranks)
