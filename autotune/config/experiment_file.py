"""Writing an experiment file: what a study found, as a configuration that runs by name."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.space import override_text


def experiment_yaml(*, base: str, groups: Mapping[str, str], values: Mapping[str, Any], comments: Sequence[str]) -> str:
    """An experiment that is ``base`` with other group choices and values.

    Args:
        base: the experiment it starts from, by name.
        groups: config group -> file of it.
        values: config key -> value.
        comments: lines that say where it came from.
    """
    defaults: list[Any] = [base, *({f"override /{group}": option} for group, option in groups.items()), "_self_"]
    content = {"defaults": defaults, **_nested(values)}
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
