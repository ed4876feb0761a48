"""Values that an experiment sets inside a config group belong to the option that it chose with them.

An experiment that picks ``optimizer: sgd`` and sets ``optimizer.momentum``, as every exported one does, would otherwise hand
its momentum to any other optimizer that a search, or the command line, puts in its place. This is where autotune's composing
differs from Hydra's: a training's group of another option starts from that option's own file. What the command line sets stays.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from autotune.config.schema import STUDY_KEYS

Compose = Callable[[list[str]], DictConfig]
"""Hydra's composing of a list of overrides, Hydra's own node included."""


def keep_own_values(config: DictConfig, overrides: Sequence[Override], stated_keys: frozenset[str], compose_files: Compose) -> None:
    """Take out of a composed configuration what its experiment set for options that it does not have any more.

    Args:
        stated_keys: the top-level keys that stand in the experiment's own files.
    """
    chosen = group_choices(config)
    experiment = [str(each.input_line) for each in overrides if each.key_or_group == "experiment"]
    chosen_anew = {each.key_or_group for each in overrides} & set(chosen)
    doubtful = [group for group in chosen_anew if group.split("/")[0] in stated_keys - STUDY_KEYS]
    if not experiment or not doubtful:
        return
    stated = group_choices(compose_files(experiment))
    for group in doubtful:
        other, path = chosen[group], group.replace("/", ".")
        if stated.get(group) in (None, other):
            continue
        OmegaConf.update(config, path, OmegaConf.select(compose_files([f"{group}={other}"]), path), merge=False)
        for each in overrides:
            if each.key_or_group.startswith(f"{path}."):
                OmegaConf.update(config, each.key_or_group, each.value(), merge=True, force_add=each.is_add())


def drop_values_of_another_target(
    config: DictConfig, stated_keys: frozenset[str], option_content: Callable[[str, str], dict[str, Any]]
) -> None:
    """Take out the values of an option's file where another ``_target_`` was put in its place: they are that one's arguments.

    Args:
        stated_keys: keys that the experiment or the command line says itself, which stay.
        option_content: what stands in the file of a group's option.
    """
    for group, option in group_choices(config).items():
        target = OmegaConf.select(config, f"{group}._target_") if group != "experiment" else None
        if target is None or f"{group}._target_" not in stated_keys:
            continue
        own = option_content(group, option)
        if own.get("_target_") not in (None, target):
            OmegaConf.set_struct(config[group], False)
            for key in set(own) - {"_target_"}:
                if f"{group}.{key}" not in stated_keys:
                    config[group].pop(key, None)


def group_choices(config: DictConfig) -> dict[str, str]:
    """Config group -> name of the chosen file, Hydra's own groups left out."""
    return {str(key): value for key, value in config.hydra.runtime.choices.items() if not str(key).startswith("hydra/")}
