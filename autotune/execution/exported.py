"""What a study exports: the winner as an experiment file that runs by name, and as a call of the
user's own function; and its weights, which are those of the first confirmation run of the best
configuration that reached the target.

Workers write weights into the study's folder if their machine has that folder. The first weights of
each configuration are kept until the best one is known; its weights are kept as long as the study.
"""

import contextlib
import os
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.command_template import filled
from autotune.config.compose import Composed, Composer
from autotune.config.schema import TrialConfig, first_difference
from autotune.errors import ConfigError
from autotune.files import FORMAT, replace_file, replacing
from autotune.measurement import TrialResult
from autotune.outcome import Outcome
from autotune.redaction import MARK, without_secrets_in
from autotune.space import Suggestion
from autotune.yaml_files import yaml_text

WEIGHTS = "best.safetensors"
_WEIGHTS_FOLDER = ".weights"


def exported_experiment(
    composer: Composer, suggestion: Suggestion, seed: int, comments: Sequence[str]
) -> tuple[str, TrialConfig]:
    """Text of the experiment file of a suggestion, and what it composes to, which is checked to be
    the suggestion's own configuration.

    Args:
        comments: lines on where the experiment comes from.

    Raises:
        ConfigError: the configuration cannot be written as an experiment.
    """
    content = composer.experiment_of(suggestion, seed=seed)
    lines = [*comments, f"Format {FORMAT}."]
    text = experiment_yaml(content, lines)
    exported = compose_exported(text, [*map(str, composer.config_dirs)], composer.allowed_targets)
    check_exported(exported.trial, composer.compose_suggestion(suggestion, seed=seed).trial)
    if (shown := without_secrets_in(content)) != content:
        hidden = f"{MARK} stands for a secret that is kept nowhere: give it in its place"
        text = experiment_yaml(shown, [*lines, hidden])
    return text, exported.trial


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


def write_arguments(
    folder: Path, config: TrialConfig, *, number: int = 0, searched: Collection[str] = ()
) -> None:
    """Write ``best_arguments.yaml``, the winner as the arguments of the user's own function or
    command, into a study's folder. A winner of autotune's own loop has none.

    Args:
        number: the winner's number among the trials.
        searched: the keys of the search space.
    """
    if config.training is None:
        return
    arguments = {key: config.training[key] for key in config.training if key[0] != "_"}
    function = str(config.training["_target_"]).rpartition(".")[2]
    call = None
    if config.is_command:
        command = arguments.pop("command")
        devices = config.num_workers
        parts = filled(command, arguments, folder=folder / "best", number=number, devices=devices)
        arguments, call = _flat(arguments), shlex.join(parts)
    if config.num_workers > 1 or "parallelism.num_workers" in searched:
        arguments["devices"] = config.num_workers
    text = arguments_yaml(function, arguments, study=folder.name, call=call)
    replace_file(folder / "best_arguments.yaml", text)


def arguments_yaml(
    function: str, arguments: Mapping[str, Any], *, study: str, call: str | None = None
) -> str:
    """YAML of the arguments of a training of the user's own, with its call in Python, or the
    command, as a comment.

    Args:
        function: name of the function.
        arguments: its arguments by name.
        study: name of the study that found them.
        call: the command; None for a function.
    """
    if call is None:
        named = {name: value for name, value in arguments.items() if name.isidentifier()}
        values = [f"{name}={value!r}" for name, value in named.items()]
        if others := {name: arguments[name] for name in arguments if name not in named}:
            values.append(f"**{others!r}")
        call = f"{function}({', '.join(values)})"
    return f"# Best of study {study}: {' '.join(call.splitlines())}\n{yaml_text(dict(arguments))}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values with the keys of those beneath them, as ``model.width``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_group = isinstance(value, Mapping) and value
        flat |= _flat(value, f"{prefix}{key}.") if is_group else {f"{prefix}{key}": value}
    return flat


def run_weights_path(study_folder: Path, run: str) -> Path:
    """File that a confirmation run leaves its weights in."""
    return study_folder / _WEIGHTS_FOLDER / f"{run}.safetensors"


def keep_first_weights(study_folder: Path, run: str, result: TrialResult) -> None:
    """Keep the weights of a run that ended if no run of its configuration that reached the target
    has left any yet, else delete them.
    """
    run_weights = run_weights_path(study_folder, run)
    kept = _weights_path(study_folder, result.trial)
    # the run ended early, or on a machine without this folder
    with contextlib.suppress(FileNotFoundError):
        if result.outcome is Outcome.REACHED and not kept.exists():
            run_weights.replace(kept)
        else:
            run_weights.unlink()


def keep_best_weights(study_folder: Path, best_trial: int) -> None:
    """Name the best configuration's weights ``best.safetensors``, if a worker could write them, and
    delete those of all others.
    """
    best, kept = study_folder / WEIGHTS, _weights_path(study_folder, best_trial)
    best.unlink(missing_ok=True)
    for path in (study_folder / _WEIGHTS_FOLDER).glob("*.safetensors"):
        if path != kept:
            path.unlink()
    if kept.is_file():
        try:
            os.link(kept, best)
        except OSError:  # the file system has no hard links
            with replacing(best) as part:
                shutil.copyfile(kept, part)


def exported_model(study_folder: Path, allowed_targets: tuple[str, ...]) -> tuple[Any, Any]:
    """The exported weights in their model, as ``autotune.training.trained_model.scored_model``
    makes it.

    Raises:
        ConfigError: the model cannot be made.
        DataError: there are no weights, or they are those of a training function of the user's own.
    """
    # imports torch, which only the tracker that keeps models needs
    from autotune.training.trained_model import scored_model  # noqa: PLC0415

    return scored_model(study_folder / WEIGHTS, allowed_targets)


def _weights_path(study_folder: Path, trial: int) -> Path:
    return study_folder / _WEIGHTS_FOLDER / f"trial-{trial}.safetensors"
