"""Energy meters: the joules that a training's device has used, from the counters of the hardware.

A meter is read at the start and end of a phase of the clock, never within a step. For a GPU it is
the driver's counter of that GPU, found by UUID, because device numbers differ between processes.
For the CPU it is RAPL, which counts whole packages (sockets): the energy of other programs on the
machine is included.
"""

import math
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from autotune.training.capabilities import text_of
from autotune.training.nvml import UntoldError, gpu_of
from autotune.training.parallel.ranks import Ranks

POWERCAP = Path("/sys/class/powercap")


class RaplMeter:
    """Energy meter of all CPU packages, in joules since the meter was made.

    The meter must be read before a counter wraps around twice, because it takes a counter that fell
    for one that wrapped once.

    Args:
        folder: root of the kernel's powercap framework.

    Raises:
        UntoldError: there is no package, or this process may not read its counter.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        self._lock = threading.Lock()
        self._total = 0
        try:
            self._counters = [
                (zone / "energy_uj", int((zone / "max_energy_range_uj").read_text()))
                for zone in sorted(folder.glob("intel-rapl:*"))
                # with their cores, and without memory and the platform, which counts more
                if text_of(zone / "name").startswith("package")
            ]
            self._last = self._read()
        except OSError as error:
            raise UntoldError(f"{error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise UntoldError(f"{folder}: {error}") from error
        if not self._counters:
            raise UntoldError(f"{folder} has no intel-rapl package")

    def __call__(self) -> float:
        """Joules so far; NaN if a counter can no longer be read."""
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


def energy_meter(device: torch.device) -> Callable[[], float] | None:
    """Energy meter of a device, as a function that returns joules.

    None if the device's energy cannot be read.
    """
    try:
        return _cpu_meter(os.getpid()) if device.type == "cpu" else _gpu_meter(device)
    except UntoldError:
        return None


def energy_fault(device_type: str) -> str | None:
    """Why the energy of this process's device of a type, such as ``cpu`` or ``cuda``, cannot be
    read; None if it can.
    """
    try:
        RaplMeter() if device_type == "cpu" else _gpu_meter(torch.device(device_type))
    except UntoldError as error:
        return str(error)
    return None


def _gpu_meter(device: torch.device) -> Callable[[], float]:
    # AMD's may have none
    gpu = gpu_of(str(getattr(torch.cuda.get_device_properties(device), "uuid", None)))
    gpu.joules()

    def meter() -> float:
        try:
            return gpu.joules()
        except UntoldError:
            return math.nan

    return meter


def joules_of_all(
    own: tuple[float | None, ...], device: torch.device, ranks: Ranks
) -> tuple[float | None, ...]:
    """Sum energies, in joules, over the devices of all ranks.

    None in place of a sum if a rank could not measure its part.

    A CPU's meter counts its whole machine, so only the first rank of each machine contributes.

    Args:
        own: joules measured by this rank.
    """
    meter = _machine() if device.type == "cpu" else f"GPU of rank {ranks.rank}"
    of_meters = dict(reversed(ranks.gathered((meter, own))))
    sums: list[float | None] = []
    for of_all in zip(*of_meters.values(), strict=True):
        known = [joules for joules in of_all if joules is not None]
        sums.append(math.fsum(known) if len(known) == len(of_all) else None)
    return tuple(sums)


def _machine() -> str:
    """Name of the running kernel.

    Containers on one machine share it, as they share the energy counters.
    """
    return text_of(Path("/proc/sys/kernel/random/boot_id"))


@cache
def _cpu_meter(process: int) -> RaplMeter:
    """The process's only RAPL meter, read by a thread in between: a phase may last longer than a
    counter takes to wrap around.
    """
    meter = RaplMeter()

    def keep_reading() -> None:
        while True:
            # the smallest counter, of 65 kJ, wraps within minutes at a package's highest power
            time.sleep(30)
            meter()

    threading.Thread(target=keep_reading, name=f"energy of {process}", daemon=True).start()
    return meter
