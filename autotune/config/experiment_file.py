"""Writes a configuration that a study found as an experiment file, which runs by name."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.config.experiments import absolute_default
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.space import override_text
from autotune.yaml_files import yaml_text


def experiment_yaml(
    *,
    base: str,
    base_content: Mapping[str, Any],
    groups: Mapping[str, str],
    values: Mapping[str, Any],
    comments: Sequence[str],
) -> str:
    """YAML of an experiment that differs from the experiment ``base`` in group options and values.

    The new file only points to ``base`` in its defaults list, unless ``base`` sets values inside a
    group that gets another option: Hydra would carry those values into the new option. The file
    then contains a copy of all other content of ``base`` instead, and so it does if ``base`` is in
    a folder and names files from ``experiment``, which it would name from that folder if another
    file named it.

    Args:
        base: name of the experiment to start from.
        base_content: content of the base's file.
        groups: new options, by config group.
        values: new values, by config key, as OmegaConf is to hold them.
        comments: lines on where the experiment comes from.
    """
    overrides = [{f"override /{group}": option} for group, option in groups.items()]
    given = base_content.get("defaults", [])
    defaults = [absolute_default(entry, "experiment") for entry in given]
    if any(group.partition("/")[0] in base_content for group in groups) or (
        "/" in base and defaults != given
    ):
        base_defaults = [
            entry for entry in defaults if entry != "_self_" and not _chooses(entry, groups)
        ]
        kept = {
            key: value
            for key, value in base_content.items()
            if key != "defaults" and key not in groups
        }
        content = {
            "defaults": [*base_defaults, *overrides, "_self_"],
            **_merged(kept, _nested(values)),
        }
    else:
        content = {"defaults": [f"/experiment/{base}", *overrides, "_self_"], **_nested(values)}
    header = "\n".join(
        ["# @package _global_", *(f"# {' '.join(line.split())}" for line in comments)]
    )
    return f"{header}\n{yaml_text(content, default_flow_style=None, width=120)}"


def arguments_yaml(function: str, arguments: Mapping[str, Any], *, study: str) -> str:
    """YAML of the arguments of a training function of the user's own, with its call in Python as a
    comment.

    Args:
        function: name of the function.
        arguments: its arguments by name.
        study: name of the study that found them.
    """
    call = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return (
        f"# Best of study {study}:"
        f" {function}({' '.join(call.splitlines())})\n{yaml_text(dict(arguments))}"
    )


def function_arguments(training: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the training function that a node ``training`` names, without the node's own
    keys.
    """
    return {name: value for name, value in training.items() if not name.startswith("_")}


def check_exported(exported: TrialConfig, trained: TrialConfig) -> None:
    """Check that an exported experiment, composed again, is the configuration that was trained.

    Raises:
        ConfigError: the two differ; names the first key that does, with both values.
    """
    found, wanted = exported.as_dict(), trained.as_dict()
    for key, value in wanted.items():
        if found[key] != value and repr(found[key]) != repr(value):  # NaN is unequal to itself
            raise ConfigError(
                f"best.yaml: {key}: composes to {override_text(found[key])}, the trial had"
                f" {override_text(value)}; its configuration cannot be written as an experiment"
            )


def _chooses(entry: Any, groups: Mapping[str, str]) -> bool:
    """Whether an entry of a defaults list chooses the option of one of the groups."""
    return isinstance(entry, Mapping) and any(
        str(key).removeprefix("override ").strip("/") in groups for key in entry
    )


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings; values of ``other`` win."""
    both = {
        key: _merged(one[key], other[key])
        for key in one
        if isinstance(one[key], Mapping) and isinstance(other.get(key), Mapping)
    }
    return {**one, **other, **both}


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dotted keys into nested mappings."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.replace("/", ".").split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return nested


def train_command(experiment: str, folders: Sequence[str], allowed_targets: Sequence[str]) -> str:
    """Shell command that trains an experiment once, with all flags and overrides that composing it
    needs.

    Args:
        folders: the user's own configuration folders.
        allowed_targets: packages that ``_target_`` may name besides autotune's own list.
    """
    allowed = [f"allowed_targets={override_text(list(allowed_targets))}"] if allowed_targets else []
    config_dirs = [part for folder in folders for part in ("--config-dir", folder)]
    return shlex.join(
        ["python", "-m", "autotune", "train", f"experiment={experiment}", *allowed, *config_dirs]
    )
