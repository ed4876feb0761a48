"""The device that a training runs on: picking it, waiting for it, its memory, and what it can run."""

import os
import platform
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the machines at hand can run."""

    num_cpus: int
    num_gpus: int
    gpu_name: str | None
    compute_capability: tuple[int, int] | None
    """CUDA compute capability of the GPUs, (8, 0) and up for bfloat16; None without a GPU."""

    @property
    def device_name(self) -> str:
        """The GPU's name, or the processor's where there is none."""
        return self.gpu_name or cpu_name()


def local_capabilities() -> Capabilities:
    """What this machine can run, as this process sees it."""
    num_gpus = torch.cuda.device_count()
    return Capabilities(
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_gpus=num_gpus,
        gpu_name=torch.cuda.get_device_name(0) if num_gpus else None,
        compute_capability=torch.cuda.get_device_capability(0) if num_gpus else None,
    )


def unsupported(config: TrialConfig, capabilities: Capabilities) -> str | None:
    """Why these machines cannot run a training, or None where they can."""
    wants_gpu = config.device == "cuda"
    if wants_gpu and capabilities.num_gpus == 0:
        return "device=cuda needs a GPU, and there is none"
    uses_gpu = uses_cuda(config, capabilities)
    num_workers = config.parallelism["num_workers"]
    if uses_gpu and num_workers > capabilities.num_gpus:
        return f"parallelism.num_workers={num_workers} needs as many GPUs, and there are {capabilities.num_gpus}"
    capability = capabilities.compute_capability
    if uses_gpu and config.precision["autocast_dtype"] == "bfloat16" and capability is not None and capability < (8, 0):
        return f"bfloat16 needs CUDA compute capability 8.0, and {capabilities.gpu_name} has {capability[0]}.{capability[1]}"
    return None


def uses_cuda(config: TrialConfig, capabilities: Capabilities) -> bool:
    """Whether a training runs on GPUs here: ``auto`` takes one where there is one."""
    return config.device == "cuda" or (config.device == "auto" and capabilities.num_gpus > 0)


def pick_device(name: str) -> torch.device:
    """The torch device that ``device`` names in this process.

    Raises:
        ConfigError: cuda, where this process sees no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: found cuda, and there is no GPU here; accepted are auto, cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done all it was given."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak device memory since the last reset; on the CPU the process's peak resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_device(device: torch.device) -> None:
    """Undo what an earlier training may have left in this process: default types, allocator, memory peak."""
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def free_memory_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU; None for the CPU, where the data set already is."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that device or host memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


def cpu_name() -> str:
    """The processor's model name as Linux tells it, or what the platform says."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
