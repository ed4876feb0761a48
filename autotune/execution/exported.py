"""What a study exports besides ``best.yaml``: the winner as a program without autotune, or as a
call of the user's own function.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from autotune.config.compose import Composed, Composer
from autotune.config.experiment_file import arguments_yaml, function_arguments
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.files import replace_file

SCRIPT, ARGUMENTS = "best.py", "best_arguments.yaml"
"""Names, in a study's folder, of the winner as a program, and as arguments of the user's own
function; a study has at most one."""


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
        name = str(config.training["_target_"]).rpartition(".")[2]
        text = arguments_yaml(name, function_arguments(config.training), study=folder.name)
        replace_file(folder / ARGUMENTS, text)
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
