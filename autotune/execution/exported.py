"""What a study exports: the winner as an experiment file that runs by name, and as a program
without autotune, or as a call of the user's own function.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.config.compose import Composed, Composer
from autotune.config.schema import TrialConfig, first_difference
from autotune.errors import ConfigError
from autotune.files import replace_file
from autotune.yaml_files import yaml_text

SCRIPT, ARGUMENTS = "best.py", "best_arguments.yaml"
"""Names, in a study's folder, of the winner as a program, and as arguments of the user's own
function; a study has at most one."""


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
    if difference := first_difference(trained.as_dict(), exported.as_dict()):
        raise ConfigError(
            f"best.yaml: {difference}; the trial's configuration cannot be written as an experiment"
        )


def compose_exported(
    text: str, config_dirs: Sequence[str], allowed_targets: Sequence[str]
) -> Composed:
    """Compose the text of an exported experiment, with the folders and allowed targets of its
    study.
    """
    allowed = [f"allowed_targets={list(allowed_targets)}"] if allowed_targets else []
    return Composer(
        ["experiment=autotune_exported", *allowed],
        config_dirs,
        experiments={"autotune_exported": text},
    ).compose()


def write_program(
    folder: Path, config: TrialConfig, best_yaml: str, *, num_threads: int
) -> str | None:
    """Write the winner into a study's folder as a program that needs no autotune, with the comments
    of ``best.yaml`` on where it comes from, or as the arguments of the user's own function.

    Returns:
        Why there is no program; None where one was written, or where the function is the user's
        own.
    """
    for name in (SCRIPT, ARGUMENTS):
        (folder / name).unlink(missing_ok=True)
    if config.training is not None:
        function = str(config.training["_target_"]).rpartition(".")[2]
        arguments = {
            name: value for name, value in config.training.items() if not name.startswith("_")
        }
        replace_file(folder / ARGUMENTS, arguments_yaml(function, arguments, study=folder.name))
        return None
    # imports all that trains, needed only at the end
    from autotune.training.standalone import standalone_script  # noqa: PLC0415

    comments = re.findall(r"^# (?!@package|Format )(.*)", best_yaml, re.MULTILINE)
    try:
        text = standalone_script(config, num_threads=num_threads, comments=comments)
    except ConfigError as error:
        return str(error)
    replace_file(folder / SCRIPT, text)
    return None


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
