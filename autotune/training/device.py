"""The device that a training runs on: its selection, state and capabilities, and what disturbs it."""

import errno
import importlib.util
import os
import platform
import random
import resource
import shutil
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from autotune.errors import ConfigError
from autotune.training.capabilities import Capabilities
from autotune.training.energy import energy_fault

_SLOWED_BY = {
    "nvmlClocksThrottleReasonHwThermalSlowdown": "heat",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "heat",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "its power supply",
}
"""Causes of lower clocks that are faults, by the name of NVML's constant; a GPU's usual power limit is not one of them."""
_MIN_BUSY_PERCENT = 10
"""Share of a GPU's time from which another process counts as computing on the GPU."""
_LOOK_BACK_SECONDS = 2.0
"""Length of the recent past in which the use by other processes is looked up."""


def local_capabilities() -> Capabilities:
    """Capabilities of this machine, as this process sees it."""
    num_gpus = torch.cuda.device_count()
    return Capabilities(
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_gpus=num_gpus,
        gpu_name=torch.cuda.get_device_name(0) if num_gpus else None,
        compute_capability=torch.cuda.get_device_capability(0) if num_gpus else None,
        has_compiler=any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++", "c++")),
        has_torchao=importlib.util.find_spec("torchao") is not None,
        host=platform.node(),
        energy_faults={kind: fault for kind in ["cpu", *(["cuda"] if num_gpus else [])] if (fault := energy_fault(kind))},
    )


def pick_device(name: str) -> torch.device:
    """The torch device that the configuration's ``device`` means in this process.

    Raises:
        ConfigError: the device is cuda, and this process sees no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: found cuda, and there is no GPU here; accepted are auto, cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def device_kind(device: torch.device) -> str:
    """Kind of a device, by which prices are given: ``cpu`` or the GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has finished all work queued on it; it does nothing for the CPU."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak device memory in bytes since the last reset; on the CPU, the process's peak resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_device(device: torch.device) -> None:
    """Undo what an earlier training may have changed in this process: default dtype, gradient mode, allocator cache, memory peak."""
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def free_memory_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU in bytes; None for the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that device or host memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words of RuntimeErrors by which torch and other libraries in C++ tell that memory ran out."""


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on all devices."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def device_fault() -> str | None:
    """What disturbs this process's GPU now, in one line; None if nothing does, or if NVML (the extra ``energy``) cannot tell.

    This has not yet run on a GPU.
    """
    try:
        import pynvml  # noqa: PLC0415  # optional extra
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return _slowed(pynvml, handle) or _shared(pynvml, handle)
    except (pynvml.NVMLError, AttributeError):  # an older driver, or a GPU without this information
        return None


def _slowed(pynvml: Any, handle: Any) -> str | None:
    reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    causes = sorted({cause for name, cause in _SLOWED_BY.items() if reasons & getattr(pynvml, name, 0)})
    return f"its GPU was slowed down by {' and '.join(causes)}" if causes else None


def _shared(pynvml: Any, handle: Any) -> str | None:
    """How many other processes compute on the GPU, as a message; None for none, or if NVML does not list this process (in a container)."""
    running = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    if os.getpid() not in running or len(running) == 1:
        return None
    since = int((time.time() - _LOOK_BACK_SECONDS) * 1e6)
    samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since)
    busy = {sample.pid for sample in samples if sample.smUtil >= _MIN_BUSY_PERCENT}
    num_others = len((busy & running) - {os.getpid()})
    return f"{num_others} other {'process' if num_others == 1 else 'processes'} computed on its GPU" if num_others else None
