"""What stands in braces in a command: the space's keys, and what is the trial's own."""

import json
import shlex
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError
from autotune.files import make_folder, replace_file
from autotune.session import CONFIG_FILES
from autotune.yaml_files import yaml_text

OF_TRIAL = ("trial_folder", "trial_number", "devices", "config_file", "config_json")
"""Names in braces that are no keys of the space: the trial's folder, number and devices, and files
with all values of the space."""
"""Names of these files, in the trial's folder."""


def fields(template: str) -> list[str]:
    """The names in braces.

    Raises:
        ConfigError: the command cannot be split as a shell would, or what is in braces is no name.
    """
    reason = "names in braces look like --lr {lr}"
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        words = [word for name in names for word in name.replace("-", "_").split(".")]
        if shlex.split(template) and all(word.isidentifier() for word in words):
            return list(dict.fromkeys(names))
    except ValueError as error:
        reason = str(error)
    raise ConfigError(
        f"command: {template!r}: {reason}; double the command's own braces, such as"
        """ --config '{{"lr": {lr}}}'"""
    )


def filled(
    template: str, values: Mapping[str, Any], *, folder: Path, number: int, devices: int
) -> list[str]:
    """The parts of a command, with values for the names in braces.

    Args:
        values: the values of the space's keys, of which ``model.width`` stands beneath ``model``.
        folder: the trial's folder, which is made if it is named; files with all values that are
            named are written into it.
        number: the trial's number.
        devices: the number of its devices.
    """
    names, (config_file, config_json) = fields(template), (folder / name for name in CONFIG_FILES)
    if {"trial_folder", "config_file", "config_json"} & set(names):
        make_folder(folder)
    if "config_file" in names:
        replace_file(config_file, yaml_text(values))
    if "config_json" in names:
        replace_file(config_json, json.dumps(values, indent=2))
    of_trial = dict(zip(OF_TRIAL, (folder, number, devices, config_file, config_json), strict=True))
    return [_FIELDS.vformat(part, (), {**values, **of_trial}) for part in shlex.split(template)]


class _Fields(string.Formatter):
    """Fills in what is in braces; ``{model.depth}`` is a value of the mapping ``model``."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value = kwargs
        for part in field_name.split("."):
            value = value[part]
        return value, field_name


_FIELDS = _Fields()
