"""The device that a training runs on: its selection, state and capabilities, and what disturbs it.

That is the CPU, or what torch calls CUDA: NVIDIA's GPUs, and AMD's with ROCm.
"""

import contextlib
import errno
import gc
import importlib.util
import os
import platform
import random
import resource
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from autotune.errors import ConfigError
from autotune.failure import causes
from autotune.training.capabilities import (
    Capabilities,
    num_available_cpus,
    together,
    torch_build,
    visible_devices,
    visible_devices_variable,
)
from autotune.training.energy import energy_fault
from autotune.training.nvml import GpuLook, NvmlGpu, UntoldError, gpu_of, gpus_used_by


def local_capabilities() -> Capabilities:
    """Capabilities of this machine, as this process sees it."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [gpu_kind(index) for index in range(num_gpus)]
    machine = Capabilities(
        num_cpus=num_available_cpus(),
        num_gpus=len(gpus),
        gpu_name=None,
        compute_capability=None,
        has_compiler=any(
            shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++", "c++")
        ),
        has_torchao=importlib.util.find_spec("torchao") is not None,
        host=platform.node(),
        energy_faults={
            kind: fault
            for kind in ("cpu", *(["cuda"] if gpus else []))
            if (fault := energy_fault(kind))
        },
        no_gpu_reason=None if gpus else no_gpu_reason(),
    )
    kinds = [
        replace(machine, gpu_name=name, gpu_kinds=(name,), compute_capability=capability)
        for name, capability in gpus
    ]
    return together(kinds or [machine])


def gpu_kind(device: torch.device | int) -> tuple[str, tuple[int, int] | None]:
    """Name of a GPU, and its CUDA compute capability.

    None for a GPU of AMD's, whose numbers mean something else.
    """
    properties = torch.cuda.get_device_properties(device)
    return properties.name, None if "hip" in torch_build() else (properties.major, properties.minor)


def no_gpu_reason() -> str | None:
    """Why torch sees none of the NVIDIA GPUs that this machine seems to have, in words.

    None if it seems to have none.
    """
    if not any(map(os.path.exists, _DRIVER_FILES)):
        return None
    variable = visible_devices_variable()
    if os.environ.get(variable, "0") in ("", "-1", "NoDevFiles"):
        return f"{variable}={os.environ[variable]} hides the GPUs"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # missing in torch's stubs
    # is_available() tells this once in a process, and as a warning only
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0].partition(". ")[0]
    return f"torch {torch.__version__} does not say why it sees no GPU"


_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
"""Files that are there where the driver of NVIDIA GPUs is."""


def pick_device(name: str) -> torch.device:
    """The torch device that the configuration's ``device`` means in this process.

    Raises:
        ConfigError: the device is none of the CPU's, and this process sees no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        reason = no_gpu_reason()
        why = "there is no GPU here" if reason is None else f"torch sees no GPU: {reason}"
        raise ConfigError(f"device: found cuda, and {why}; use auto or cpu")
    return torch.device(name)


def device_kind(device: torch.device) -> str:
    """Kind of a device, by which prices are given: ``cpu`` or the GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has finished all work queued on it.

    It does nothing for the CPU.
    """
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak device memory in bytes since the last reset.

    On the CPU, the process's peak resident size.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure the device's peak memory anew; the CPU's cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def reset_device(device: torch.device) -> None:
    """Undo what an earlier training may have changed or kept in this process: default dtype,
    gradient mode, memory, memory peak.
    """
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    free_unused_memory(device)
    reset_peak_memory(device)


def free_unused_memory(device: torch.device) -> None:
    """Free what nothing refers to, on the device and in the host's memory."""
    # reference cycles, such as Lightning's, hold the tensors of a training that has ended
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that led to it, means that memory ran out: the device's, the
    host's, or a GPU's on-chip memory.
    """
    return any(map(_says_out_of_memory, causes(error)))


def _says_out_of_memory(error: BaseException) -> bool:
    if (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or type(error).__name__ in _OUT_OF_MEMORY_TYPES
    ):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    # these have other causes, too
    if "CUDNN_STATUS_INTERNAL_ERROR" in text or "_STATUS_NOT_INITIALIZED" in text:
        free, total = 1, 1
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            free, total = torch.cuda.mem_get_info()
        return free < 0.05 * total or "ALLOCATION_FAILED" in text
    return any(words in text for words in _OUT_OF_MEMORY)


_OUT_OF_MEMORY_TYPES = ("OutOfResources", "ResourceExhaustedError")
"""Names of exceptions of Triton and TensorFlow, which are no RuntimeErrors."""
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "annot allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "RESOURCE_EXHAUSTED",
    "_ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "Failed to CUDA calloc",
    "nable to find an engine",
    "Unable to find a valid cuDNN algorithm",
    "out of resource",
)
"""Words of RuntimeErrors by which torch and other libraries tell that memory ran out: of host
and device, then of CUDA's libraries, of NCCL, of cuDNN (each algorithm lacked its workspace) and
of Triton (a kernel needs more shared memory than the card has)."""


def share_memory(num_processes: int) -> None:
    """Let this process allocate its share of a GPU's memory only, so that whether a training fits
    does not depend on those beside it.
    """
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1 / num_processes)


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on all devices."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def look_at_gpus(own: Collection[int] = (), started: Collection[int] = ()) -> list[GpuLook]:
    """Look at what disturbs the GPUs that this process, or one that it has started, trains on.

    Args:
        own: ids of the study's processes on this machine besides this one and ``started``; two of
            its trainings never share a GPU.
        started: ids of the processes that this one has started: a training that is a command
            computes in one of them.
    """
    return [gpu.look([os.getpid(), *own, *started]) for gpu in _nvml_gpus(started)[0]]


def memory_held_by_others(num_gpus: int, started: Collection[int]) -> int:
    """Bytes of memory that other programs hold on a GPU of this training, which had too little; 0
    if that is little, is not known, or there is no such GPU.

    Args:
        num_gpus: number of the GPUs that this process, or a command that it has started, sees.
        started: ids of the processes that this one has started.
    """
    own = [os.getpid(), *started]
    with contextlib.suppress(UntoldError):
        here = _nvml_gpus(())[0]
        # else the command that trained has ended
        gpus = here or [gpu_of(id_) for id_ in visible_devices(num_gpus)]
        held = [gpu.memory_held_by_others(own, is_listed=bool(here)) for gpu in gpus]
        return max(held, default=0)
    return 0


def gpu_facts(started: Collection[int]) -> dict[str, Any]:
    """Facts for a fingerprint on the GPUs that this process, or one that it has started, trains on;
    empty without a GPU of NVIDIA's.

    ``gpus`` has ``NvmlGpu.limits`` of each, ``warnings`` what of their disturbances cannot be told.
    """
    gpus, fault = _nvml_gpus(started)
    untold = [line for gpu in gpus for line in gpu.look([os.getpid(), *started]).untold]
    return {"gpus": [gpu.limits() for gpu in gpus], "warnings": [fault] if fault else untold}


def _nvml_gpus(started: Collection[int]) -> tuple[list[NvmlGpu], str | None]:
    """The GPUs that are trained on, without making a CUDA context in this process.

    And why NVML cannot tell of them, None if it can.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # missing in torch's stubs
        return (gpus_used_by(started) if started else []), None
    try:
        index = torch.cuda.current_device()  # of this thread
        if torch.cuda.device_count() > 1:  # of a rank that sees those of all
            index = int(os.environ.get("LOCAL_RANK", index))
        return [gpu_of(str(torch.cuda.get_device_properties(index).uuid))], None
    except (UntoldError, AttributeError, RuntimeError) as error:  # CUDA's own, of a GPU that failed
        return [], f"what else uses the GPU cannot be told: {error}"
