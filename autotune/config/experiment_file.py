"""Writing an experiment file: what a study found, as a configuration that runs by name."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.space import override_text


def experiment_yaml(
    *, base: str, base_content: Mapping[str, Any], groups: Mapping[str, str], values: Mapping[str, Any], comments: Sequence[str]
) -> str:
    """An experiment that is ``base`` with other group choices and values.

    What ``base`` itself says inside a group that gets another option would be carried into that option by a file that only
    points to ``base``; such a file takes over the rest of what ``base`` says instead.

    Args:
        base: the experiment it starts from, by name.
        base_content: what stands in its file.
        groups: config group -> file of it.
        values: config key -> value.
        comments: lines that say where it came from.
    """
    overriding = [{f"override /{group}": option} for group, option in groups.items()]
    if any(group.partition("/")[0] in base_content for group in groups):
        own_defaults = [each for each in base_content.get("defaults", []) if each != "_self_" and not _chooses(each, groups)]
        kept = {key: value for key, value in base_content.items() if key != "defaults" and key not in groups}
        content = {"defaults": [*own_defaults, *overriding, "_self_"], **_merged(kept, _nested(values))}
    else:
        content = {"defaults": [base, *overriding, "_self_"], **_nested(values)}
    header = "\n".join(["# @package _global_", *(f"# {line}" for line in comments)])
    return f"{header}\n{yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120)}"


def check_exported(exported: TrialConfig, trained: TrialConfig) -> None:
    """Hold an exported experiment, composed anew, against what was trained.

    Raises:
        ConfigError: they differ; the message names the first key.
    """
    found, wanted = exported.as_dict(), trained.as_dict()
    for key, value in wanted.items():
        if found[key] != value:
            raise ConfigError(
                f"best.yaml: {key}: composes to {override_text(found[key])}, the trial had {override_text(value)}; "
                f"its configuration cannot be written as an experiment"
            )


def _chooses(entry: Any, groups: Mapping[str, str]) -> bool:
    """Whether an entry of a defaults list picks the option of one of the groups."""
    return isinstance(entry, Mapping) and any(str(key).removeprefix("override ").strip("/") in groups for key in entry)


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as one; the other's values win."""
    both = {key: _merged(one[key], other[key]) for key in one if isinstance(one[key], Mapping) and isinstance(other.get(key), Mapping)}
    return {**one, **other, **both}


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.replace("/", ".").split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return nested


def train_command(experiment: str, folders: Sequence[str], allowed_targets: Sequence[str]) -> str:
    """The command that trains an experiment once, with all that composing it needs, as it is typed.

    Args:
        folders: of configuration files of the user's own.
        allowed_targets: what they may name besides what is always allowed.
    """
    allowed = [f"allowed_targets={override_text(list(allowed_targets))}"] if allowed_targets else []
    config_dirs = [each for folder in folders for each in ("--config-dir", folder)]
    return shlex.join(["python", "-m", "autotune", "train", f"experiment={experiment}", *allowed, *config_dirs])
