"""Drops the values that an experiment set inside a config group when another option of that group is chosen.

In Hydra, an experiment that chooses ``optimizer: sgd`` and sets ``optimizer.momentum``, as every exported one does, would pass its momentum
on to any other optimizer that a search or the command line chooses. This is where autotune's composing differs from Hydra's: a group of
the training with another option starts from that option's own file. Values from the command line stay.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from autotune.config.schema import STUDY_KEYS

Compose = Callable[[list[str]], DictConfig]
"""Function that composes a list of overrides with Hydra; its result includes Hydra's own node."""


def keep_own_values(config: DictConfig, overrides: Sequence[Override], stated_keys: frozenset[str], compose_files: Compose) -> None:
    """Remove from a composed configuration the values that its experiment set inside groups whose option was replaced since.

    Args:
        overrides: all overrides that the configuration was composed with; the values that they set inside those groups stay.
        stated_keys: top-level keys in the experiment's own files.
    """
    chosen = group_choices(config)
    experiment = [str(override.input_line) for override in overrides if override.key_or_group == "experiment"]
    overridden = {override.key_or_group for override in overrides} & set(chosen)
    candidates = [group for group in overridden if group.split("/")[0] in stated_keys - STUDY_KEYS]
    if not experiment or not candidates:
        return
    experiment_choices = group_choices(compose_files(experiment))
    for group in candidates:
        option, path = chosen[group], group.replace("/", ".")
        if experiment_choices.get(group) in (None, option):
            continue
        OmegaConf.update(config, path, OmegaConf.select(compose_files([f"{group}={option}"]), path), merge=False)
        for override in overrides:
            if override.key_or_group.startswith(f"{path}."):
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=override.is_add())


def drop_values_of_another_target(
    config: DictConfig, stated_keys: frozenset[str], option_content: Callable[[str, str], dict[str, Any]]
) -> None:
    """Remove the values of an option's file if its ``_target_`` was replaced, since they are arguments of the old target.

    Args:
        stated_keys: keys that the experiment or the command line sets; these stay.
        option_content: gives the content of an option's file, by group and option.
    """
    for group, option in group_choices(config).items():
        target = OmegaConf.select(config, f"{group}._target_") if group != "experiment" else None
        if target is None or f"{group}._target_" not in stated_keys:
            continue
        content = option_content(group, option)
        if content.get("_target_") not in (None, target):
            OmegaConf.set_struct(config[group], False)
            for key in set(content) - {"_target_"}:
                if f"{group}.{key}" not in stated_keys:
                    config[group].pop(key, None)


def group_choices(config: DictConfig) -> dict[str, str]:
    """Name of the chosen option by config group, without Hydra's own groups."""
    return {str(key): value for key, value in config.hydra.runtime.choices.items() if not str(key).startswith("hydra/")}
