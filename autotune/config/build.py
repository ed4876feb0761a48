"""Builds objects from configuration nodes: each node's ``_target_`` is called with the node's other
values.

An experiment file can come from anyone, so a ``_target_`` may only name what the shipped ``conf/``
names for that key, a class of a few libraries (``PACKAGES``), or code in packages that the user
adds on the command line. The name is checked when a configuration is composed, before anything is
imported. When a component is built, the object found must be *defined* there, so that a name cannot
reach through a module to what that module imported (``my_net.os.system``).
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import yaml

from autotune.config.experiments import named_files, shipped_folder
from autotune.errors import ConfigError, TargetNotAllowedError

KEYS = (
    "model",
    "data",
    "loss",
    "metric",
    "optimizer",
    "lr_schedule",
    "averaging",
    "augmentation",
    "views",
    "technique",
    "parallelism",
    "search.sampler",
    "stopping",
    "objective",
    "tracking",
)
"""Config keys whose nodes, and the nodes inside them, are components; no other node accepts a
``_target_``."""
PACKAGES = ("torch.nn", "torch.optim", "schedulefree", "optuna.samplers")
"""Packages whose classes are accepted for every one of ``KEYS``, and the functions of
``torch.nn.functional``."""


def check_target_names(config: Mapping[Any, Any], allowed: Sequence[str]) -> None:
    """Check the name in every ``_target_`` of a whole configuration, nested ones too, against what
    its config key accepts.

    Raises:
        TargetNotAllowedError: a name is not accepted; names the key, what was found and what is
            accepted.
    """
    for where, key, value in entries(config):
        if key == "_target_":
            _check_name(value, allowed, where, component_key(where))


def resolve_target(
    name: str, allowed: Sequence[str], where: str, *, key: str | None = None
) -> Callable[..., Any]:
    """Import the callable that a ``_target_`` names.

    Args:
        where: dotted key of the ``_target_``, for messages.
        key: config key whose components are accepted; None for the one that ``where`` lies beneath.

    Raises:
        TargetNotAllowedError: the name is not accepted, or the object found is defined elsewhere.
        ConfigError: no object has that name, or the object cannot be called.
    """
    component = component_key(where if key is None else key)
    _check_name(name, allowed, where, component)
    found = _locate(name, where)
    module = str(getattr(found, "__module__", None))
    is_component = component is not None and (
        f"{module}.{getattr(found, '__qualname__', None)}" in shipped_components()[component]
        or (inspect.isclass(found) and within(module, PACKAGES))
        or module == "torch.nn.functional"
    )
    if not is_component and not (within(name, allowed) and within(module, allowed)):
        raise TargetNotAllowedError(
            _refusal(where, f"{name!r}, which {module} defines", component, module)
        )
    if not callable(found):
        raise ConfigError(f"{where}: {name} is a {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]  # callable() was checked above


def build(
    node: Mapping[str, Any], allowed: Sequence[str], where: str, *args: Any, **offered: Any
) -> Any:
    """Build the object that a configuration node describes: call the node's ``_target_`` with the
    node's other values.

    Args:
        node: resolved plain data.
        allowed: packages that ``_target_`` may name besides the components of ``where``.
        where: the node's config key.
        args: arguments that are passed first, by position.
        offered: arguments that are passed if the target's signature names them and the node does
            not set them.

    Raises:
        ConfigError: the target refused its values, or a ``_target_`` in the node is missing or not
            allowed.
    """
    made = build_partial(node, allowed, where)
    return call(made, where, *args, **accepted_arguments(made, offered))


def build_partial(
    node: Mapping[str, Any], allowed: Sequence[str], where: str, *, key: str | None = None
) -> "partial[Any]":
    """Bind a node's values to its ``_target_`` without calling it; nested nodes are built.

    Values of the key ``_args_`` are passed by position, and a nested node with ``_partial_: true``
    is bound and not called, as by Hydra.

    Args:
        where: the node's place, for messages.
        key: config key whose components are accepted; None for ``where``.
    """
    if "_target_" not in node:
        raise ConfigError(f"{where}: needs _target_, the name of what is called")

    def made(value: Any, place: str) -> Any:
        if isinstance(value, Mapping):
            if "_target_" not in value:
                return {name: made(item, f"{place}.{name}") for name, item in value.items()}
            bound = build_partial(value, allowed, place, key=where if key is None else key)
            return bound if value.get("_partial_") else call(bound, place)
        return (
            [made(item, f"{place}.{index}") for index, item in enumerate(value)]
            if isinstance(value, list | tuple)
            else value
        )

    target = resolve_target(node["_target_"], allowed, f"{where}._target_", key=key)
    settings = {
        name: value
        for name, value in node.items()
        if name not in ("_target_", "_partial_", "_args_")
    }
    if unknown := next(
        (name for name in settings if name.startswith("_") and name.endswith("_")), None
    ):
        raise ConfigError(
            f"{where}.{unknown}: no such key; beside _target_ there may be _args_ and _partial_"
        )
    positional = node.get("_args_", [])
    if not isinstance(positional, list | tuple):
        raise ConfigError(f"{where}._args_: found {positional!r}, which is no list")
    return partial(target, *made(positional, f"{where}._args_"), **made(settings, where))


def call(made: "partial[Any]", where: str, *args: Any, **kwargs: Any) -> Any:
    """Call a partial that ``build_partial`` returned; a refused argument is reported in one line.

    Raises:
        ConfigError: the target raised TypeError or ValueError; names ``where``, the target and its
            bound arguments.
    """
    try:
        return made(*args, **kwargs)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in made.keywords.items())
        name = getattr(made.func, "__qualname__", str(made.func))
        raise ConfigError(
            f"{where}: {name}({given}) failed: {' '.join(str(error).split())}"
        ) from error


def accepted_arguments(made: "partial[Any]", offered: Mapping[str, Any]) -> dict[str, Any]:
    """The offered arguments that a partial's signature names and that are not bound yet.

    None if its signature cannot be read.
    """
    try:
        names = inspect.signature(made.func).parameters
    except (TypeError, ValueError):
        return {}
    return {
        key: value for key, value in offered.items() if key in names and key not in made.keywords
    }


def component_key(where: str) -> str | None:
    """The component's config key that a dotted key is or lies beneath.

    None if it belongs to no component.
    """
    return next((key for key in KEYS if within(where, [key])), None)


@functools.cache
def shipped_options() -> Mapping[str, Any]:
    """Content of every file in the config groups of the shipped ``conf/``, by group and name:
    ``optimizer/sgd``.
    """
    # both loaders are safe
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {
        f"{group.name}/{name}": yaml.load(path.read_bytes(), Loader=loader)  # noqa: S506
        for group in sorted(shipped_folder("conf").iterdir())
        if group.is_dir()
        for name, path in named_files(group)
    }


@functools.cache
def shipped_components() -> Mapping[str, frozenset[str]]:
    """Every ``_target_`` in the shipped options, experiments left out, by component key."""
    found = {key: set[str]() for key in KEYS}
    for option, content in shipped_options().items():
        group = option.partition("/")[0]
        for where, key, value in entries(content, f"{group}.") if group != "experiment" else ():
            component = component_key(where)
            if key == "_target_" and component is not None:
                found[component].add(value)
    return {key: frozenset(names) for key, names in found.items()}


def entries(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted key, own key and value of every entry of a node's mappings and lists, at any
    depth.
    """
    if isinstance(node, list | tuple):
        node = dict(enumerate(node))
    for key, value in node.items() if isinstance(node, Mapping) else ():
        yield f"{prefix}{key}", key, value
        yield from entries(value, f"{prefix}{key}.")


def within(name: Any, packages: Sequence[str]) -> bool:
    """Whether a dotted name is one of the packages or lies in one."""
    return isinstance(name, str) and any(
        name == package or name.startswith(f"{package}.") for package in packages
    )


def _check_name(name: Any, allowed: Sequence[str], where: str, component: str | None) -> None:
    is_component = component is not None and (
        (within(name, PACKAGES) and name not in PACKAGES)
        or (isinstance(name, str) and name in shipped_components()[component])
    )
    if not is_component and not within(name, allowed):
        raise TargetNotAllowedError(_refusal(where, repr(name), component, str(name)))


def _refusal(where: str, found: str, component: str | None, module: str) -> str:
    package = module if module.startswith("autotune.") else module.partition(".")[0]
    names = (
        [*sorted(shipped_components()[component]), *(f"{name}.NAME" for name in PACKAGES)]
        if component
        else ["nothing"]
    )
    return (
        f"{where}: found {found}; accepted here: {', '.join(names)}, and what"
        f" allowed_targets=[{package}] on the command line adds, if you trust that code"
    )


def _locate(name: str, where: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        reason: Exception = error
        module = name.rpartition(".")[0]
        if isinstance(error, AttributeError):
            try:
                importlib.import_module(module)
            except (ImportError, SyntaxError, ValueError) as failed:
                reason = failed  # what resolve_name leaves out: the module is there, and broken
        hint = (
            "; modules are looked for among those installed, in the working folder and beside"
            " --config-dir"
            if isinstance(reason, ModuleNotFoundError)
            else ""
        )
        raise ConfigError(f"{where}: {name}: {' '.join(str(reason).split())}{hint}") from error
