"""What a machine is, which a study keeps as ``machine.yaml``, and how fast its devices are."""

import os
import platform
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.benchmark import Timer
from torch.utils.collect_env import get_pretty_env_info

from autotune.training.capabilities import cpu_name, driver_version, num_available_cpus, versions
from autotune.training.device import no_gpu_reason


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


def environment() -> str:
    """What torch's own ``collect_env`` tells of the machine: operating system, compilers, CUDA,
    driver, processor.
    """
    return str(get_pretty_env_info())  # type: ignore[no-untyped-call]


def measured_rates() -> Iterator[str]:
    """Lines that say how fast each device multiplies matrices, and copies from the host's memory.

    Matrices are random, since products of zeros draw less power and run faster than a training's.
    """
    for device in ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))):
        size = 512 if device == "cpu" else 8192
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            matrix = torch.randn(size, size, device=device).to(dtype)
            seconds = _seconds("matrix @ matrix", matrix=matrix)
            yield f"{dtype} product on {device}: {2e-9 * size**3 / seconds:,.4g} GFLOP/s"
        source = torch.ones(2**28, dtype=torch.uint8, pin_memory=device != "cpu")
        seconds = _seconds(
            "target.copy_(source)", source=source, target=source.to(device, copy=True)
        )
        yield f"copy from the host to {device}: {1e-9 * source.numel() / seconds:,.4g} GB/s"


def _seconds(statement: str, **tensors: torch.Tensor) -> float:
    """Median seconds of a statement."""
    timer = Timer(statement, globals=tensors, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=0.3).median)
