"""The NVIDIA driver's library as a test says it is: its functions take the place of those of
``pynvml``.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest


@dataclass(eq=False)
class Gpu:
    """A card; None stands for what the driver does not tell."""

    uuid: str
    processes: dict[int, int] = field(default_factory=dict)
    """Percent of the GPU's time that each process took lately, by its id."""
    memory: dict[int, int | None] = field(default_factory=dict)
    """Bytes that each process holds of the memory, of 100 bytes, by its id."""
    reasons: int = 0
    millijoules: int | None = 0
    milliwatts: int = 700_000
    megahertz: int = 1980


def refuses(code: int) -> Any:
    raise pynvml.NVMLError(code)


class Driver:
    """The functions of NVML that autotune calls, for some cards.

    ``missing`` are those that this driver does not have.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *cards: Gpu, missing: tuple[str, ...] = ()
    ) -> None:
        self._cards = cards
        self._gpus = {f"GPU-{card.uuid}": card for card in cards}
        for name in (name for name in vars(Driver) if name.startswith("nvml")):
            monkeypatch.setattr(pynvml, name, getattr(self, name), raising=False)
        for name in missing:
            monkeypatch.setattr(
                pynvml, name, lambda *_: refuses(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            )

    def nvmlInit(self) -> None:  # noqa: N802  # NVML's own names
        if not self._cards:
            refuses(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        return self._cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:  # noqa: N802
        return self._gpus.get(uuid) or refuses(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:  # noqa: N802
        return next(uuid for uuid, each in self._gpus.items() if each is gpu)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: Gpu) -> int:  # noqa: N802
        return (
            refuses(pynvml.NVML_ERROR_NOT_SUPPORTED) if gpu.millijoules is None else gpu.millijoules
        )

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:  # noqa: N802
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=gpu.memory.get(pid))
            for pid in {**gpu.processes, **gpu.memory}
        ]

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:  # noqa: N802
        return SimpleNamespace(total=100)

    def nvmlDeviceGetProcessUtilization(self, gpu: Gpu, since: int) -> list[Any]:  # noqa: N802
        busy = [
            SimpleNamespace(pid=pid, smUtil=percent)
            for pid, percent in gpu.processes.items()
            if percent
        ]
        return busy or refuses(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: Gpu) -> int:  # noqa: N802
        return gpu.reasons

    def nvmlDeviceGetPowerManagementLimit(self, gpu: Gpu) -> int:  # noqa: N802
        return gpu.milliwatts

    def nvmlDeviceGetPowerManagementDefaultLimit(self, gpu: Gpu) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetMaxClockInfo(self, gpu: Gpu, clock: int) -> int:  # noqa: N802
        return gpu.megahertz

    def nvmlDeviceGetApplicationsClock(self, gpu: Gpu, clock: int) -> int:  # noqa: N802
        return refuses(pynvml.NVML_ERROR_NOT_SUPPORTED)
