"""The files of the shipped and the user's own configuration folders, and what Hydra composes from
them.

Everything that calls Hydra's ``compose`` is here. Hydra's global state is the caller's again
afterwards. A file of the user's own may come from anyone: Hydra reads it through
``autotune.config.user_files``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from autotune.config.experiments import bases, named_files, shipped_folder
from autotune.config.groups import drop_values_of_another_target, group_choices, keep_own_values
from autotune.config.messages import composing_message, value_message
from autotune.config.overrides import parse_override
from autotune.config.user_files import (
    SAID_BY_COMMAND,
    content_of_text,
    leaves_folder,
    location_of,
    register_user_files,
)
from autotune.errors import ConfigError
from autotune.remote import refuse_url, user_path
from autotune.yaml_files import read_yaml


class ConfigFiles:
    """The shipped configuration folder and the user's own ones.

    Args:
        experiments: texts of further experiments, which lie in no file, by name.

    Raises:
        ConfigError: a folder does not exist or is a URL, or a text is not accepted as an
            experiment.
    """

    def __init__(
        self, config_dirs: Sequence[str], experiments: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        for config_dir in config_dirs:
            refuse_url(config_dir, "--config-dir")
            if not user_path(config_dir).is_dir():
                raise ConfigError(f"--config-dir {config_dir}: no such folder")
        self.config_dirs = tuple(user_path(config_dir).resolve() for config_dir in config_dirs)
        self._folders = (shipped_folder("conf"), *self.config_dirs)
        self._experiments = {
            name: content_of_text(text, f"experiment {name}") for name, text in experiments.items()
        }
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Compose with Hydra, and apply autotune's rules for groups whose option was replaced
        (``autotune.config.groups``).

        Returns:
            The configuration with Hydra's own node.

        Raises:
            ConfigError: an override or a file is wrong; names the key or file, what was found and
                what is accepted.
        """
        parsed = [parse_override(text) for text in overrides]
        for override in parsed:
            if override.key_or_group == "hydra.searchpath":
                raise ConfigError(f"{override.input_line}: accepted is --config-dir DIR")
            self._check_choice(override)
        config = self._compose(overrides)
        try:
            self._check_who_says(config, parsed)
            choices = group_choices(config)
            stated = self._stated_keys(choices.get("experiment"))
            keep_own_values(config, parsed, stated, self._compose_once)
            drop_values_of_another_target(
                config, stated | {override.key_or_group for override in parsed}, self.content
            )
        except OmegaConfBaseException as error:
            raise ConfigError(value_message(error)) from error
        self._check_names(choices)
        return config

    def content(self, group: str, option: str) -> dict[str, Any]:
        """Content of an option's own file, without the files that it builds on.

        Empty if there is no such file.
        """
        if group == "experiment" and option in self._experiments:
            return self._experiments[option]
        path = next(
            (
                path
                for folder in self._folders
                if (path := folder / group / f"{option}.yaml").is_file()
            ),
            None,
        )
        content = read_yaml(path) if path else None
        return content if isinstance(content, dict) else {}

    def _stated_keys(self, experiment: str | None) -> frozenset[str]:
        """Keys of the top two levels in an experiment's own file, and in the files of the
        experiments in its defaults list.
        """
        keys: set[str] = set()
        waiting = [(experiment, "experiment")] if experiment else []
        while waiting:
            name, folder = waiting.pop()
            content = self.content("experiment", name)
            keys |= set(content) | {
                f"{key}.{inner}"
                for key, value in content.items()
                if isinstance(value, dict)
                for inner in value
            }
            waiting += bases(content, folder)
        return frozenset(keys)

    def _compose_once(self, overrides: list[str]) -> DictConfig:
        """Cached result of ``_compose``, which callers must not change."""
        key = tuple(overrides)
        if key not in self._composed:
            self._composed[key] = self._compose(overrides)
        return self._composed[key]

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        try:
            with hydra_set_up(self._experiments):
                return compose("config", [*overrides, *self._search_path], return_hydra_config=True)
        except RecursionError as error:
            raise ConfigError(
                f"{' '.join(overrides)}: its files or values refer to each other without end"
            ) from error
        except (
            HydraException,
            OmegaConfBaseException,
            yaml.YAMLError,
            OSError,
            ValueError,
        ) as error:
            raise ConfigError(
                composing_message(
                    error, overrides, lambda: self._known_keys(overrides), self._options
                )
            ) from error
        # Hydra takes some files apart without a check
        except (AssertionError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{' '.join(overrides)}: Hydra cannot compose this: {' '.join(str(error).split())}"
            ) from error

    @property
    def _search_path(self) -> list[str]:
        """Override that has Hydra look for files in the user's folders, too.

        None if there are none.
        """
        paths = ",".join(
            "'" + location_of(folder).replace("'", "\\'") + "'" for folder in self.config_dirs
        )
        return [f"hydra.searchpath=[{paths}]"] if paths else []

    def _known_keys(self, overrides: Sequence[str]) -> list[str]:
        """Every key of the chosen options, groups included.

        Of the shipped default configuration where they cannot be composed.
        """
        options = [
            text
            for text in overrides
            if any(
                (folder / text.partition("=")[0].lstrip("+")).is_dir() for folder in self._folders
            )
        ]
        try:
            return _keys_of((*options, *self._search_path))
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError):
            return _keys_of(())

    def _check_who_says(self, config: DictConfig, parsed: Sequence[Override]) -> None:
        """Refuse a value from an experiment's files for a key that only the command line, or an
        option that it chooses, may set.
        """
        keys = {override.key_or_group for override in parsed}
        said = [
            key
            for key, default in SAID_BY_COMMAND.items()
            if key not in keys and _unresolved(config, key) not in (None, default)
        ]
        if not said:
            return
        ways = {part for key in said for part in (key, key.partition(".")[0])}
        without_experiment = self._compose_once(
            [str(override.input_line) for override in parsed if override.key_or_group in ways]
        )
        for key in said:
            if _unresolved(config, key) != _unresolved(without_experiment, key):
                raise ConfigError(
                    f"{key}: found a value in an experiment's files; accepted is {key}=VALUE on the"
                    " command line: an experiment can come from anyone, and this key says where"
                    " files are written or who is sent what"
                )

    def _check_choice(self, override: Override) -> None:
        """Refuse an override of a config group that is no name.

        Hydra would merge the options of a list into one of no meaning.
        """
        group = override.key_or_group
        if not any((folder / group).is_dir() for folder in self._folders):
            return
        value = override.value()
        if isinstance(value, list):
            options = self._options(group)
            raise ConfigError(
                f"{override.input_line}: found a list, accepted is one of {', '.join(options)}; to"
                f" search over several, list them in a search space ({group}: [A, B]) or write"
                f" {group}=choice(A,B)"
            )
        if not isinstance(value, str | dict) or (isinstance(value, str) and leaves_folder(value)):
            raise ConfigError(
                f"{override.input_line}: accepted is GROUP=NAME with the name of one of the group's"
                " files"
            )

    def _options(self, group: str) -> list[str]:
        return sorted({name for folder in self._folders for name, _ in named_files(folder / group)})

    def _check_names(self, choices: Mapping[str, str]) -> None:
        """Refuse a user's option with the name of a shipped one, which Hydra takes in its place,
        if their files differ.
        """
        for group, option in choices.items():
            shipped, *own_files = (folder / group / f"{option}.yaml" for folder in self._folders)
            for own in own_files:
                if own.is_file() and shipped.is_file() and own.read_bytes() != shipped.read_bytes():
                    raise ConfigError(
                        f"{group}={option}: autotune ships a file of this name, which hides {own};"
                        " accepted is another name"
                    )


@contextmanager
def hydra_set_up(
    experiments: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Iterator[None]:
    """Context in which Hydra's global state is set up for the shipped configuration.

    Afterwards the caller's state is restored.

    Args:
        experiments: content of experiments that lie in no file, by name.
    """
    saved = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        register_user_files()
        for name, content in experiments.items():
            ConfigStore.instance().store(
                name, dict(content), group="experiment", package="_global_"
            )
        with initialize_config_dir(str(shipped_folder("conf")), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().clear()
        GlobalHydra.instance().hydra = saved
        for name in experiments:
            ConfigStore.instance().repo["experiment"].pop(f"{name}.yaml", None)


def _unresolved(config: DictConfig, key: str) -> Any:
    group, _, last = key.rpartition(".")
    node = OmegaConf.select(config, group, throw_on_resolution_failure=False) if group else config
    if not isinstance(node, DictConfig):
        return None
    # the only way to a value as it is written
    value = node._get_node(last, validate_access=False)  # noqa: SLF001
    return value._value() if isinstance(value, Node) else value  # noqa: SLF001


@cache
def _keys_of(overrides: tuple[str, ...]) -> list[str]:
    """Every key of what Hydra composes for these overrides, groups included."""
    with hydra_set_up():
        return list(_flat_keys(OmegaConf.to_container(compose("config", [*overrides]))))


def _flat_keys(value: Any, prefix: str = "") -> Iterator[str]:
    for key, inner in value.items():
        yield f"{prefix}{key}"
        if isinstance(inner, Mapping):
            yield from _flat_keys(inner, f"{prefix}{key}.")
