"""Building: a configuration node with a ``_target_`` becomes the object it names."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException

from autotune.config.allowed import resolve_target
from autotune.errors import ConfigError


def build(node: Mapping[str, Any], allowed: Sequence[str], where: str) -> Any:
    """What the node's ``_target_`` returns for the node's other values.

    Args:
        node: resolved plain data.
        allowed: packages that ``_target_`` may name besides autotune's own list.
        where: the node's config key, for messages.

    Raises:
        ConfigError: the target refused its values, a ``_target_`` in the node is missing or not allowed, or a text holds
            an interpolation, which Hydra would resolve into whatever it makes, past the allow-list.
    """
    made = build_partial(node, allowed, where)
    return call(made, where)


def build_partial(node: Mapping[str, Any], allowed: Sequence[str], where: str) -> "partial[Any]":
    """The node's ``_target_`` with the node's other values bound to it, not yet called; nested nodes are built."""
    if "_target_" not in node:
        raise ConfigError(f"{where}: has no _target_, accepted is the name of something that can be called")
    _check_nested(node, allowed, where)
    settings = {key: value for key, value in node.items() if key != "_target_"}
    if not any(_is_for_hydra(key, value) for key, value in settings.items()):  # some milliseconds a node, in a phase that counts
        return partial(resolve_target(node["_target_"], allowed, f"{where}._target_"), **settings)
    try:
        made = hydra.utils.instantiate({**node, "_partial_": True}, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise ConfigError(f"{where}: {' '.join(str(cause).split())}") from error
    assert isinstance(made, partial)
    # Hydra's own kind of partial checks its target anew at each call, which takes longer than what it calls.
    return partial(made.func, *made.args, **made.keywords)


def call(made: "partial[Any]", where: str, *args: Any, **kwargs: Any) -> Any:
    """Call what ``build_partial`` returned, its refusal of an argument turned into one line.

    Raises:
        ConfigError: the target raised TypeError or ValueError.
    """
    try:
        return made(*args, **kwargs)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in made.keywords.items())
        name = getattr(made.func, "__qualname__", str(made.func))
        raise ConfigError(f"{where}: {name}({given}) failed: {' '.join(str(error).split())}") from error


def accepted_arguments(made: "partial[Any]", offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the offered arguments that a callable's signature names and that are not bound yet."""
    try:
        names = inspect.signature(made.func).parameters
    except (TypeError, ValueError):
        return {}
    return {key: value for key, value in offered.items() if key in names and key not in made.keywords}


def _is_for_hydra(key: str, value: Any) -> bool:
    """Whether a setting is more than an argument: one of Hydra's own, or one that holds a node to build."""
    if key.startswith("_") and key.endswith("_"):
        return True
    if isinstance(value, Mapping):
        return any(_is_for_hydra(str(each), inner) for each, inner in value.items())
    return isinstance(value, list | tuple) and any(_is_for_hydra("", each) for each in value)


def _check_nested(node: Any, allowed: Sequence[str], where: str) -> None:
    if isinstance(node, Mapping):
        if "_target_" in node:
            resolve_target(node["_target_"], allowed, f"{where}._target_")
        for key, each in node.items():
            _check_nested(each, allowed, f"{where}.{key}")
    elif isinstance(node, list | tuple):
        for index, each in enumerate(node):
            _check_nested(each, allowed, f"{where}.{index}")
    elif isinstance(node, str) and "${" in node:
        raise ConfigError(f"{where}: found {node!r}, accepted is text without ${{")
