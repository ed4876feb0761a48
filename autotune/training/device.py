"""The device that a training runs on: its selection, state and capabilities, and what disturbs it."""

import errno
import gc
import importlib.util
import os
import platform
import random
import resource
import shutil
import sys
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from autotune.errors import ConfigError
from autotune.training.capabilities import Capabilities, num_available_cpus
from autotune.training.energy import energy_fault
from autotune.training.nvml import NvmlGpu, UntoldError, gpu_of, gpus_used_by


def local_capabilities() -> Capabilities:
    """Capabilities of this machine, as this process sees it."""
    num_gpus = torch.cuda.device_count()
    return Capabilities(
        num_cpus=num_available_cpus(),
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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure the device's peak memory anew; the CPU's cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def reset_device(device: torch.device) -> None:
    """Undo what an earlier training may have changed or kept in this process: default dtype, gradient mode, memory, memory peak."""
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    gc.collect()  # reference cycles, such as Lightning's, hold the tensors of a training that has ended
    if device.type == "cuda":
        torch.cuda.empty_cache()
    reset_peak_memory(device)


def free_memory_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU in bytes; None for the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that led to it, means that memory ran out: the device's, the host's, or a GPU's on-chip memory."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:  # Inductor, Lightning and others wrap what they catch
        seen.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return any(map(_says_out_of_memory, seen))


def _says_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or type(error).__name__ in _OUT_OF_MEMORY_TYPES:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return any(words in text for words in _OUT_OF_MEMORY) or (any(words in text for words in _IF_NEARLY_FULL) and _is_nearly_full())


_OUT_OF_MEMORY_TYPES = ("OutOfResources", "ResourceExhaustedError")
"""Names of exceptions of Triton and TensorFlow, which are no RuntimeErrors."""
_OUT_OF_MEMORY = (
    "out of memory", "can't allocate memory", "annot allocate memory", "not enough memory", "std::bad_alloc", "RESOURCE_EXHAUSTED",
    "_ALLOC_FAILED", "ALLOCATION_FAILED", "Failed to CUDA calloc", "nable to find an engine", "Unable to find a valid cuDNN algorithm",
    "out of resource",
)  # fmt: skip
"""Words of RuntimeErrors by which torch and other libraries tell that memory ran out: of host and device, then of CUDA's libraries, of
NCCL, of cuDNN (each algorithm lacked its workspace) and of Triton (a kernel needs more shared memory than the card has)."""
_IF_NEARLY_FULL = ("CUDNN_STATUS_INTERNAL_ERROR", "CUDNN_STATUS_NOT_INITIALIZED", "CUBLAS_STATUS_NOT_INITIALIZED")
"""Words of RuntimeErrors that have other causes as well as a full GPU."""
_NEARLY_FULL_FRACTION = 0.05
"""Share of a GPU's memory below which what is free may not hold a library's handles and workspaces."""


def _is_nearly_full() -> bool:
    """Whether hardly any memory of this process's GPU is free, the allocator's cache counted as used."""
    try:
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_initialized() else (1, 1)
    except RuntimeError:  # CUDA itself has failed
        return False
    return free < _NEARLY_FULL_FRACTION * total


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on all devices."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def device_fault(own: Collection[int], started: Collection[int]) -> str | None:
    """What disturbs the GPUs that this process, or one that it has started, trains on, in words; None if nothing is known to.

    This has not yet run on a GPU.

    Args:
        own: ids of the study's processes on this machine; two of its trainings never share a GPU.
        started: ids of the processes that this one has started: a training that is a command computes in one of them.
    """
    return next((fault for gpu in _nvml_gpus(started)[0] if (fault := gpu.disturbed_by(own)[0]) is not None), None)


def gpu_facts(started: Collection[int]) -> dict[str, Any]:
    """Facts for a fingerprint on the GPUs that this process, or one that it has started, trains on; empty without a GPU of NVIDIA's.

    ``gpus`` has ``NvmlGpu.limits`` of each, ``untold`` what of their disturbances cannot be told.
    """
    gpus, fault = _nvml_gpus(started)
    untold = [line for gpu in gpus for line in gpu.disturbed_by([os.getpid(), *started])[1]]
    return {"gpus": [gpu.limits() for gpu in gpus], "untold": [fault] if fault else untold}


def _nvml_gpus(started: Collection[int]) -> tuple[list[NvmlGpu], str | None]:
    """The GPUs that are trained on, without making a CUDA context in this process; and why NVML cannot tell of them, None if it can."""
    if not torch.cuda.is_initialized():
        return (gpus_used_by(started) if started else []), None
    try:
        return [gpu_of(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))], None
    except (UntoldError, AttributeError) as error:
        return [], f"what else uses the GPU cannot be told: {error}"
