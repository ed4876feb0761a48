"""Combines options of config groups that were composed one at a time into the configuration that Hydra would compose from all of them.

This is correct if an option's file changes only keys beneath its own group, as almost all do. ``changes_only`` finds the others: an option
that sets values elsewhere, or chooses options of other groups, changes other parts of the configuration too.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

Choices = dict[str, str]
"""Name of the chosen option, by config group."""


def changes_only(group: str, *, before: tuple[DictConfig, Choices], after: tuple[DictConfig, Choices]) -> bool:
    """Whether two composed configurations, without Hydra's own node, differ only beneath a group."""
    if "@" in group:
        return False  # the group's package, and so its key, is another one than its name
    (config, choices), (other, other_choices) = before, after
    other_choices_equal = {**choices, group: ""} == {**other_choices, group: ""}
    return other_choices_equal and _without(config, group) == _without(other, group)


def with_options(config: DictConfig, choices: Choices, options: Mapping[str, tuple[DictConfig, Choices]]) -> tuple[DictConfig, Choices]:
    """Replace groups of ``config``, in place, by those of other configurations; return it with its new choices.

    No group of ``options`` may lie beneath another.
    """
    chosen = dict(choices)
    for group, (other, other_choices) in options.items():
        path = _path(group)
        OmegaConf.update(config, path, OmegaConf.select(other, path), merge=False)
        chosen[group] = other_choices[group]
    return config, chosen


def _path(group: str) -> str:
    return group.replace("/", ".")


def _without(config: DictConfig, group: str) -> Any:
    """The configuration as plain data, without the keys beneath a group."""
    plain = OmegaConf.to_container(config, resolve=False)
    holder: Any = plain
    *parents, last = _path(group).split(".")
    for part in parents:
        holder = holder.get(part) if isinstance(holder, dict) else None
    if isinstance(holder, dict):
        holder.pop(last, None)
    return plain
