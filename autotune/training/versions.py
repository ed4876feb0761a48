"""The versions of the software that times and numbers depend on."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch


def versions() -> dict[str, str | None]:
    """Versions of what times and numbers depend on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("autotune", "torch", "numpy", "ray", "optuna", "hydra-core", "mlflow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
