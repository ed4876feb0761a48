"""Composes the experiment, the command line and a suggestion into one checked, resolved
configuration.

Hydra composes, OmegaConf checks the result against the schema, and every ``_target_`` is checked
against the allow-list before anything is built from it. Every error of Hydra and OmegaConf is
turned into one line.

A suggestion is composed as Hydra would compose its overrides, but without calling Hydra each time,
which takes some 100 ms while a device waits: Hydra composes each option of a group once, and the
options of a suggestion are then combined (``autotune.config.groups``). A test checks that both ways
give the same configuration.
"""

import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from autotune.config.build import check_target_names
from autotune.config.config_files import ConfigFiles
from autotune.config.groups import Choices, ComposedOptions
from autotune.config.messages import value_message
from autotune.config.overrides import as_configured, parse_override
from autotune.config.schema import FIXED_KEYS, Config, TrialConfig
from autotune.config.sources import INHERITED_KEYS, Source, checkpoint_of
from autotune.errors import ConfigError, InvalidTrialError
from autotune.hiding import MARK, without_secrets_in
from autotune.remote import refuse_url, user_path
from autotune.space import Suggestion, override_text

_MAX_CACHED_POINTS = 64


@dataclass(frozen=True)
class Composed:
    """One resolved configuration, with the option chosen for each config group."""

    plain: Mapping[str, Any]
    """The whole configuration as nested plain data."""
    choices: Mapping[str, str]
    """Name of the chosen option, by config group."""

    @cached_property
    def config(self) -> Config:
        """The configuration as schema objects.

        Raises:
            ConfigError: the schema refuses a value, or a mandatory value is missing.
        """
        try:
            config = OmegaConf.to_object(OmegaConf.merge(_schema(), as_configured(self.plain)))
        except OmegaConfBaseException as error:
            raise ConfigError(value_message(error)) from error
        assert isinstance(config, Config)
        return config

    @cached_property
    def trial(self) -> TrialConfig:
        """The part of the configuration that one training needs."""
        return TrialConfig.from_dict(self.plain)

    def lookup(self, key: str) -> Any:
        """Value of a config key.

        For a config group, the name of its chosen option; None if there is no such key.
        """
        if key in self.choices:
            return self.choices[key]
        value: Any = self.plain
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value


class Composer:
    """Composes configurations from the shipped folder, the user's own folders, and a command line.

    Args:
        overrides: overrides of the command line.
        config_dirs: the user's own configuration folders.
        experiments: texts of further experiments, which lie in no file, by name.
        source_of: if the experiment is itself a source of another (``autotune.config.sources``),
            the chain of sources that ends with it.

    Raises:
        ConfigError: a folder does not exist or is a URL, an override does not parse or deletes a
            key, or a text is not accepted as an experiment.
    """

    def __init__(
        self,
        overrides: Sequence[str] = (),
        config_dirs: Sequence[str] = (),
        *,
        experiments: Mapping[str, str] = MappingProxyType({}),
        source_of: tuple[str, ...] = (),
    ) -> None:
        self.files = ConfigFiles(config_dirs, experiments)
        self.config_dirs = self.files.config_dirs
        parsed = [parse_override(text) for text in overrides]
        self.sweeps = {
            override.key_or_group: str(override.input_line).split("=", 1)[1]
            for override in parsed
            if override.is_sweep_override()
        }
        if "experiment" in self.sweeps:
            raise ConfigError(
                f"experiment={self.sweeps['experiment']}: accepted is one NAME; for a study of"
                " each, run the command twice"
            )
        self._keys = {override.key_or_group for override in parsed}
        self.allowed_targets = _allowed_targets(parsed)
        self.overrides = tuple(
            text
            for text, override in zip(overrides, parsed, strict=True)
            if not override.is_sweep_override() and override.key_or_group != "allowed_targets"
        )
        for override in parsed:
            if MARK in str(override.input_line):
                raise ConfigError(
                    f"{override.key_or_group}: found {MARK}, which stands for a secret that was not"
                    " shown; accepted is the secret itself, or ${oc.env:NAME}, which takes it"
                    " from the environment"
                )
            if override.is_delete():
                raise ConfigError(
                    f"{override.input_line}: a key cannot be taken out; accepted is key=value"
                )
        self.sources: dict[str, Source] = {}
        """Experiments that a technique of a composed configuration starts from, by name."""
        self._source_of = source_of
        self._options = ComposedOptions(
            lambda further: self.files.compose([*self.overrides, *further])
        )
        self._checked_options: dict[tuple[str, ...], tuple[bytes, Choices]] = {}
        """Configurations that passed the schema, pickled, by the options that a suggestion
        chooses; its values are set in a copy."""
        self._composed_points: dict[tuple[tuple[str, ...], int], Composed] = {}
        """The latest composed suggestions, by point and seed: checks and runs compose the same
        ones again."""

    def refuse_sweeps(self) -> None:
        """Refuse sweeps on the command line, for commands that run a single configuration.

        Raises:
            ConfigError: a key has a sweep; names the key.
        """
        if self.sweeps:
            raise ConfigError(
                f"{next(iter(self.sweeps))}: is a sweep; accepted is one value (autotune without a"
                " command searches over several)"
            )

    def compose(self, overrides: Sequence[str] = ()) -> Composed:
        """Compose the configuration of the command line with further overrides applied after it.

        Raises:
            ConfigError: a key or value is wrong; names the key, what was found and what is
                accepted.
        """
        config, choices = self._options.composed(tuple(overrides))
        return self._resolved(self._checked(config, choices), choices)

    def compose_suggestion(self, suggestion: Suggestion, *, seed: int) -> Composed:
        """Compose the configuration of one point of the search space; the latest points are cached.

        Raises:
            InvalidTrialError: the point cannot be composed, or no training can run its
                configuration.
        """
        known = self._composed_points.get((suggestion.key, seed))
        if known is not None:
            return known
        options, values = self.split(suggestion)
        groups = {key: f"{key}={override_text(option)}" for key, option in options.items()}
        try:
            config, choices = self._checked_copy(groups)
            for key, value in values.items():
                _set_value(config, key, value)
            config.seed = seed
            composed = self._resolved(config, choices)
            _ = composed.trial
        except ConfigError as error:
            raise InvalidTrialError(str(error)) from error
        except OmegaConfBaseException as error:
            raise InvalidTrialError(value_message(error)) from error
        if len(self._composed_points) >= _MAX_CACHED_POINTS:
            del self._composed_points[next(iter(self._composed_points))]
        self._composed_points[suggestion.key, seed] = composed
        return composed

    def split(self, suggestion: Suggestion) -> tuple[dict[str, str], dict[str, Any]]:
        """A point's options by config group, and its other values by key, as OmegaConf is to hold
        them.

        Values of the command line's sweeps stay as they were typed: ``choice('${oc.env:NAME}',b)``
        reads the environment.
        """
        groups = {key: value for key, value in suggestion.values.items() if self.is_group(key)}
        others = {key: value for key, value in suggestion.values.items() if key not in groups}
        return groups, {
            key: value if key in self.sweeps else as_configured(value)
            for key, value in others.items()
        }

    def is_group(self, key: str) -> bool:
        """Whether a key names a config group, so that its value is the name of an option."""
        return key in self._choices

    def sets(self, key: str) -> bool:
        """Whether the command line itself sets a key."""
        return key in self._keys

    @property
    def missing_sources(self) -> list[Source]:
        """The sources whose checkpoint does not exist yet."""
        return [source for source in self.sources.values() if not source.path.is_file()]

    def has_key(self, key: str) -> bool:
        """Whether the configuration of the command line has a value for a key."""
        absent = object()
        return OmegaConf.select(self._options.composed()[0], key, default=absent) is not absent

    def config_yaml(self, config_type: str, *, resolve: bool) -> str:
        """The composed configuration as YAML: ``job`` for autotune's part, ``hydra`` for Hydra's
        own part, ``all`` for both.
        """
        config = self.files.compose(self.overrides)
        if resolve:
            _ = self.compose()
            OmegaConf.resolve(config)
        hydra_part = OmegaConf.masked_copy(config, "hydra")
        job_part = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        shown = OmegaConf.to_container(
            {"job": job_part, "hydra": hydra_part, "all": config}[config_type]
        )
        return OmegaConf.to_yaml(OmegaConf.create(without_secrets_in(shown)))

    @cached_property
    def _choices(self) -> Choices:
        return self._options.composed()[1]

    def _checked_copy(self, groups: Mapping[str, str]) -> tuple[DictConfig, Choices]:
        """Fresh copy of the configuration with one override a group, of the schema's types, so
        values set in it are checked.
        """
        options = tuple(groups.values())
        if options not in self._checked_options:
            config, choices = self._options.combined(groups)
            checked = self._checked(config, choices)
            OmegaConf.set_struct(checked, True)
            self._checked_options[options] = pickle.dumps(checked), choices
        pickled, choices = self._checked_options[options]
        # pickled above; six times as fast as a copy
        return pickle.loads(pickled), choices  # noqa: S301

    def _checked(self, config: DictConfig, choices: Mapping[str, str]) -> DictConfig:
        """The configuration with all values checked against and converted to the schema's types.

        Raises:
            ConfigError: a value does not fit the schema, or a configuration file is written in a
                way that is not accepted.
        """
        try:
            _check_how_files_are_written(config, choices)
            config.allowed_targets = list(self.allowed_targets)
            checked = OmegaConf.merge(_schema(), config)
        except (OmegaConfBaseException, OverflowError) as error:
            raise ConfigError(value_message(error)) from error
        assert isinstance(checked, DictConfig)
        return checked

    def _resolved(self, checked: DictConfig, choices: Mapping[str, str]) -> Composed:
        try:
            plain = OmegaConf.to_container(checked, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(value_message(error)) from error
        assert isinstance(plain, dict)
        check_target_names(plain, self.allowed_targets)
        if not self.sets("search_space"):
            _check_space_paths(plain["search_space"])
        refuse_url(plain["study"]["folder"], "study.folder")
        self._name_checkpoint(plain["technique"], Path(plain["study"]["folder"]))
        return Composed({str(key): value for key, value in plain.items()}, choices)

    def _name_checkpoint(self, technique: dict[str, Any], folder: Path) -> None:
        """Fill in the file of the source experiment's weights as ``checkpoint``, if a technique
        names a source.
        """
        name = technique.get("source")
        if name is None:
            return
        if technique.get("checkpoint") is not None:
            raise ConfigError(
                f"technique: found source {name} and checkpoint {technique['checkpoint']}, accepted"
                " is one of them"
            )
        if name not in self.sources:
            self.sources[name] = self._find_source(name, folder)
        technique["checkpoint"] = str(self.sources[name].path)

    def _find_source(self, name: str, folder: Path) -> Source:
        if name in self._source_of:
            raise ConfigError(
                f"technique.source: {' from '.join([*self._source_of, name])}: an experiment cannot"
                " start from itself"
            )
        inherited = {
            key: text
            for text in self.overrides
            if (key := parse_override(text).key_or_group) in INHERITED_KEYS
        }
        allowed = (
            [f"allowed_targets={override_text(list(self.allowed_targets))}"]
            if self.allowed_targets
            else []
        )
        config_dirs = [str(folder) for folder in self.config_dirs]
        try:
            source_composer = Composer([f"experiment={name}", *allowed], config_dirs)
            overrides = [
                f"experiment={name}",
                *(text for key, text in inherited.items() if source_composer.has_key(key)),
                *allowed,
            ]
            config = (
                Composer(overrides, config_dirs, source_of=(*self._source_of, name)).compose().trial
            )
        except ConfigError as error:
            raise ConfigError(f"technique.source: {error}") from error
        arguments = [
            *overrides,
            *(part for folder in config_dirs for part in ("--config-dir", folder)),
        ]
        return Source(
            experiment=name, arguments=tuple(arguments), path=checkpoint_of(name, config, folder)
        )


def _check_how_files_are_written(config: DictConfig, choices: Mapping[str, str]) -> None:
    """Refuse what Hydra takes from a file without an error, but that does not do what its author
    meant.
    """
    if config.get("allowed_targets"):
        raise ConfigError(
            f"allowed_targets: found {list(config.allowed_targets)} in a file; it is read from the"
            f" command line only: add allowed_targets={override_text(list(config.allowed_targets))}"
            " if you trust that code"
        )
    for group, option in choices.items():
        found = OmegaConf.select(config, group.replace("/", "."), throw_on_missing=False)
        if isinstance(found, str) and group != "experiment":
            raise ConfigError(
                f"{group}: found {found!r} in a file where {group}={option} has keys; accepted"
                f" there is an entry of the defaults list: override /{group}: {found}"
            )
    if "experiment" in config:
        raise ConfigError(
            f"experiment={choices['experiment']}: the file's first line must be: # @package"
            " _global_"
        )


def _check_space_paths(entries: Sequence[Any]) -> None:
    """Refuse files of a search space that an experiment names outside of the working folder and
    its own folders.
    """
    for entry in entries:
        if isinstance(entry, str) and (user_path(entry).is_absolute() or ".." in Path(entry).parts):
            raise ConfigError(
                f"search_space: {entry}: accepted in an experiment's file is a path from here or"
                " --config-dir, without ..; on the command line any"
            )


@cache
def _schema() -> DictConfig:
    """The schema as an OmegaConf configuration; ``OmegaConf.merge`` copies it, so it is shared."""
    schema = OmegaConf.structured(Config)
    assert isinstance(schema, DictConfig)
    return schema


def split_overrides(
    composer: Composer, overrides: Sequence[str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Split the overrides that describe the training into options by config group and values by
    config key.

    Overrides on how a study is run are left out, so the rest can be written into an exported
    experiment.
    """
    groups: dict[str, str] = {}
    values: dict[str, Any] = {}
    for text in overrides:
        override = parse_override(text)
        key = override.key_or_group
        if re.split(r"[./]", key)[0] in FIXED_KEYS - {"target", "evaluate_every_samples"}:
            continue
        if composer.is_group(key) and isinstance(override.value(), str):
            groups[key] = str(override.value())
        else:
            values[key] = _plain(override)
    return groups, values


def _plain(override: Override) -> Any:
    # made from a mapping
    node = OmegaConf.create({"value": override.value()})
    return OmegaConf.to_container(node)["value"]  # type: ignore[index,call-overload]


def _allowed_targets(overrides: Sequence[Override]) -> tuple[str, ...]:
    """Packages that overrides of ``allowed_targets`` add to the allow-list."""
    names: list[str] = []
    for override in overrides:
        if override.key_or_group == "allowed_targets":
            value = override.value()
            found = [value] if isinstance(value, str) else value
            if not isinstance(found, list) or not all(
                isinstance(name, str) and name for name in found
            ):
                raise ConfigError(
                    f"{override.input_line}: accepted is a list of package names, as in"
                    " allowed_targets=[my_package]"
                )
            names += found
    return tuple(names)


def _set_value(config: DictConfig, key: str, value: Any) -> None:
    parent, _, name = key.rpartition(".")
    # null in the schema: OmegaConf would fail an assertion
    if parent and OmegaConf.select(config, parent) is None:
        raise ConfigError(f"{key}: Key '{name}' is not in struct")
    OmegaConf.update(config, key, value, merge=False)
