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


def script_text(config: TrialConfig, best_yaml: str, *, num_threads: int) -> str:
    """The winner as a program that needs no autotune, with the comments of ``best.yaml`` on where
    it comes from.

    Raises:
        ConfigError: a program cannot express the configuration; names the key.
    """
    # imports all that trains, needed only at the end
    from autotune.training.standalone import standalone_script  # noqa: PLC0415

    comments = [
        line.removeprefix("# ")
        for line in best_yaml.splitlines()
        if re.match(r"# (?!@package|Format )", line)
    ]
    return standalone_script(config, num_threads=num_threads, comments=comments)


def arguments_text(config: TrialConfig, *, study: str) -> str:
    """The winner as the arguments of the user's own training function: as YAML, and in a comment as
    a call.

    Raises:
        ConfigError: the study trains by autotune's own loop.
    """
    if config.training is None:
        raise ConfigError(
            "arguments: the study tunes no training function of one's own; accepted is script=FILE"
        )
    name = str(config.training["_target_"]).rpartition(".")[2]
    return arguments_yaml(name, function_arguments(config.training), study=study)


def write_program(
    folder: Path, config: TrialConfig, best_yaml: str, *, num_threads: int
) -> str | None:
    """Write the winner into a study's folder as a program, or as the arguments of the user's own
    function.

    Returns:
        Why there is no program; None where one was written, or where the function is the user's
        own.
    """
    for name in (SCRIPT, ARGUMENTS):
        (folder / name).unlink(missing_ok=True)
    try:
        if config.training is None:
            name, text = SCRIPT, script_text(config, best_yaml, num_threads=num_threads)
        else:
            name, text = ARGUMENTS, arguments_text(config, study=folder.name)
    except ConfigError as error:
        return str(error)
    replace_file(folder / name, text)
    return None
