"""Which components a ``_target_`` may name, by config key.

An experiment file can come from anyone, and a ``_target_`` is called when it is built. So what is accepted are components, never packages:
those that the shipped ``conf/`` itself names for that key, and the public ones of a few libraries that are of its kind (``FAMILIES``).
"""

import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from autotune.config.experiments import shipped_folder

KEYS = (
    "model", "data", "loss", "metric", "optimizer", "lr_schedule", "averaging", "augmentation", "views", "technique", "parallelism",
    "search.sampler", "stopping", "objective", "tracking",
)  # fmt: skip
"""Config keys whose nodes are components. A node inside such a node accepts what the outer one does, and no other node accepts anything."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The public names ``MODULE.NAME`` of a library that are components of one kind."""

    module: str
    subclass_of: str | None = None
    """Class that a component must be a subclass of; None for functions."""
    takes: tuple[str, ...] = ()
    """Arguments that a function must name."""

    def __str__(self) -> str:
        return f"{self.module}.NAME"

    def has_name(self, name: str) -> bool:
        """Whether a name could be one of the family's, which is known without importing the library."""
        module, _, last = name.rpartition(".")
        return module == self.module and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", last) is not None

    def has(self, found: Any) -> bool:
        """Whether an object that has one of the family's names is of the family's kind, and is the library's own."""
        if str(getattr(found, "__module__", None)).partition(".")[0] != self.module.partition(".")[0]:
            return False
        if self.subclass_of is not None:
            base_module, _, base = self.subclass_of.rpartition(".")
            return inspect.isclass(found) and issubclass(found, getattr(importlib.import_module(base_module), base))
        return inspect.isroutine(found) and set(self.takes) <= _argument_names(found)


_LOSSES = (
    Family(module="torch.nn", subclass_of="torch.nn.modules.loss._Loss"),
    Family(module="torch.nn.functional", takes=("input", "target")),
)

FAMILIES: Mapping[str, tuple[Family, ...]] = {
    "model": (Family(module="torch.nn", subclass_of="torch.nn.Module"),),
    "loss": _LOSSES,
    "metric": _LOSSES,
    "optimizer": (
        Family(module="torch.optim", subclass_of="torch.optim.Optimizer"),
        Family(module="schedulefree", subclass_of="torch.optim.Optimizer"),
    ),
    "lr_schedule": (Family(module="torch.optim.lr_scheduler", subclass_of="torch.optim.lr_scheduler.LRScheduler"),),
    "search.sampler": (
        Family(module="optuna.samplers", subclass_of="optuna.samplers.BaseSampler"),
        Family(module="optuna.samplers.nsgaii", subclass_of="optuna.samplers.nsgaii.BaseCrossover"),
    ),
}
"""Components of libraries, by config key."""


def component_key(where: str) -> str | None:
    """The component's config key that a dotted key is or lies beneath; None if it belongs to no component."""
    return next((key for key in KEYS if where == key or where.startswith(f"{key}.")), None)


def accepts_name(name: Any, key: str | None) -> bool:
    """Whether a name may stand in a ``_target_`` of a config key, as far as the name alone says."""
    if not isinstance(name, str) or key is None:
        return False
    return name in shipped_components()[key] or any(family.has_name(name) for family in FAMILIES.get(key, ()))


def is_component(found: Any, key: str | None) -> bool:
    """Whether an object is a component of a config key, by where it is defined and of which kind it is."""
    if key is None:
        return False
    defined_as = f"{getattr(found, '__module__', None)}.{getattr(found, '__qualname__', None)}"
    return defined_as in shipped_components()[key] or any(family.has(found) for family in FAMILIES.get(key, ()))


def accepted_names(key: str | None) -> list[str]:
    """What a ``_target_`` of a config key may name, for messages."""
    return [] if key is None else [*sorted(shipped_components()[key]), *map(str, FAMILIES.get(key, ()))]


@functools.cache
def shipped_components() -> Mapping[str, frozenset[str]]:
    """Every ``_target_`` in the config groups of the shipped ``conf/``, by component key; experiments are not read."""
    folder, found = shipped_folder("conf"), {key: set[str]() for key in KEYS}
    for path in folder.glob("*/*.yaml"):
        group = path.parent.name
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  # both are safe
        for where, key, value in entries(content, f"{group}.") if group != "experiment" else ():
            component = component_key(where)
            if key == "_target_" and component is not None:
                found[component].add(value)
    return {key: frozenset(names) for key, names in found.items()}


def entries(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted key, own key and value of every entry of a node's mappings and lists, at any depth."""
    pairs: Any = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else ()
    for key, value in pairs:
        yield f"{prefix}{key}", key, value
        yield from entries(value, f"{prefix}{key}.")


def within(name: Any, packages: Sequence[str]) -> bool:
    """Whether a dotted name is one of the packages or lies in one."""
    return isinstance(name, str) and any(name == package or name.startswith(f"{package}.") for package in packages)


def _argument_names(function: Any) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()
