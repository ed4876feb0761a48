"""Whether a GPU that is trained on was this training's alone, and at its full speed. Not yet run on one."""

import os
import time
from typing import Any

import torch

_SLOWED_BY = {
    "nvmlClocksThrottleReasonHwThermalSlowdown": "heat",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "heat",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "its power supply",
}
"""NVML's reasons for lower clocks that are no part of a GPU's usual work, as its power limit is."""
_LEAST_BUSY_PERCENT = 10
"""Of a GPU's time, from which on another process counts as computing on it."""


_LOOK_BACK_SECONDS = 2.0


def device_fault() -> str | None:
    """What is wrong with this process's GPU now, in one line; None where nothing is, or NVML (the extra ``energy``) does not say."""
    try:
        import pynvml  # noqa: PLC0415  # an extra
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return _slowed(pynvml, handle) or _shared(pynvml, handle)
    except (pynvml.NVMLError, AttributeError):  # an older driver, or a GPU that does not say
        return None


def _slowed(pynvml: Any, handle: Any) -> str | None:
    reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    found = sorted({why for name, why in _SLOWED_BY.items() if reasons & getattr(pynvml, name, 0)})
    return f"its GPU was slowed down by {' and '.join(found)}" if found else None


def _shared(pynvml: Any, handle: Any) -> str | None:
    """Of processes that use the GPU at all, only those count that NVML has seen computing; in a container it may not know this one."""
    users = {each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    if os.getpid() not in users or len(users) == 1:
        return None
    since = int((time.time() - _LOOK_BACK_SECONDS) * 1e6)
    busy = {each.pid for each in pynvml.nvmlDeviceGetProcessUtilization(handle, since) if each.smUtil >= _LEAST_BUSY_PERCENT}
    num_others = len((busy & users) - {os.getpid()})
    return f"{num_others} other {'process' if num_others == 1 else 'processes'} computed on its GPU" if num_others else None
