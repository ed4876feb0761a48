"""Checks that a training has its GPU for itself and at full speed. Not yet run on a GPU."""

import os
import time
from typing import Any

import torch

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


def device_fault() -> str | None:
    """What disturbs this process's GPU now, in one line; None if nothing does, or if NVML (the extra ``energy``) cannot tell."""
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
