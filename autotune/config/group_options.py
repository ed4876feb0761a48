"""Options of config groups, each composed alone, put together to what Hydra would make of all of them.

That holds where an option's file changes nothing but what stands beneath its own group, as almost all do. One that sets values
elsewhere, or picks files of other groups, shows: something else changes with it.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

Choices = dict[str, str]
"""Config group -> name of the chosen file."""


def changes_only(group: str, *, before: tuple[DictConfig, Choices], after: tuple[DictConfig, Choices]) -> bool:
    """Whether two composed configurations differ, but for Hydra's own node, only beneath a group."""
    if "@" in group:
        return False  # it lies beneath another key than its name
    (config, choices), (other, other_choices) = before, after
    chosen_alike = {**choices, group: ""} == {**other_choices, group: ""}
    return chosen_alike and _without(config, group) == _without(other, group)


def with_options(config: DictConfig, choices: Choices, options: Mapping[str, tuple[DictConfig, Choices]]) -> tuple[DictConfig, Choices]:
    """A configuration with the groups of others in the place of its own; it is changed, the others are not.

    No group lies beneath another.
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
    """The configuration as plain data, less what stands beneath a group."""
    plain = OmegaConf.to_container(config, resolve=False)
    holder: Any = plain
    *parents, last = _path(group).split(".")
    for part in parents:
        holder = holder.get(part) if isinstance(holder, dict) else None
    if isinstance(holder, dict):
        holder.pop(last, None)
    return plain
