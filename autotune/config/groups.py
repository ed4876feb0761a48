"""What another option of a config group changes in a configuration: where autotune differs from
Hydra, and where it does without Hydra.

In Hydra, an experiment that chooses ``optimizer: sgd`` and sets ``optimizer.momentum``, as every
exported one does, would pass its momentum on to any other optimizer that a search or the command
line chooses. Here, a group of the training with another option starts from that option's own file,
and values from the command line stay (``keep_own_values``, ``drop_values_of_another_target``).

Hydra takes some 100 ms for a configuration, while a device waits. ``ComposedOptions`` has it
compose each option of a group once and puts the options of a suggestion together. This is correct
if an option's file changes only keys beneath its own group, as almost all do; the others, which set
values elsewhere or choose options of other groups, are left to Hydra.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from autotune.config.schema import STUDY_KEYS
from autotune.errors import ConfigError

Choices: TypeAlias = dict[str, str]
"""Name of the chosen option, by config group."""


def group_choices(config: DictConfig) -> Choices:
    """Name of the chosen option by config group, without Hydra's own groups."""
    return {
        str(key): value
        for key, value in config.hydra.runtime.choices.items()
        if not str(key).startswith("hydra/")
    }


def keep_own_values(
    config: DictConfig,
    overrides: Sequence[Override],
    stated_keys: frozenset[str],
    compose_files: Callable[[list[str]], DictConfig],
) -> None:
    """Remove from a composed configuration the values that its experiment set inside groups whose
    option was replaced since.

    Args:
        overrides: all overrides that the configuration was composed with; the values that they set
            inside those groups stay.
        stated_keys: top-level keys in the experiment's own files.
        compose_files: composes a list of overrides with Hydra; its result includes Hydra's own
            node.
    """
    chosen = group_choices(config)
    experiment = [
        str(override.input_line) for override in overrides if override.key_or_group == "experiment"
    ]
    overridden = {override.key_or_group for override in overrides} & set(chosen)
    candidates = [group for group in overridden if group.split("/")[0] in stated_keys - STUDY_KEYS]
    if not experiment or not candidates:
        return
    experiment_choices = group_choices(compose_files(experiment))
    for group in candidates:
        option, path = chosen[group], _path(group)
        if experiment_choices.get(group) in (None, option):
            continue
        _copy_node(compose_files([f"{group}={option}"]), config, path)
        for override in overrides:
            if override.key_or_group.startswith(f"{path}."):
                OmegaConf.update(
                    config,
                    override.key_or_group,
                    override.value(),
                    merge=True,
                    force_add=override.is_add(),
                )


def drop_values_of_another_target(
    config: DictConfig,
    stated_keys: frozenset[str],
    option_content: Callable[[str, str], dict[str, Any]],
) -> None:
    """Remove the values of an option's file if its ``_target_`` was replaced, since they are
    arguments of the old target.

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


class ComposedOptions:
    """Configurations of the command line with some options of config groups replaced, in which each
    option is composed once.

    Args:
        compose: composes the command line and further overrides; its result includes Hydra's own
            node.
    """

    def __init__(self, compose: Callable[[tuple[str, ...]], DictConfig]) -> None:
        self._compose = compose
        self._composed: dict[tuple[str, ...], tuple[DictConfig, Choices]] = {}
        self._is_separate: dict[str, bool] = {}

    def composed(self, overrides: tuple[str, ...] = ()) -> tuple[DictConfig, Choices]:
        """Fresh copy of the configuration with these overrides, without Hydra's own node, and the
        chosen option of each group.

        Raises:
            ConfigError: the overrides do not compose.
        """
        if overrides not in self._composed:
            config = self._compose(overrides)
            self._composed[overrides] = (
                OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]),
                group_choices(config),
            )
        config, choices = self._composed[overrides]
        copied = config.copy()
        OmegaConf.set_struct(copied, True)  # unknown keys are refused, as by Hydra
        return copied, choices

    def combined(self, options: Mapping[str, str]) -> tuple[DictConfig, Choices]:
        """Same result as ``composed`` for one override a group, but Hydra is not called if each
        option changes only its own group.

        Args:
            options: the override that chooses the option, by group.

        Raises:
            ConfigError: the overrides do not compose.
        """
        is_nested = any(group.startswith(f"{other}/") for group in options for other in options)
        if (
            len(options) < 2
            or is_nested
            or not all(self._changes_only(group, override) for group, override in options.items())
        ):
            return self.composed(tuple(options.values()))
        config, choices = self.composed()
        choices = dict(choices)
        for group, override in options.items():
            option, option_choices = self._composed[(override,)]
            _copy_node(option, config, _path(group))
            choices[group] = option_choices[group]
        return config, choices

    def _changes_only(self, group: str, override: str) -> bool:
        """Whether choosing an option of a group changes only the keys beneath that group."""
        if override not in self._is_separate:
            # @: another key than its name
            self._is_separate[override] = "@" not in group and self._is_equal_outside(
                group, override
            )
        return self._is_separate[override]

    def _is_equal_outside(self, group: str, override: str) -> bool:
        try:
            (config, choices), (other, other_choices) = self.composed(), self.composed((override,))
        except ConfigError:  # the option may compose beside another one
            return False
        return {**choices, group: ""} == {**other_choices, group: ""} and _without(
            config, group
        ) == _without(other, group)


def _path(group: str) -> str:
    return group.replace("/", ".")


def _copy_node(source: DictConfig, target: DictConfig, path: str) -> None:
    OmegaConf.update(target, path, OmegaConf.select(source, path), merge=False)


def _without(config: DictConfig, group: str) -> Any:
    """The configuration as plain data, without the keys beneath a group."""
    plain = OmegaConf.to_container(config, resolve=False)
    holder: Any = plain
    *parents, last = _path(group).split(".")
    for part in parents:
        holder = holder.get(part) if isinstance(holder, dict) else None
    if isinstance(holder, dict):
        holder.pop(last, None)
    return plain
