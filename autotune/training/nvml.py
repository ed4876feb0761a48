"""What the NVIDIA driver tells, by NVML, of the GPUs that a training uses: what disturbs them, and what limits their clocks.

A GPU may be a slice of a card (MIG). NVML tells a slice's processes; clocks, power and their limits are the whole card's, and the energy of
a slice and the share of its time that a process takes are not told at all. Nothing here needs torch or makes a CUDA context.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pynvml

_HEAT, _POWER = 0x20 | 0x40, 0x80
"""Bits of causes of lower clocks that are faults; a GPU's usual power limit is none of them. Source: nvml.h, nvmlClocksEventReason*."""
_MIN_BUSY_PERCENT = 10
"""Share of a GPU's time from which another process counts as computing on the GPU."""
_LOOK_BACK_SECONDS = 2.0
"""Length of the recent past in which the use by other processes is looked up."""


class UntoldError(Exception):
    """NVML does not tell something; the message says what, and why."""


@dataclass(frozen=True)
class NvmlGpu:
    """A GPU, or a slice of one, as NVML knows it."""

    handle: Any
    card: Any
    """Handle of the whole card; ``handle`` itself if the GPU is no slice."""

    @property
    def is_card(self) -> bool:
        """Whether the GPU is a whole card, not a slice of one."""
        return self.handle is self.card

    def disturbed_by(self, own: Collection[int]) -> tuple[str | None, tuple[str, ...]]:
        """What disturbs the GPU now, in words, None if nothing is known to; and what of it NVML does not tell.

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
            except (pynvml.NVMLError, AttributeError, UntoldError) as error:
                untold.append(f"{what} cannot be told: {error}")
        return next((text for text in found if text is not None), None), tuple(untold)

    def limits(self) -> dict[str, Any]:
        """UUID, and the card's power limits and highest clocks, by which cards of one kind differ in speed; None if NVML does not tell."""

        def told(name: str, *arguments: Any, scale: float = 1.0) -> Any:
            try:
                value = getattr(pynvml, f"nvmlDeviceGet{name}")(*arguments)
            except (pynvml.NVMLError, AttributeError):
                return None
            return value * scale if isinstance(value, int) else value

        clock = pynvml.NVML_CLOCK_SM
        return {
            "uuid": told("UUID", self.handle),
            "power_limit_watts": told("PowerManagementLimit", self.card, scale=1e-3),
            "default_power_limit_watts": told("PowerManagementDefaultLimit", self.card, scale=1e-3),
            "max_clock_mhz": told("MaxClockInfo", self.card, clock),
            "application_clock_mhz": told("ApplicationsClock", self.card, clock),
        }

    def _slowed_by(self) -> str | None:
        try:
            reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(self.card)
        except (pynvml.NVMLError, AttributeError):  # an older driver or package
            reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.card)
        causes = [cause for bits, cause in ((_HEAT, "heat"), (_POWER, "its power supply")) if reasons & bits]
        return f"its GPU was slowed down by {' and '.join(causes)}" if causes else None

    def _shared_with(self, own: Collection[int]) -> str | None:
        running = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self.handle)}
        others = running - set(own)
        if len(others) == len(running):
            raise UntoldError("NVML lists no process of the study there, as in a container with process ids of its own")
        if others and self.is_card:  # of a slice's processes NVML does not tell which are busy
            others &= self._busy()
        return f"{len(others)} other {'process' if len(others) == 1 else 'processes'} computed on its GPU" if others else None

    def _busy(self) -> set[int]:
        since = int((time.time() - _LOOK_BACK_SECONDS) * 1e6)
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self.handle, since)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NOT_FOUND:  # nobody computed meanwhile
                return set()
            raise
        return {sample.pid for sample in samples if sample.smUtil >= _MIN_BUSY_PERCENT}


def gpu_of(uuid: str) -> NvmlGpu:
    """The GPU or slice with a UUID as CUDA gives it, without the prefix by which NVML tells the two apart.

    Raises:
        UntoldError: NVML knows no such GPU.
    """
    _begin()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
            return NvmlGpu(handle, pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle))
        except pynvml.NVMLError:
            raise UntoldError(f"NVML of GPU {uuid}: {error}") from error
    return NvmlGpu(handle, handle)


def _begin() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise UntoldError(f"NVML: {error}") from error


def gpus_used_by(processes: Collection[int]) -> list[NvmlGpu]:
    """The GPUs and slices of this machine on which one of the processes with these ids computes; empty where there is no NVIDIA GPU."""
    try:
        _begin()
        gpus = [gpu for index in range(pynvml.nvmlDeviceGetCount()) for gpu in _parts(pynvml.nvmlDeviceGetHandleByIndex(index))]
    except (UntoldError, pynvml.NVMLError):
        return []
    return [gpu for gpu in gpus if _runs(gpu, processes)]


def _parts(card: Any) -> Iterator[NvmlGpu]:
    """The slices of a card, or the card itself if it is not cut into slices."""
    try:
        num_slices = pynvml.nvmlDeviceGetMaxMigDeviceCount(card) if pynvml.nvmlDeviceGetMigMode(card)[0] else 0
    except pynvml.NVMLError:  # a card that cannot be cut
        num_slices = 0
    for index in range(num_slices):
        try:
            yield NvmlGpu(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index), card)
        except pynvml.NVMLError:  # fewer are made than could be
            continue
    if not num_slices:
        yield NvmlGpu(card, card)


def _runs(gpu: NvmlGpu, processes: Collection[int]) -> bool:
    try:
        return any(running.pid in processes for running in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle))
    except pynvml.NVMLError:
        return False
