"""What the NVIDIA driver tells, by NVML, of the GPUs that a training uses: their energy, what
disturbs them, and their limits.

Nothing here needs torch or makes a CUDA context.
"""

import platform
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import pynvml

_BRAKES = ((0x20 | 0x40, "heat"), (0x80, "its power supply"))
"""Bits of causes of lower clocks, and the causes in words; a GPU's usual power limit is none of
them. Source: nvml.h, nvmlClocksEventReason*."""
_LITTLE_SHARE = 0.05
"""Share of a GPU's memory up to which what other processes hold does not matter."""


class UntoldError(Exception):
    """NVML does not tell something; the message says what, and why."""


class GpuLook(NamedTuple):
    """What is seen of a GPU at one moment, besides the study's work."""

    is_shared: bool
    """Whether processes outside the study compute on it."""
    brakes: list[str]
    """That heat or its power supply slows it down, in words."""
    untold: list[str]
    """What of this NVML does not tell, and why."""


@dataclass(frozen=True)
class NvmlGpu:
    """A GPU as NVML knows it."""

    handle: Any

    def joules(self) -> float:
        """Energy of the GPU since the driver was loaded.

        Raises:
            UntoldError: the driver does not report it.
        """
        try:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)) * 1e-3
        except pynvml.NVMLError as error:
            raise UntoldError(f"NVML: {error}") from error

    def look(self, own: Collection[int]) -> GpuLook:
        """Look at what disturbs the GPU now.

        Args:
            own: ids of the processes on this machine that may compute on the GPU.
        """
        brakes: list[str] = []
        is_shared, untold = False, []
        try:
            brakes = self._brakes()
        except pynvml.NVMLError as error:
            what = "whether a GPU is slowed down by heat or its power supply"
            untold.append(f"{what} cannot be told: {error}")
        try:
            is_shared = self._is_shared(own)
        except (pynvml.NVMLError, UntoldError) as error:
            untold.append(f"whether other programs compute on a GPU cannot be told: {error}")
        return GpuLook(is_shared, brakes, untold)

    def limits(self) -> dict[str, Any]:
        """UUID, power limits and highest clocks, by which cards of one kind differ in speed.

        None if NVML does not tell.
        """

        def told(name: str, *arguments: Any, scale: float = 1.0) -> Any:
            try:
                value = getattr(pynvml, f"nvmlDeviceGet{name}")(self.handle, *arguments)
            except pynvml.NVMLError:
                return None
            return value * scale if isinstance(value, int) else value

        return {
            "uuid": told("UUID"),
            "power_limit_watts": told("PowerManagementLimit", scale=1e-3),
            "default_power_limit_watts": told("PowerManagementDefaultLimit", scale=1e-3),
            "max_clock_mhz": told("MaxClockInfo", pynvml.NVML_CLOCK_SM),
            "application_clock_mhz": told("ApplicationsClock", pynvml.NVML_CLOCK_SM),
        }

    def _brakes(self) -> list[str]:
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)
        uuid = pynvml.nvmlDeviceGetUUID(self.handle)
        return [
            f"{uuid} of {platform.node()} is slowed down by {cause}"
            for bits, cause in _BRAKES
            if reasons & bits
        ]

    def _is_shared(self, own: Collection[int]) -> bool:
        """Whether other processes took a tenth of the GPU's time or more in the last two
        seconds.
        """
        running = self.processes()
        others = running - set(own)
        if len(others) == len(running):
            raise UntoldError(
                "NVML lists no process of the study there, as in a container with process ids of"
                " its own"
            )
        if not others:
            return False
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(
                self.handle, int((time.time() - 2.0) * 1e6)
            )
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NOT_FOUND:
                raise
            return False  # nobody computed meanwhile
        return any(sample.pid in others and sample.smUtil >= 10 for sample in samples)

    def memory_held_by_others(self, own: Collection[int], *, is_listed: bool) -> int:
        """Bytes of the GPU's memory that other processes hold; 0 if they hold little of it.

        Args:
            own: ids of the processes of the training.
            is_listed: whether NVML lists one of those, unless it does not know them by these ids.

        Raises:
            UntoldError: NVML does not tell what each process holds.
        """
        try:
            total = pynvml.nvmlDeviceGetMemoryInfo(self.handle).total
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
        except pynvml.NVMLError as error:
            raise UntoldError(f"NVML: {error}") from error
        others = [process.usedGpuMemory for process in running if process.pid not in own]
        if None in others or (is_listed and len(others) == len(running)):
            raise UntoldError("NVML does not tell the memory of each process")
        held = sum(others)
        return int(held) if held > _LITTLE_SHARE * total else 0

    def processes(self) -> set[int]:
        """Ids of the processes that have a CUDA context on the GPU."""
        return {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self.handle)}


def gpu_of(name: str) -> NvmlGpu:
    """The GPU with an index as NVML gives it, or with a UUID, which CUDA gives without NVML's
    prefix.

    Raises:
        UntoldError: NVML knows no such GPU.
    """
    try:
        pynvml.nvmlInit()
        if name.isdigit():
            return NvmlGpu(pynvml.nvmlDeviceGetHandleByIndex(int(name)))
        uuid = name.removeprefix("GPU-")
        return NvmlGpu(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except pynvml.NVMLError as error:
        raise UntoldError(f"NVML of GPU {name}: {error}") from error


def gpus_used_by(processes: Collection[int]) -> list[NvmlGpu]:
    """The GPUs of this machine on which one of the processes with these ids computes.

    Empty where there is no NVIDIA GPU.
    """
    try:
        pynvml.nvmlInit()
        gpus = [
            NvmlGpu(pynvml.nvmlDeviceGetHandleByIndex(index))
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return [gpu for gpu in gpus if gpu.processes() & set(processes)]
    except pynvml.NVMLError:
        return []
