"""What a machine is, which a study keeps as ``machine.yaml``, and how fast its devices and the
links between them are.

All-reduce is measured between processes that join as those of a training do: one that crashes or
hangs does not take the diagnosis with it.
"""

import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in torch's stubs
from torch.multiprocessing.spawn import ProcessException, spawn
from torch.nn.functional import ScalingType, scaled_mm

from autotune.training.capabilities import cpu_name, driver_version, num_available_cpus, versions
from autotune.training.device import no_gpu_reason, synchronizer
from autotune.training.parallel.ranks import joined, open_store

START_SECONDS = 60.0
"""Seconds that the processes of an all-reduce may take to start, import torch and meet."""


def this_machine() -> dict[str, Any]:
    """The machine as this process sees it, as plain data.

    None for what is unknown or not installed.
    """
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "host": platform.node(),
        "processor": {"name": cpu_name(), "num_cpus": num_available_cpus(), "memory_bytes": memory},
        "gpus": [
            {
                "name": gpu.name,
                "compute_capability": f"{gpu.major}.{gpu.minor}",
                "memory_bytes": gpu.total_memory,
            }
            for gpu in gpus
        ],
        "no_gpu_reason": None if gpus else no_gpu_reason(),
        "versions": {**versions(), "driver": driver_version()},
    }


def environment() -> dict[str, Any]:
    """What torch's own ``collect_env`` tells of the machine: operating system, compilers, CUDA,
    driver, processor.
    """
    # takes half a second, of the diagnosis only
    from torch.utils.collect_env import get_env_info  # noqa: PLC0415

    return dict(get_env_info()._asdict())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A measured speed: operations a second of a matrix product, else bytes a second."""

    kind: str
    what: str
    per_second: float | None = None
    """None if it could not be measured."""
    seconds: float | None = None
    """Seconds of one product, copy or all-reduce."""
    reason: str = ""
    """Why it could not be measured."""


def measured_rates(*, seconds: float, say: Callable[[str], None]) -> Iterator[Rate]:
    """Measure products, copies and all-reduce on the CPU and all GPUs, each for ``seconds``.

    ``say`` hears what comes next.
    """
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in (torch.device("cpu"), *gpus):
        say(f"measuring matrix products and copies on {device}")
        yield from product_rates(device, seconds)
        yield from copy_rates(device, seconds)
    say("measuring all-reduce")
    yield from all_reduce_rates("cpu", 2, seconds)
    if len(gpus) > 1:
        yield from all_reduce_rates("cuda", len(gpus), seconds)


def product_rates(device: torch.device, seconds: float) -> Iterator[Rate]:
    """Measure products of two square matrices, 2 n^3 operations, by options of ``precision=`` that
    the device may have.

    Matrices are random, since products of zeros draw less power and run faster than a training's.
    """
    size = 8192 if device.type == "cuda" else 512
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if device.type == "cuda":
        formats |= {"tf32": torch.float32, "fp8": torch.float8_e4m3fn}

    def product(number_format: torch.dtype) -> Callable[[], torch.Tensor]:
        first, second = (torch.randn(size, size, device=device).to(number_format) for _ in range(2))
        if number_format is not torch.float8_e4m3fn:
            return lambda: first @ second
        scale, scaling = torch.ones((), device=device), ScalingType.TensorWise
        columns = second.t()  # float8 products want the second matrix column by column
        return lambda: scaled_mm(
            first,
            columns,
            scale,
            scaling,
            scale,
            scaling,
            output_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    before = torch.get_float32_matmul_precision()
    for name, number_format in formats.items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        what = f"{name} on {device}, {size} rows"
        yield _rate(
            "matrix product",
            what,
            2 * size**3,
            partial(product, number_format),
            seconds,
        )
    torch.set_float32_matmul_precision(before)


def copy_rates(device: torch.device, seconds: float, num_bytes: int = 2**28) -> Iterator[Rate]:
    """Measure copies within the host, or to and from a GPU, with pageable and with pinned host
    memory.
    """
    host = torch.device("cpu")

    def copying(
        source: torch.device, target: torch.device, *, pinned: bool
    ) -> Callable[[], torch.Tensor]:
        origin, copy = (
            torch.ones(
                num_bytes, dtype=torch.uint8, device=place, pin_memory=pinned and place == host
            )
            for place in (source, target)
        )
        return lambda: copy.copy_(origin, non_blocking=True)

    for source, target in (
        ((host, device), (device, host)) if device.type == "cuda" else ((host, host),)
    ):
        for pinned in (False, True) if device.type == "cuda" else (False,):
            what = f"{source} to {target}{', pinned' if pinned else ''}"
            yield _rate(
                "copy",
                what,
                num_bytes,
                partial(copying, source, target, pinned=pinned),
                seconds,
            )


def _rate(
    kind: str, what: str, amount: int, make: Callable[[], Callable[[], object]], seconds: float
) -> Rate:
    """The rate of what ``make`` returns, of which one run handles ``amount`` operations or
    bytes.
    """
    # a study, which only wants `this_machine`, needs none
    from torch.utils.benchmark import Timer  # noqa: PLC0415

    try:
        timer = Timer("run()", globals={"run": make()}, num_threads=torch.get_num_threads())
        took = float(timer.blocked_autorange(min_run_time=seconds).median)
    except RuntimeError as error:  # not implemented, too old a GPU, or out of memory
        return Rate(
            kind=kind, what=what, reason=str(error).partition("\n")[0] or type(error).__name__
        )
    return Rate(kind=kind, what=what, per_second=amount / took, seconds=took)


def all_reduce_rates(device_type: str, num_ranks: int, seconds: float) -> Iterator[Rate]:
    """Measure all-reduce of float32 tensors: over gloo between processes on the CPU, over NCCL with
    a GPU for each.

    The rate is the bus bandwidth of nccl-tests, bytes / seconds * 2 (n - 1) / n for n processes: at
    least that many bytes go into and out of each whatever the algorithm, so it compares with a
    link's bandwidth for any n.

    Source: nccl-tests, doc/PERFORMANCE.md, "Bandwidth".
    """
    what = f"{num_ranks} processes, {'nccl' if device_type == 'cuda' else 'gloo'}"
    store, answers, reason = open_store(), multiprocessing.get_context("spawn").SimpleQueue(), ""
    arguments = (num_ranks, store.port, device_type, seconds, answers)
    deadline = time.monotonic() + START_SECONDS + 3 * seconds
    start: Any = spawn  # torch's stubs have no types for it
    ranks = start(_rank, arguments, num_ranks, join=False, daemon=True)
    try:
        while not ranks.join(max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise ProcessException("no answer in time", 0, 0)
    except ProcessException as error:
        reason = str(error).strip().splitlines()[-1]
    for process in ranks.processes:
        process.kill()
        process.join()
    while not answers.empty():
        num_bytes, took = answers.get()
        bus_rate = num_bytes / took * 2 * (num_ranks - 1) / num_ranks
        yield Rate(
            kind="all-reduce",
            what=f"{what}, {num_bytes / 2**20:g} MiB",
            per_second=bus_rate,
            seconds=took,
        )
    if reason:
        yield Rate(kind="all-reduce", what=what, reason=reason)


def _rank(rank: int, size: int, port: int, device_type: str, seconds: float, answers: Any) -> None:
    """Run as one rank.

    The first one answers with the bytes and the median seconds of an all-reduce at each size.
    """
    torch.set_num_threads(1)  # the other ranks compute at the same time
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    wait = synchronizer(device)
    with joined(
        TCPStore("127.0.0.1", port, is_master=False), rank=rank, size=size, device=device
    ) as ranks:
        for num_bytes in (2**20, 2**24, 2**28) if device_type == "cuda" else (2**16, 2**20, 2**24):
            tensor = torch.zeros(num_bytes // 4, device=device)
            distributed.all_reduce(tensor)
            rounds: list[float] = []
            deadline = time.perf_counter() + seconds
            while ranks.broadcast_from_first(not rounds or time.perf_counter() < deadline):
                wait()
                began = time.perf_counter()
                for _ in range(5):
                    distributed.all_reduce(tensor)
                wait()
                rounds.append((time.perf_counter() - began) / 5)
            if ranks.is_first:
                answers.put((num_bytes, statistics.median(rounds)))
