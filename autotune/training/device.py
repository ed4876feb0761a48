"""The device that a training runs on: its selection, state, capabilities and software, and what disturbs it."""

import errno
import importlib.util
import os
import platform
import random
import resource
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.measurement import Device
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


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of a machine: its CPUs, GPUs and installed tools, which decide what it can run."""

    num_cpus: int
    num_gpus: int
    gpu_name: str | None
    compute_capability: tuple[int, int] | None
    """CUDA compute capability of the GPUs, such as (8, 0), which bfloat16 needs; None without a GPU."""
    has_compiler: bool
    """Whether there is a C++ compiler, which torch.compile needs."""
    has_torchao: bool
    """Whether torchao is installed, which float8 needs."""
    host: str = "this machine"
    """Name of the machine, for messages."""
    energy_faults: Mapping[str, str] = field(default_factory=dict)
    """Why energy cannot be read, by device type (``cpu``, ``cuda``); no entry for a type whose energy can be read."""

    @property
    def device_name(self) -> str:
        """Name of the GPU, or of the processor if there is no GPU."""
        return self.gpu_name or cpu_name()

    def device_of(self, config: TrialConfig) -> Device:
        """The device that each worker of a training has on this machine."""
        is_gpu = uses_cuda(config, self)
        return Device(
            kind=self.gpu_name if is_gpu else "cpu", where=self.host, energy_fault=self.energy_faults.get("cuda" if is_gpu else "cpu")
        )


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


MIN_COMPUTE_CAPABILITY = {"float8": (8, 9), "bfloat16": (8, 0), "TensorFloat-32": (8, 0)}
"""Least CUDA compute capability of a GPU whose tensor cores support a number format, by the format's name."""


def unsupported(config: TrialConfig, capabilities: Capabilities) -> str | None:
    """Why this machine cannot run a training; None if it can."""
    wants_gpu = config.device == "cuda"
    if wants_gpu and capabilities.num_gpus == 0:
        return "device=cuda needs a GPU, and there is none"
    uses_gpu = uses_cuda(config, capabilities)
    if (reason := _unsupported_parallelism(config.parallelism, capabilities, uses_gpu=uses_gpu)) is not None:
        return reason
    if config.runtime.compile is not None and not capabilities.has_compiler:
        return f"runtime.compile={config.runtime.compile} needs a C++ compiler, and there is none"
    if config.precision.float8 and not capabilities.has_torchao:
        return "precision.float8 needs torchao, which is not installed (pip install 'autotune[fp8]')"
    return _unsupported_by_gpu(config, capabilities) if uses_gpu else _without_effect_on_cpu(config)


def _unsupported_parallelism(parallelism: Mapping[str, Any], capabilities: Capabilities, *, uses_gpu: bool) -> str | None:
    num_workers = parallelism["num_workers"]
    for kind, number in (("CPUs", capabilities.num_cpus), *([("GPUs", capabilities.num_gpus)] if uses_gpu else [])):
        if num_workers > number:
            return f"parallelism.num_workers={num_workers} needs as many {kind}, and there are {number}"
    if not uses_gpu and parallelism.get("backend") == "nccl":
        return "parallelism.backend=nccl needs GPUs"
    if not uses_gpu and parallelism.get("compression") == "bf16":
        return "parallelism.compression=bf16 needs NCCL, and so GPUs"
    return None


def _unsupported_by_gpu(config: TrialConfig, capabilities: Capabilities) -> str | None:
    """Which number format of the configuration the GPUs are too old for, as a message; None if they support all."""
    capability, precision = capabilities.compute_capability, config.precision
    wanted = {
        "float8": precision.float8,
        "bfloat16": "bfloat16" in (precision.autocast_dtype, precision.weights_dtype),
        "TensorFloat-32": _is_plain_tf32(config),
    }
    for name, least in MIN_COMPUTE_CAPABILITY.items():
        if wanted[name] and capability is not None and capability < least:
            needed, available = (f"{major}.{minor}" for major, minor in (least, capability))
            return f"{name} needs CUDA compute capability {needed}, and {capabilities.gpu_name} has {available}"
    return None


def _without_effect_on_cpu(config: TrialConfig) -> str | None:
    """A setting that has no effect on the CPU, as a message; None if the configuration has no such setting."""
    runtime = config.runtime
    for setting, is_set in (
        ("precision.float8", config.precision.float8),
        ("precision.float32_precision=tf32", _is_plain_tf32(config)),
        ("runtime.cuda_graph", runtime.cuda_graph),
        ("runtime.compile=reduce-overhead", runtime.compile == "reduce-overhead"),
        ("runtime.cudnn_benchmark", runtime.cudnn_benchmark),
        ("runtime.expandable_segments", runtime.expandable_segments),
    ):
        if is_set:
            return f"{setting} is for GPUs, and this training runs on the CPU"
    return None


def _is_plain_tf32(config: TrialConfig) -> bool:
    """Whether TensorFloat-32 is the only difference between the precision and plain float32."""
    precision = config.precision
    is_float32 = precision.autocast_dtype is None and precision.weights_dtype == "float32" and not precision.float8
    return is_float32 and precision.float32_precision == "tf32"


def uses_cuda(config: TrialConfig, capabilities: Capabilities) -> bool:
    """Whether a training runs on GPUs on this machine; device ``auto`` takes a GPU if there is one."""
    return config.device == "cuda" or (config.device == "auto" and capabilities.num_gpus > 0)


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


def cpu_name() -> str:
    """The processor's model name from ``/proc/cpuinfo``, or else the platform's name for the processor."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on all devices."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def versions() -> dict[str, str | None]:
    """Versions of Python, CUDA and packages that measurements depend on; None for a package that is not installed."""
    packages = ("autotune", "torch", "numpy", "ray", "optuna", "hydra-core", "mlflow")
    return {"python": platform.python_version(), "cuda": torch.version.cuda, **{name: _installed(name) for name in packages}}


@cache  # called for every trial
def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Version of the NVIDIA driver, as its kernel module reports it; None if there is no such driver."""
    try:
        with Path("/proc/driver/nvidia/version").open(encoding="utf-8") as lines:
            return next(word for word in lines.readline().split() if word[0].isdigit())
    except (OSError, StopIteration):
        return None


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
