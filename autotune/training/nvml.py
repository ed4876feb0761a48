"""What the NVIDIA driver tells, by NVML, of the GPUs that a training uses: their energy, what
disturbs them, and their limits.

Nothing here needs torch or makes a CUDA context.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pynvml

_HEAT, _POWER = 0x20 | 0x40, 0x80
"""Bits of causes of lower clocks that are faults; a GPU's usual power limit is none of them.
Source: nvml.h, nvmlClocksEventReason*."""


class UntoldError(Exception):
    """NVML does not tell something; the message says what, and why."""


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

    def disturbed_by(self, own: Collection[int]) -> tuple[str | None, tuple[str, ...]]:
        """What disturbs the GPU now, in words, None if nothing is known to.

        And what of it NVML does not tell.

        Args:
            own: ids of the processes on this machine that may compute on the GPU.
        """
        found, untold = [], []
        checks: tuple[tuple[str, Callable[[], str | None]], ...] = (
            ("whether a GPU is slowed down by heat or its power supply", self._slowed_by),
            ("whether other programs compute on a GPU", lambda: self._shared_with(own)),
        )
        for what, check in checks:
            try:
                found.append(check())
            except (pynvml.NVMLError, UntoldError) as error:
                untold.append(f"{what} cannot be told: {error}")
        return next((text for text in found if text is not None), None), tuple(untold)

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

    def _slowed_by(self) -> str | None:
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)
        causes = [
            cause
            for bits, cause in ((_HEAT, "heat"), (_POWER, "its power supply"))
            if reasons & bits
        ]
        return f"its GPU was slowed down by {' and '.join(causes)}" if causes else None

    def _shared_with(self, own: Collection[int]) -> str | None:
        """Other processes that took a tenth of the GPU's time or more in the last two seconds,
        in words.
        """
        running = self.processes()
        others = running - set(own)
        if len(others) == len(running):
            raise UntoldError(
                "NVML lists no process of the study there, as in a container with process ids of"
                " its own"
            )
        if others:
            try:
                samples = pynvml.nvmlDeviceGetProcessUtilization(
                    self.handle, int((time.time() - 2.0) * 1e6)
                )
            except pynvml.NVMLError as error:
                if error.value != pynvml.NVML_ERROR_NOT_FOUND:
                    raise
                samples = []  # nobody computed meanwhile
            others &= {sample.pid for sample in samples if sample.smUtil >= 10}
        return (
            f"{len(others)} other {'process' if len(others) == 1 else 'processes'} computed on"
            " its GPU"
            if others
            else None
        )

    def processes(self) -> set[int]:
        """Ids of the processes that have a CUDA context on the GPU."""
        return {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self.handle)}


def gpu_of(uuid: str) -> NvmlGpu:
    """The GPU with a UUID as CUDA gives it, which is without NVML's prefix.

    Raises:
        UntoldError: NVML knows no such GPU.
    """
    try:
        pynvml.nvmlInit()
        return NvmlGpu(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except pynvml.NVMLError as error:
        raise UntoldError(f"NVML of GPU {uuid}: {error}") from error


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
