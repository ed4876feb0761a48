"""autotune finds the configuration that reaches a target quality in the least time on the machines
at hand, and proves it.

``autotune.tune`` is the Python interface, and ``autotune.report`` what a training function calls;
``python -m autotune`` is the command.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.api import TuneResult, integer, log, power_of_two, target, tune, uniform
    from autotune.script import command
    from autotune.session import Checkpoint, building, checkpoint, evaluating, report, trial

__all__ = [
    "Checkpoint",
    "TuneResult",
    "building",
    "checkpoint",
    "command",
    "evaluating",
    "integer",
    "log",
    "power_of_two",
    "report",
    "target",
    "trial",
    "tune",
    "uniform",
]

_SUBMODULES = frozenset({"lightning", "transformers"})
"""Modules for other libraries, which are imported when they are asked for."""
_MODULE_OF = {
    **dict.fromkeys(
        ("Checkpoint", "building", "checkpoint", "evaluating", "report", "trial"),
        "autotune.session",
    ),
    "command": "autotune.script",
}
"""Module of what is not in ``autotune.api``, by name."""


def __getattr__(name: str) -> Any:
    """Import what is asked for first: ``import autotune`` itself imports nothing."""
    import importlib  # noqa: PLC0415

    if name in _SUBMODULES:
        return importlib.import_module(f"autotune.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF.get(name, "autotune.api")), name)


def __dir__() -> list[str]:
    return __all__
