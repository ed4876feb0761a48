"""Matrix product rates of a device, by precision: the upper limit for training a network with large layers."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import ScalingType, scaled_mm

from autotune.machine import MatrixRate, NotMeasured
from autotune.training.device import MIN_COMPUTE_CAPABILITY, synchronizer
from autotune.training.diagnosis.rounds import median_run_seconds

_SIZES = {"cpu": (512, 2048), "cuda": (1024, 8192)}
"""Rows of the smallest and the largest square matrices that are tried, by device type."""
_LONG_ENOUGH_SECONDS = 0.02
"""Matrices are made larger until one product takes this many seconds."""
_FORMATS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
"""Number format of the matrices that are multiplied, by option of ``precision=``."""
_NAMES = {"tf32": "TensorFloat-32", "bf16": "bfloat16", "fp8": "float8"}
"""Keys of ``MIN_COMPUTE_CAPABILITY``, by option of ``precision=``."""


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
                yield _rate(precision, device, limit_seconds)
            except RuntimeError as error:  # not implemented, or out of memory
                reason = str(error).splitlines()[0]
        if reason is not None:
            yield NotMeasured(what=f"{precision} products on {device}", reason=reason)


def _why_unsupported(precision: str, device: torch.device) -> str | None:
    """Why a device cannot multiply in a precision or would ignore that it was asked for; None if the device supports it."""
    if device.type == "cpu":
        return "for GPUs" if precision in ("tf32", "fp8") else None
    needed = MIN_COMPUTE_CAPABILITY.get(_NAMES.get(precision, ""))
    found = torch.cuda.get_device_capability(device)
    return f"needs compute capability {needed[0]}.{needed[1]}" if needed is not None and found < needed else None


def _rate(precision: str, device: torch.device, limit_seconds: float) -> MatrixRate:
    wait = synchronizer(device)
    size, largest = _SIZES[device.type]
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
