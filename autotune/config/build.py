"""Builds objects from configuration nodes: each node's ``_target_`` is called with the node's other values.

An experiment file can come from anyone, so a ``_target_`` may only name a component of the config key that it stands in
(``autotune.config.accepted_targets``), or code in packages that the user adds on the command line. The name is checked when a
configuration is composed, before anything is imported. When a component is built, the object found must be of the key's kind, or be
*defined* in an added package, so that a name cannot reach through a module to what that module imported (``my_net.os.system``).
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException

from autotune.config.accepted_targets import accepted_names, accepts_name, component_key, entries, is_component, within
from autotune.errors import ConfigError, TargetNotAllowedError


def check_target_names(config: Mapping[Any, Any], allowed: Sequence[str]) -> None:
    """Check the name in every ``_target_`` of a whole configuration, nested ones too, against what its config key accepts.

    Raises:
        TargetNotAllowedError: a name is not accepted; names the key, what was found and what is accepted.
    """
    for where, key, value in entries(config):
        if key == "_target_":
            _check_name(value, allowed, where, component_key(where))


def resolve_target(name: str, allowed: Sequence[str], where: str, *, key: str | None = None) -> Callable[..., Any]:
    """Import the callable that a ``_target_`` names.

    Args:
        where: dotted key of the ``_target_``, for messages.
        key: config key whose components are accepted; None for the one that ``where`` lies beneath.

    Raises:
        TargetNotAllowedError: the name is not accepted, or the object found is no component of the key and an added package does not
            define it.
        ConfigError: no object has that name, or the object cannot be called.
    """
    component = component_key(where if key is None else key)
    _check_name(name, allowed, where, component)
    found = _locate(name, where)
    if accepts_name(name, component) and is_component(found, component):
        return found  # type: ignore[no-any-return]  # a class or a function
    defined_in = getattr(found, "__module__", None)
    if not within(name, allowed) or not (within(defined_in, allowed) or is_component(found, component)):
        raise TargetNotAllowedError(_refusal(where, name, component, defined_in=defined_in))
    if not callable(found):
        raise ConfigError(f"{where}: {name} is a {type(found).__name__}, accepted is something that can be called")
    return found  # type: ignore[no-any-return]  # callable() was checked above


def build(node: Mapping[str, Any], allowed: Sequence[str], where: str) -> Any:
    """Build the object that a configuration node describes: call the node's ``_target_`` with the node's other values.

    Args:
        node: resolved plain data.
        allowed: packages that ``_target_`` may name besides the components of ``where``.
        where: the node's config key.

    Raises:
        ConfigError: the target refused its values, a ``_target_`` in the node is missing or not allowed, or a text contains an
            interpolation that Hydra would resolve without the allow-list.
    """
    return call(build_partial(node, allowed, where), where)


def build_partial(node: Mapping[str, Any], allowed: Sequence[str], where: str, *, key: str | None = None) -> "partial[Any]":
    """Bind a node's values to its ``_target_`` without calling it; nested nodes are built.

    Args:
        where: the node's place, for messages.
        key: config key whose components are accepted; None for ``where``.
    """
    if "_target_" not in node:
        raise ConfigError(f"{where}: has no _target_, accepted is the name of something that can be called")
    settings = {key: value for key, value in node.items() if key != "_target_"}
    is_for_hydra = any(_is_for_hydra(key, value) for key, value in settings.items())
    _check_nested(node, allowed, where, key, is_for_hydra=is_for_hydra)
    if not is_for_hydra:  # Hydra takes milliseconds a node, in a measured phase
        return partial(resolve_target(node["_target_"], allowed, f"{where}._target_", key=key), **settings)
    try:
        component = hydra.utils.instantiate({**node, "_partial_": True}, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise ConfigError(f"{where}: {' '.join(str(cause).split())}") from error
    assert isinstance(component, partial)
    # Hydra's own subclass of partial checks its target again at each call, which takes longer than the call itself.
    return partial(component.func, *component.args, **component.keywords)


def call(made: "partial[Any]", where: str, *args: Any, **kwargs: Any) -> Any:
    """Call a partial that ``build_partial`` returned; a refused argument is reported in one line.

    Raises:
        ConfigError: the target raised TypeError or ValueError; names ``where``, the target and its bound arguments.
    """
    try:
        return made(*args, **kwargs)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in made.keywords.items())
        name = getattr(made.func, "__qualname__", str(made.func))
        raise ConfigError(f"{where}: {name}({given}) failed: {' '.join(str(error).split())}") from error


def accepted_arguments(made: "partial[Any]", offered: Mapping[str, Any]) -> dict[str, Any]:
    """The offered arguments that a partial's signature names and that are not bound yet; none if its signature cannot be read."""
    try:
        names = inspect.signature(made.func).parameters
    except (TypeError, ValueError):
        return {}
    return {key: value for key, value in offered.items() if key in names and key not in made.keywords}


def _is_for_hydra(key: str, value: Any) -> bool:
    """Whether Hydra must handle a setting: its key is one of Hydra's own (``_name_``), or it contains such a key, as nested nodes do."""
    if key.startswith("_") and key.endswith("_"):
        return True
    if isinstance(value, Mapping):
        return any(_is_for_hydra(str(inner_key), inner) for inner_key, inner in value.items())
    return isinstance(value, list | tuple) and any(_is_for_hydra("", item) for item in value)


def _check_nested(node: Mapping[str, Any], allowed: Sequence[str], where: str, component: str | None, *, is_for_hydra: bool) -> None:
    for entry, key, value in entries(node, f"{where}."):
        if key == "_target_":
            resolve_target(value, allowed, entry, key=component)
        elif is_for_hydra and isinstance(value, str) and "${" in value:
            raise ConfigError(f"{entry}: found {value!r}, accepted is text without ${{")


def _check_name(name: Any, allowed: Sequence[str], where: str, component: str | None) -> None:
    if not accepts_name(name, component) and not within(name, allowed):
        raise TargetNotAllowedError(_refusal(where, name, component))


def _refusal(where: str, name: Any, component: str | None, defined_in: str | None = None) -> str:
    place = f", which {defined_in} defines" if defined_in else ""
    module = defined_in or (name.rpartition(".")[0] if isinstance(name, str) else "") or str(name)
    package = module if module.startswith("autotune.") else module.partition(".")[0]
    added = f"what the command line adds (allowed_targets=[{package}], if you trust that code)"
    names = ", ".join(accepted_names(component))
    return f"{where}: found {name!r}{place}; accepted {f'are {names}, and {added}' if names else f'is {added}'}"


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
