"""The versions of the software that times and numbers depend on."""

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def versions() -> dict[str, str | None]:
    """Versions of what times and numbers depend on; None for what is not installed."""
    packages = ("autotune", "torch", "numpy", "ray", "optuna", "hydra-core", "mlflow")
    return {"python": platform.python_version(), "cuda": torch.version.cuda, **{name: _installed(name) for name in packages}}


@cache  # every trial asks
def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """The GPU driver's version, as the kernel module tells it; None where it does not."""
    try:
        with Path("/proc/driver/nvidia/version").open(encoding="utf-8") as lines:
            return next(word for word in lines.readline().split() if word[0].isdigit())
    except (OSError, StopIteration):
        return None
