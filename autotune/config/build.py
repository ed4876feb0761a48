"""Builds objects from configuration nodes: each node's ``_target_`` is called with the node's other values."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException

from autotune.config.allowed import resolve_target
from autotune.errors import ConfigError


def build(node: Mapping[str, Any], allowed: Sequence[str], where: str) -> Any:
    """Build the object that a configuration node describes: call the node's ``_target_`` with the node's other values.

    Args:
        node: resolved plain data.
        allowed: packages that ``_target_`` may name besides autotune's own list.
        where: the node's config key, for messages.

    Raises:
        ConfigError: the target refused its values, a ``_target_`` in the node is missing or not allowed, or a text contains an
            interpolation, which Hydra would resolve without the allow-list.
    """
    return call(build_partial(node, allowed, where), where)


def build_partial(node: Mapping[str, Any], allowed: Sequence[str], where: str) -> "partial[Any]":
    """Bind a node's values to its ``_target_`` without calling it; nested nodes are built."""
    if "_target_" not in node:
        raise ConfigError(f"{where}: has no _target_, accepted is the name of something that can be called")
    _check_nested(node, allowed, where)
    settings = {key: value for key, value in node.items() if key != "_target_"}
    if not any(_is_for_hydra(key, value) for key, value in settings.items()):  # Hydra takes milliseconds a node, in a measured phase
        return partial(resolve_target(node["_target_"], allowed, f"{where}._target_"), **settings)
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


def _check_nested(node: Any, allowed: Sequence[str], where: str) -> None:
    if isinstance(node, Mapping):
        if "_target_" in node:
            resolve_target(node["_target_"], allowed, f"{where}._target_")
        for key, value in node.items():
            _check_nested(value, allowed, f"{where}.{key}")
    elif isinstance(node, list | tuple):
        for index, item in enumerate(node):
            _check_nested(item, allowed, f"{where}.{index}")
    elif isinstance(node, str) and "${" in node:
        raise ConfigError(f"{where}: found {node!r}, accepted is text without ${{")
