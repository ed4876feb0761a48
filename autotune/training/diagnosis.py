"""What a machine is, which a study keeps as ``machine.yaml``, and how fast its devices are."""

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import ScalingType, scaled_mm
from torch.utils.benchmark import Timer
from torch.utils.collect_env import get_env_info

from autotune.training.capabilities import cpu_name, driver_version, num_available_cpus, versions
from autotune.training.device import no_gpu_reason

_FORMATS = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
"""Number formats of a matrix product, by options of ``precision=``."""


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
    return dict(get_env_info()._asdict())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A measured speed: operations a second of a matrix product, else bytes a second."""

    kind: str
    what: str
    per_second: float | None = None
    """None if it could not be measured."""
    seconds: float | None = None
    """Seconds of one product or copy."""
    reason: str = ""
    """Why it could not be measured."""


def measured_rates(device_name: str, seconds: float) -> Iterator[Rate]:
    """Measure products and copies on a device, each for ``seconds``."""
    device = torch.device(device_name)
    on_gpu = device.type == "cuda"
    for name in _FORMATS if on_gpu else ("fp32", "bf16", "fp16"):
        yield product_rate(device, name, 8192 if on_gpu else 512, seconds)
    host = torch.device("cpu")
    for source, target in ((host, device), (device, host)) if on_gpu else ((host, host),):
        for pinned in (False, True) if on_gpu else (False,):
            yield copy_rate(source, target, 2**28, seconds, pinned=pinned)


def product_rate(device: torch.device, name: str, size: int, seconds: float) -> Rate:
    """Measure products of two square matrices, 2 n^3 operations, in a format of ``_FORMATS``.

    Matrices are random, since products of zeros draw less power and run faster than a training's.
    """

    def make() -> Callable[[], torch.Tensor]:
        first, second = (
            torch.randn(size, size, device=device).to(_FORMATS[name]) for _ in range(2)
        )
        if name != "fp8":
            return lambda: first @ second
        scale, scaling = torch.ones((), device=device), ScalingType.TensorWise
        columns = second.t()  # float8 products want the second matrix column by column
        return lambda: scaled_mm(
            first, columns, scale, scaling, scale, scaling, output_dtype=torch.bfloat16
        )

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        what = f"{name} on {device}, {size} rows"
        return _rate("matrix product", what, 2 * size**3, make, seconds)
    finally:
        torch.set_float32_matmul_precision(before)


def copy_rate(
    source: torch.device, target: torch.device, num_bytes: int, seconds: float, *, pinned: bool
) -> Rate:
    """Measure copies from one device to another, with pageable or with pinned host memory."""

    def make() -> Callable[[], torch.Tensor]:
        original, copy = (
            torch.ones(
                num_bytes,
                dtype=torch.uint8,
                device=device,
                pin_memory=pinned and device.type == "cpu",
            )
            for device in (source, target)
        )
        return lambda: copy.copy_(original, non_blocking=True)

    what = f"{source} to {target}{', pinned' if pinned else ''}"
    return _rate("copy", what, num_bytes, make, seconds)


def _rate(
    kind: str, what: str, amount: int, make: Callable[[], Callable[[], object]], seconds: float
) -> Rate:
    """The rate of what ``make`` returns, of which one run handles ``amount`` operations or
    bytes.
    """
    try:
        timer = Timer("run()", globals={"run": make()}, num_threads=torch.get_num_threads())
        took = float(timer.blocked_autorange(min_run_time=seconds).median)
    except RuntimeError as error:  # not implemented, too old a GPU, or out of memory
        return Rate(
            kind=kind, what=what, reason=str(error).partition("\n")[0] or type(error).__name__
        )
    return Rate(kind=kind, what=what, per_second=amount / took, seconds=took)
