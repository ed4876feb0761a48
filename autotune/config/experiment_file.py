"""Writes a configuration that a study found as an experiment file, which runs by name."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.space import override_text
from autotune.yaml_files import yaml_text


def experiment_yaml(content: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Text of an experiment's file.

    Args:
        comments: lines on where the experiment comes from.
    """
    header = "\n".join(
        ["# @package _global_", *(f"# {' '.join(line.split())}" for line in comments)]
    )
    return f"{header}\n{yaml_text(dict(content), default_flow_style=None, width=120)}"


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
