"""Allow-list of the code that the ``_target_`` keys of a configuration may name.

An experiment file can come from anyone, so a ``_target_`` may only name code in packages that hold components and nothing else, and in
packages that the user adds on the command line. The name is checked when a configuration is composed. When a component is built, the
object found must also be *defined* in an allowed package, so that a name cannot reach through a module to what that module imported
(``torch.nn.modules.os.system``).
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.errors import ConfigError, TargetNotAllowedError

SHIPPED = (
    "autotune.objective",
    "autotune.search",
    "autotune.tracking",
    "autotune.training",
    "autotune.workloads",
    "optuna.pruners",
    "optuna.samplers",
    "schedulefree",
    "torch.nn",
    "torch.optim",
)
"""Packages that any configuration may name in a ``_target_``."""

_DEFINED_IN = (*SHIPPED, "torch._C._nn")
"""Packages that define the objects of the ``SHIPPED`` ones: torch.nn.functional takes some of its functions from torch._C._nn."""


def check_target_names(node: Any, allowed: Sequence[str], where: str = "") -> None:
    """Check the name in every ``_target_`` of a configuration, nested ones too, against the allow-list.

    Raises:
        TargetNotAllowedError: a name is not allowed; names the key, what was found and what is accepted.
    """
    if isinstance(node, Mapping):
        if "_target_" in node and not _within(node["_target_"], (*SHIPPED, *allowed)):
            raise TargetNotAllowedError(_refusal(f"{where}_target_", node["_target_"]))
        for key, value in node.items():
            check_target_names(value, allowed, f"{where}{key}.")
    elif isinstance(node, list | tuple):
        for index, item in enumerate(node):
            check_target_names(item, allowed, f"{where}{index}.")


def resolve_target(name: str, allowed: Sequence[str], where: str) -> Callable[..., Any]:
    """Import the callable that a ``_target_`` names.

    Raises:
        TargetNotAllowedError: the name, or the module that defines the object found, is not allowed.
        ConfigError: no object has that name, or the object cannot be called.
    """
    if not _within(name, (*SHIPPED, *allowed)):
        raise TargetNotAllowedError(_refusal(where, name))
    found = _locate(name, where)
    defined_in = getattr(found, "__module__", None)
    if not _within(defined_in, (*_DEFINED_IN, *allowed)):
        raise TargetNotAllowedError(_refusal(where, name, defined_in=str(defined_in)))
    if not callable(found):
        raise ConfigError(f"{where}: {name} is a {type(found).__name__}, accepted is something that can be called")
    return found  # type: ignore[no-any-return]  # callable() was checked above


def _within(name: Any, packages: Sequence[str]) -> bool:
    return isinstance(name, str) and any(name == package or name.startswith(f"{package}.") for package in packages)


def _refusal(where: str, name: Any, defined_in: str | None = None) -> str:
    place = f", which {defined_in} defines" if defined_in else ""
    package = (defined_in or str(name)).split(".")[0]
    return (
        f"{where}: found {name!r}{place}; accepted are {', '.join(SHIPPED)} and what the command line adds "
        f"(allowed_targets=[{package}], if you trust that code)"
    )


def _locate(name: str, where: str) -> Any:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and not (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise ConfigError(f"{where}: {name}: importing {module_name} failed: {error}") from error
            continue
        except (ImportError, SyntaxError) as error:
            raise ConfigError(f"{where}: {name}: importing {module_name} failed: {error}") from error
        for attribute in parts[length:]:
            if not hasattr(found, attribute):
                raise ConfigError(f"{where}: {name}: {module_name} has no {'.'.join(parts[length:])}")
            found = getattr(found, attribute)
        return found
    raise ConfigError(
        f"{where}: {name}: no module named {parts[0]!r}; accepted is an installed package, or a file in the working folder "
        f"or beside --config-dir"
    )
