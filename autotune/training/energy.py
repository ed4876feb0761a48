"""Energy meters: the joules that a training's own device has used, as hardware counts them by itself.

A meter is read where a phase of the clock begins and ends, never within a step. On a GPU it is the driver's counter of that one GPU,
found by its UUID, since the numbers of devices differ between processes. On the CPU it is RAPL, which counts whole packages (sockets),
whoever uses them: what else runs on the machine is counted, too.
"""

import math
import os
import platform
import threading
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from autotune.training.parallel.ranks import Ranks

POWERCAP = Path("/sys/class/powercap")
_READ_EVERY_SECONDS = 30.0
"""A RAPL counter of 65 kJ, the smallest, wraps around after minutes at the most that a package draws."""


class UnreadableEnergyError(Exception):
    """Why the energy of a device cannot be read."""


class RaplMeter:
    """Joules of all CPU packages since this meter was made.

    A counter that has wrapped around is taken for one that did so once: it must be read again before it does twice.

    Args:
        folder: as the kernel's powercap framework lays it out.

    Raises:
        UnreadableEnergyError: there is no package, or this process may not read one.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        self._lock = threading.Lock()
        self._total = 0
        try:
            self._counters = [(zone / "energy_uj", int((zone / "max_energy_range_uj").read_text())) for zone in _packages(folder)]
            self._last = self._read()
        except OSError as error:
            raise UnreadableEnergyError(f"{error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise UnreadableEnergyError(f"{folder}: {error}") from error
        if not self._counters:
            raise UnreadableEnergyError(f"{folder} has no intel-rapl package")

    def __call__(self) -> float:
        """The joules so far; NaN where a counter can no longer be read."""
        with self._lock:
            try:
                now = self._read()
            except (OSError, ValueError):
                return math.nan
            for value, last, (_, wraps_at) in zip(now, self._last, self._counters, strict=True):
                self._total += value - last + (wraps_at if value < last else 0)
            self._last = now
            return self._total * 1e-6

    def _read(self) -> list[int]:
        return [int(path.read_text()) for path, _ in self._counters]


def _packages(folder: Path) -> list[Path]:
    """The zones that are whole packages: cores are counted in them, memory is not, and the platform's own zone counts more."""
    return [zone for zone in sorted(folder.glob("intel-rapl:*")) if _text(zone / "name").startswith("package")]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class NvmlMeter:
    """Joules of one GPU since its driver was loaded.

    Args:
        uuid: such as ``GPU-8a2f...``.
        nvml: the module ``pynvml``.

    Raises:
        UnreadableEnergyError: the driver does not tell.
    """

    def __init__(self, uuid: str, nvml: Any) -> None:
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except nvml.NVMLError as error:
            raise UnreadableEnergyError(f"NVML of {uuid}: {error}") from error

    def __call__(self) -> float:
        """The joules so far; NaN where the driver no longer tells."""
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) * 1e-3
        except self._nvml.NVMLError:
            return math.nan


def energy_meter(device: torch.device) -> Callable[[], float] | None:
    """The meter of a device of this process; None where its energy cannot be read."""
    try:
        return _gpu_meter(_uuid(device)) if device.type == "cuda" else _cpu_meter(os.getpid())
    except UnreadableEnergyError:
        return None


def energy_fault(device_type: str) -> str | None:
    """Why the energy of this process's ``cpu`` or ``cuda`` device cannot be read; None where it can."""
    try:
        _gpu_meter(_uuid(torch.device("cuda"))) if device_type == "cuda" else RaplMeter()
    except UnreadableEnergyError as error:
        return str(error)
    return None


def joules_of_all(
    own: tuple[float | None, ...], device: torch.device, ranks: Ranks, machine: int | None = None
) -> tuple[float | None, ...]:
    """Sums over the devices of all ranks that train together; None where one of them does not know its own.

    A CPU's meter counts its whole machine: of the ranks on one machine only the first one's joules are taken.

    Args:
        own: this rank's.
        machine: a number that only this machine has; None: found here.
    """
    if ranks.size == 1:
        return own
    machines = torch.zeros(ranks.size, dtype=torch.float64)
    machines[ranks.rank] = _machine() if machine is None else machine
    together = ranks.summed(machines).tolist()
    counts = device.type == "cuda" or together.index(together[ranks.rank]) == ranks.rank
    known = [math.nan if each is None else each for each in own] if counts else [0.0] * len(own)
    summed = ranks.summed(torch.tensor(known, dtype=torch.float64)).tolist()
    return tuple(each if math.isfinite(each) else None for each in summed)


def _machine() -> int:
    """A number of the running kernel, which containers of one machine share as they share its counters."""
    return zlib.crc32((_text(Path("/proc/sys/kernel/random/boot_id")) or platform.node()).encode())


@cache
def _cpu_meter(process: int) -> RaplMeter:
    """One a process, with a thread that reads it often enough: a phase may last longer than a counter takes to wrap around."""
    meter = RaplMeter()

    def keep_reading() -> None:
        while True:
            time.sleep(_READ_EVERY_SECONDS)
            meter()

    threading.Thread(target=keep_reading, name=f"energy of {process}", daemon=True).start()
    return meter


@cache
def _gpu_meter(uuid: str) -> NvmlMeter:
    try:
        import pynvml  # noqa: PLC0415  # an extra: only GPUs need it
    except ImportError as error:
        raise UnreadableEnergyError("nvidia-ml-py is not installed: pip install 'autotune[energy]'") from error
    return NvmlMeter(uuid, pynvml)


def _uuid(device: torch.device) -> str:
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        raise UnreadableEnergyError("the GPU has no UUID")
    return f"GPU-{uuid}"
