"""Rates of a machine: memory copies, matrix products by precision (the upper limit for a network with large layers) and all-reduce.

Each all-reduce rank is a process of its own, and ranks join as those of a training do. A rank that crashes or hangs therefore does not
take the diagnosis with it.
"""

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in torch's stubs
from torch.nn.functional import ScalingType, scaled_mm

from autotune.machine import AllReduceRate, CopyRate, Machine, MatrixRate, NotMeasured, Rate
from autotune.training.capabilities import missing_for
from autotune.training.device import gpu_formats, synchronizer
from autotune.training.parallel.ranks import ALONE, Ranks, joined, open_store

_NUM_CPU_RANKS = 2
COPY_BYTES = 256 * 2**20
"""Bytes of one copy: more than the caches of all but the largest processors hold."""
_HOST_DEVICE = torch.device("cpu")
_MATRIX_SIZES = {"cpu": (512, 2048), "cuda": (1024, 8192)}
"""Rows of the smallest and the largest square matrices that are tried, by device type."""
_LONG_ENOUGH_SECONDS = 0.02
"""Matrices are made larger until one product takes this many seconds."""
_FORMATS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
"""Number format of the matrices that are multiplied, by option of ``precision=``."""
_NAMES = {"tf32": "TensorFloat-32", "bf16": "bfloat16", "fp8": "float8"}
"""Names of number formats, see ``missing_for``, by option of ``precision=``."""
ALL_REDUCE_SIZES = {"cpu": (2**16, 2**20, 2**24), "cuda": (2**20, 2**24, 2**28)}
"""Bytes of each rank's tensor, by device type: from a size whose time is all latency to one whose time is all bandwidth."""
_HOST = "127.0.0.1"
_START_SECONDS = 60.0
"""Seconds that processes may take to start, import torch and meet, and a few runs may take beyond their time limit."""
_ROUND_SECONDS = 0.02
"""Length of a round aimed for: long against waiting for a device and reading the clock, short against a machine's occasional other work."""
_MAX_RUNS = 1000
"""Upper limit on the runs of one round."""


def measured_rates(machine: Machine, *, limit_seconds: float, say: Callable[[str], None]) -> Iterator[Rate]:
    """Measure matrix products, memory copies and all-reduce on the CPU and on every GPU.

    Args:
        machine: the record of this machine.
        limit_seconds: time limit for each rate, beside its set-up.
        say: called with a line on what is measured next.
    """
    devices = [torch.device("cpu"), *(torch.device("cuda", gpu.index) for gpu in machine.gpus)]
    for device in devices:
        say(f"measuring matrix products on {device}")
        yield from matrix_rates(device, limit_seconds=limit_seconds)
    for device in devices:
        say(f"measuring copies {'within the host' if device.type == 'cpu' else f'between the host and {device}'}")
        yield from copy_rates(device, limit_seconds=limit_seconds)
    say(f"measuring all-reduce between {_NUM_CPU_RANKS} processes on the CPU")
    yield from all_reduce_rates("cpu", num_ranks=_NUM_CPU_RANKS, limit_seconds=limit_seconds)
    if len(machine.gpus) > 1:
        say(f"measuring all-reduce between {len(machine.gpus)} GPUs")
        yield from all_reduce_rates("cuda", num_ranks=len(machine.gpus), limit_seconds=limit_seconds)
    else:
        found = "there is one" if machine.gpus else "there is none"
        yield NotMeasured(what="all-reduce between GPUs over nccl", reason=f"takes two GPUs, and {found}")


def copy_rates(device: torch.device, *, limit_seconds: float, num_bytes: int = COPY_BYTES) -> Iterator[CopyRate | NotMeasured]:
    """Measure copies within the host for the CPU; for a GPU, copies to and from it, each with pageable and with pinned host memory.

    The option ``data_path`` prefetches through pinned memory; pageable memory is first copied into pinned memory by the driver.
    ``limit_seconds`` is the time limit for each rate, ``num_bytes`` the size of one copy.
    """
    if device.type == "cpu":
        yield _copy_rate(_HOST_DEVICE, _HOST_DEVICE, "pageable", num_bytes, limit_seconds)
        return
    for memory in ("pageable", "pinned"):
        for source, destination in ((_HOST_DEVICE, device), (device, _HOST_DEVICE)):
            try:
                yield _copy_rate(source, destination, memory, num_bytes, limit_seconds)
            except RuntimeError as error:  # memory that cannot be allocated or pinned
                yield NotMeasured(what=f"copy of {memory} memory, {source} to {destination}", reason=_first_line(error))


def _copy_rate(source: torch.device, destination: torch.device, memory: str, num_bytes: int, limit_seconds: float) -> CopyRate:
    origin, copy = (
        torch.ones(num_bytes, dtype=torch.uint8, device=device, pin_memory=memory == "pinned" and device.type == "cpu")
        for device in (source, destination)
    )
    gpu = source if source.type == "cuda" else destination
    seconds = median_run_seconds(lambda: copy.copy_(origin, non_blocking=True), synchronizer(gpu), limit_seconds=limit_seconds)
    return CopyRate(
        source=_name(source),
        destination=_name(destination),
        host_memory=memory,
        num_bytes=num_bytes,
        bytes_per_second=num_bytes / seconds,
    )


def _name(device: torch.device) -> str:
    return "host" if device.type == "cpu" else str(device)


def matrix_rates(device: torch.device, *, limit_seconds: float) -> Iterator[MatrixRate | NotMeasured]:
    """Measure matrix products in each precision, or say why a precision cannot be measured.

    Matrices are random, since products of zeros draw less power and run faster than a training's. They are made larger until a product
    takes long enough, so that a GPU is filled and an old CPU is not kept busy for minutes. ``limit_seconds`` is the time limit for each
    precision, once the size of its matrices is found.
    """
    for precision in _FORMATS:
        reason = _why_unsupported(precision, device)
        if reason is None:
            try:
                yield _matrix_rate(precision, device, limit_seconds)
            except RuntimeError as error:  # not implemented, or out of memory
                reason = _first_line(error)
        if reason is not None:
            yield NotMeasured(what=f"{precision} products on {device}", reason=reason)


def _why_unsupported(precision: str, device: torch.device) -> str | None:
    """Why a device cannot multiply in a precision or would ignore that it was asked for; None if the device supports it."""
    if device.type == "cpu":
        return "for GPUs" if precision in ("tf32", "fp8") else None
    missing = missing_for(_NAMES[precision], *gpu_formats(device)[1:]) if precision in _NAMES else None
    return None if missing is None else f"needs {missing[0]}"


def _matrix_rate(precision: str, device: torch.device, limit_seconds: float) -> MatrixRate:
    wait = synchronizer(device)
    size, largest = _MATRIX_SIZES[device.type]
    with _float32_products(tf32=precision == "tf32"):
        product = make_product(precision, size, device)
        while size < largest and _shortest_seconds(product, wait) < _LONG_ENOUGH_SECONDS:
            size *= 2
            product = make_product(precision, size, device)
        seconds = median_run_seconds(product, wait, limit_seconds=limit_seconds)
    return MatrixRate(device=str(device), precision=precision, size=size, flops_per_second=2 * size**3 / seconds)


def _shortest_seconds(product: Callable[[], torch.Tensor], wait: Callable[[], None]) -> float:
    """The shortest of three timings of one product: on a busy machine a single timing could make a small product look long enough."""
    return min(median_run_seconds(product, wait, limit_seconds=0, at_once=1) for _ in range(3))


def make_product(precision: str, size: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that multiplies two random square matrices in a precision's number format."""
    number_format = _FORMATS[precision]
    first, second = (torch.randn(size, size, device=device).to(number_format) for _ in range(2))
    if precision != "fp8":
        return lambda: first @ second
    scale = torch.ones((), device=device)
    columns = second.t()  # float8 products want the second matrix column by column
    scaling = ScalingType.TensorWise
    return lambda: scaled_mm(first, columns, scale, scaling, scale, scaling, output_dtype=torch.bfloat16, use_fast_accum=True)


@contextlib.contextmanager
def _float32_products(*, tf32: bool) -> Iterator[None]:
    """Let this process multiply float32 matrices with or without TensorFloat-32 until the context ends."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def all_reduce_rates(
    device_type: str, *, num_ranks: int, limit_seconds: float, sizes: Sequence[int] | None = None
) -> Iterator[AllReduceRate | NotMeasured]:
    """Measure all-reduce of float32 tensors at each size: over gloo between CPU processes, over NCCL with one GPU for each rank.

    Args:
        device_type: ``cpu`` or ``cuda``.
        num_ranks: number of processes, at least two.
        limit_seconds: time limit for each size; starting the processes is not counted.
        sizes: bytes of each rank's tensor; None for the ``ALL_REDUCE_SIZES`` of the device type.
    """
    sizes = ALL_REDUCE_SIZES[device_type] if sizes is None else sizes
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
            sender.send(_first_line(error))


def _all_reduce_seconds(tensor: torch.Tensor, limit_seconds: float, ranks: Ranks) -> float:
    return median_run_seconds(lambda: distributed.all_reduce(tensor), synchronizer(tensor.device), limit_seconds=limit_seconds, ranks=ranks)


def median_run_seconds(
    run: Callable[[], object], wait: Callable[[], None], *, limit_seconds: float, at_once: int | None = None, ranks: Ranks = ALONE
) -> float:
    """Seconds of one run: the median over rounds, where a round has many runs if they are short.

    Args:
        run: the work; called once beforehand, so that its lazy set-up is not timed.
        wait: returns when the device has done all its work.
        limit_seconds: seconds after which no further round begins; one round is always made.
        at_once: number of runs in a round; None for as many as make it long enough.
        ranks: the ranks that run the work together; all of them make equally many runs, since a run of one rank waits for the others.
    """
    deadline = time.perf_counter() + limit_seconds
    run()
    num_runs = at_once or ranks.broadcast_from_first(max(1, min(_MAX_RUNS, round(_ROUND_SECONDS / max(1e-9, _seconds_of(run, wait, 1))))))
    rounds: list[float] = []
    while ranks.broadcast_from_first(not rounds or time.perf_counter() < deadline):
        rounds.append(_seconds_of(run, wait, num_runs) / num_runs)
    return statistics.median(rounds)


def _seconds_of(run: Callable[[], object], wait: Callable[[], None], num_runs: int) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(num_runs):
        run()
    wait()
    return time.perf_counter() - start


def _first_line(error: RuntimeError) -> str:
    """The first line of an error's message, or the error's type if it has no message."""
    return next((line for line in str(error).splitlines() if line), type(error).__name__)
