"""Values that an experiment sets inside a config group belong to the option that it chose with them.

An experiment that picks ``optimizer: sgd`` and sets ``optimizer.momentum``, as every exported one does, would otherwise hand
its momentum to any other optimizer that a search, or the command line, puts in its place. This is where autotune's composing
differs from Hydra's: a training's group of another option starts from that option's own file. What the command line sets stays.
"""

from collections.abc import Callable, Sequence

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from autotune.config.schema import STUDY_KEYS

Compose = Callable[[list[str]], DictConfig]
"""Hydra's composing of a list of overrides, Hydra's own node included."""


def keep_own_values(config: DictConfig, overrides: Sequence[Override], compose_files: Compose) -> None:
    """Take out of a composed configuration what its experiment set for options that it does not have any more."""
    experiment = [str(each.input_line) for each in overrides if each.key_or_group == "experiment"]
    chosen = group_choices(config)
    if not experiment or all(each.key_or_group == "experiment" or each.key_or_group not in chosen for each in overrides):
        return
    stated = compose_files(experiment)
    options = {group: option for group, option in group_choices(stated).items() if option and group.split("/")[0] not in STUDY_KEYS}
    left = [group for group, option in options.items() if chosen.get(group) not in (None, option)]
    if not left:
        return
    untouched = compose_files([f"{group}={option}" for group, option in options.items()])
    for group in left:
        other, path = chosen[group], group.replace("/", ".")
        if OmegaConf.select(stated, path) == OmegaConf.select(untouched, path):
            continue  # the experiment sets nothing in it
        OmegaConf.update(config, path, OmegaConf.select(compose_files([f"{group}={other}"]), path), merge=False)
        for each in overrides:
            if each.key_or_group.startswith(f"{path}."):
                OmegaConf.update(config, each.key_or_group, each.value(), merge=True, force_add=each.is_add())


def group_choices(config: DictConfig) -> dict[str, str]:
    """Config group -> name of the chosen file, Hydra's own groups left out."""
    return {str(key): value for key, value in config.hydra.runtime.choices.items() if not str(key).startswith("hydra/")}
