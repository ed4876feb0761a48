"""The versions of the software that measured times and metrics depend on."""

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


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
