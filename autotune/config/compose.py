"""Composes the experiment, the command line and a suggestion into one checked, resolved
configuration.

Hydra composes, OmegaConf checks the result against the schema, and every ``_target_`` is checked
against the allow-list before anything is built from it. Every error of Hydra and OmegaConf is
turned into one line.

Hydra takes some 100 ms for a configuration, while a device waits. So it composes the command line
once; a suggestion is a copy of that in which options and values are set. This is correct for
options that change only their own group, as almost all do; Hydra composes the others anew. A test
checks that both ways give the same configuration.
"""

import hashlib
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from autotune.config.build import check_target_names, entries
from autotune.config.config_files import Choices, ConfigFiles, value_message
from autotune.config.overrides import as_configured, parse_override
from autotune.config.schema import STUDY_KEYS, Config, TrialConfig, value_at
from autotune.errors import ConfigError, InvalidTrialError
from autotune.redaction import MARK, without_secrets_in
from autotune.remote import refuse_url
from autotune.space import Suggestion, override_text
from autotune.yaml_files import yaml_text

_INHERITED_KEYS = frozenset({"device", "data.root", "data.download", "study.folder"})
"""Keys that a source takes over from the command line: the device, and where files are, never
what is trained."""


@dataclass(frozen=True)
class Composed:
    """One resolved configuration, with the option chosen for each config group."""

    plain: Mapping[str, Any]
    """The whole configuration as nested plain data."""
    choices: Mapping[str, str]
    """Name of the chosen option, by config group."""

    @cached_property
    def config(self) -> Config:
        """The whole configuration.

        Raises:
            ConfigError: no training can run with a value.
        """
        return Config.from_dict(self.plain)

    @cached_property
    def trial(self) -> TrialConfig:
        """The part of the configuration that one training needs."""
        return TrialConfig.from_dict(self.plain)

    def lookup(self, key: str) -> Any:
        """Value of a config key.

        For a config group, the name of its chosen option; None if there is no such key.
        """
        return self.choices[key] if key in self.choices else value_at(self.plain, key)

    def values_of(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Values of the training's keys that overrides set, by config key."""
        keys = [parse_override(text).key_or_group for text in overrides]
        return {
            key: self.lookup(key)
            for key in keys
            if key.partition(".")[0] not in {*STUDY_KEYS, "seed"}
        }


@dataclass(frozen=True, kw_only=True)
class Source:
    """An experiment that is trained once, so that others start from its weights."""

    experiment: str
    arguments: tuple[str, ...]
    """Arguments of ``autotune train`` that train the source."""
    path: Path
    """File of the source's weights; it may not exist yet."""


class Composer:
    """Composes configurations from the shipped folder, the user's own folders, and a command line.

    Args:
        overrides: overrides of the command line.
        config_dirs: the user's own configuration folders.
        experiments: texts of further experiments, which lie in no file, by name.
        source_of: if the experiment is itself a source of another, the chain of sources that ends
            with it.

    Raises:
        ConfigError: a folder does not exist or is a URL, an override does not parse or deletes a
            key, or a text is no experiment.
    """

    def __init__(
        self,
        overrides: Sequence[str] = (),
        config_dirs: Sequence[str] = (),
        *,
        experiments: Mapping[str, str] = MappingProxyType({}),
        source_of: tuple[str, ...] = (),
    ) -> None:
        self._files = ConfigFiles(config_dirs, experiments)
        self.config_dirs = self._files.config_dirs
        parsed = [parse_override(text) for text in overrides]
        for override in parsed:
            if MARK in str(override.input_line):
                raise ConfigError(
                    f"{override.key_or_group}: found {MARK}, which stands for a secret that was not"
                    " shown; give the secret itself, or ${oc.env:NAME}, which takes it from the"
                    " environment"
                )
            if override.is_delete():
                raise ConfigError(f"{override.input_line}: a key cannot be taken out; set it")
        self.sweeps = {
            override.key_or_group: str(override.input_line).split("=", 1)[1]
            for override in parsed
            if override.is_sweep_override()
        }
        if "experiment" in self.sweeps:
            raise ConfigError(
                f"experiment={self.sweeps['experiment']}: a study has one experiment; for a study"
                " of each, run the command twice"
            )
        self.allowed_targets = _allowed_targets(parsed)
        self._parsed = [
            override
            for override in parsed
            if not override.is_sweep_override() and override.key_or_group != "allowed_targets"
        ]
        self.overrides = tuple(str(override.input_line) for override in self._parsed)
        self.sources: dict[str, Source] = {}
        """Experiments that a technique of a composed configuration starts from, by name."""
        self._source_of = source_of
        self._option_nodes: dict[tuple[str, str], Any] = {}

    def refuse_sweeps(self) -> None:
        """Refuse sweeps on the command line, for commands that run a single configuration.

        Raises:
            ConfigError: a key has a sweep; names the key.
        """
        if self.sweeps:
            raise ConfigError(
                f"{next(iter(self.sweeps))}: is a sweep; give one value (autotune without a command"
                " searches over several)"
            )

    def compose(self, overrides: Sequence[str] = ()) -> Composed:
        """Compose the configuration of the command line with further overrides applied after it.

        Raises:
            ConfigError: a key or value is wrong; names the key, what was found and what to do.
        """
        config, choices = self._files.compose([*self.overrides, *overrides])
        return self._resolved(self._typed(config), choices)

    def compose_suggestion(self, suggestion: Suggestion, *, seed: int) -> Composed:
        """Compose the configuration of one point of the search space.

        Raises:
            InvalidTrialError: the point cannot be composed, or no training can run its
                configuration.
        """
        try:
            composed = self._resolved(*self._point(suggestion, seed))
            _ = composed.trial
        except ConfigError as error:
            raise InvalidTrialError(str(error)) from error
        return composed

    def experiment_of(self, suggestion: Suggestion, *, seed: int) -> dict[str, Any]:
        """Content of an experiment's file that composes to a point's training, in the study that
        this command line's experiment describes.

        It names no other experiment: it has all options and values that differ from the defaults.
        """
        point, choices = self._point(suggestion, seed)
        content: Any = OmegaConf.to_container(point)
        experiment = [line for line in self.overrides if line.startswith("experiment=")]
        stated, stated_choices = self._files.compose(experiment)
        study: Any = OmegaConf.to_container(self._typed(stated))
        content |= {key: study[key] for key in STUDY_KEYS & set(study)}
        choices |= {
            group: option for group, option in stated_choices.items() if group in STUDY_KEYS
        }
        _, default_choices = self._files.compose([])
        changed = {
            group: option
            for group, option in choices.items()
            if group != "experiment" and default_choices.get(group) != option
        }
        lines = [
            {f"{'override ' if group in default_choices else ''}/{group}": option}
            for group, option in changed.items()
        ]
        chosen = [
            f"{group}={override_text(option)}"
            for group, option in changed.items()
            if group in default_choices
        ]
        plain: Any = OmegaConf.to_container(self._typed(self._files.compose(chosen)[0]))
        return {"defaults": [*lines, "_self_"], **_difference(content, plain)}

    @property
    def missing_sources(self) -> list[Source]:
        """The sources whose checkpoint does not exist yet."""
        return [source for source in self.sources.values() if not source.path.is_file()]

    def config_yaml(self, *, resolve: bool) -> str:
        """The composed configuration as YAML."""
        config = self.compose().plain if resolve else self._files.compose(self.overrides)[0]
        return yaml_text(without_secrets_in(config))

    @cached_property
    def _command_line(self) -> tuple[bytes, Choices]:
        """Configuration of the command line with the schema's types, pickled."""
        config, choices = self._files.compose(self.overrides)
        return pickle.dumps(self._typed(config)), choices

    def _point(self, suggestion: Suggestion, seed: int) -> tuple[DictConfig, Choices]:
        """A point's configuration, not resolved, with the schema's types."""
        pickled, choices = self._command_line
        options = {key: value for key, value in suggestion.values.items() if key in choices}
        changed = {group: option for group, option in options.items() if choices[group] != option}
        is_nested = any(re.match(rf"({'|'.join(changed)})[/@]", group) for group in choices)
        try:
            if is_nested or not all(
                self._files.changes_only_its_group(*choice) for choice in changed.items()
            ):
                lines = [f"{group}={override_text(option)}" for group, option in options.items()]
                plain, choices = self._files.compose([*self.overrides, *lines])
                config = self._typed(plain)
            else:
                # pickled above; six times as fast as a copy
                config = pickle.loads(pickled)  # noqa: S301
                choices = {**choices, **changed}
                for group, option in changed.items():
                    config[group] = self._option_node(group, option)
            for key, value in suggestion.values.items():
                if key not in options:
                    # a sweep of the command line stays as typed: it may read the environment
                    _set_value(config, key, value if key in self.sweeps else as_configured(value))
            config.seed = seed
        except OmegaConfBaseException as error:
            raise ConfigError(value_message(error)) from error
        return config, choices

    def _option_node(self, group: str, option: str) -> Any:
        if (group, option) not in self._option_nodes:
            node = self._files.option_node(group, option, self._parsed)
            self._option_nodes[group, option] = self._typed({group: node})[group]
        return self._option_nodes[group, option]

    def _typed(self, config: Mapping[str, Any]) -> DictConfig:
        """The configuration with all values checked against and converted to the schema's types.

        Raises:
            ConfigError: a value does not fit the schema.
        """
        plain: Any = {**config, "allowed_targets": list(self.allowed_targets)}
        try:
            typed = OmegaConf.merge(_schema(), plain)
        except (OmegaConfBaseException, OverflowError) as error:
            raise ConfigError(value_message(error)) from error
        assert isinstance(typed, DictConfig)
        OmegaConf.set_struct(typed, True)
        return typed

    def _resolved(self, typed: DictConfig, choices: Mapping[str, str]) -> Composed:
        try:
            plain: Any = OmegaConf.to_container(typed, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(value_message(error)) from error
        check_target_names(plain, self.allowed_targets)
        refuse_url(plain["study"]["folder"], "study.folder")
        self._name_checkpoint(plain["technique"], Path(plain["study"]["folder"]))
        return Composed(plain, choices)

    def _name_checkpoint(self, technique: dict[str, Any], folder: Path) -> None:
        """Fill in the file of the source experiment's weights as ``checkpoint``, if a technique
        names a source.
        """
        name = technique.get("source")
        if name is None:
            return
        if technique.get("checkpoint") is not None:
            raise ConfigError(
                f"technique: found source {name} and checkpoint {technique['checkpoint']}; give one"
                " of them"
            )
        if name not in self.sources:
            self.sources[name] = self._find_source(name, folder)
        technique["checkpoint"] = str(self.sources[name].path)

    def _find_source(self, name: str, folder: Path) -> Source:
        """The source of that name, which takes over from the command line what is not trained.

        The name of its file has a hash of its configuration.
        """
        chain = (*self._source_of, name)
        if name in self._source_of:
            raise ConfigError(
                f"technique.source: {' from '.join(chain)}: an experiment cannot start from itself"
            )
        line = [f"experiment={name}"]
        if self.allowed_targets:
            line.append(f"allowed_targets={override_text(list(self.allowed_targets))}")
        config_dirs = [str(config_dir) for config_dir in self.config_dirs]
        try:
            keys = {key for key, _, _ in entries(self._files.compose(line[:1])[0])}
            line[1:1] = [
                str(override.input_line)
                for override in self._parsed
                if override.key_or_group in _INHERITED_KEYS & keys
            ]
            config = Composer(line, config_dirs, source_of=chain).compose().trial
        except ConfigError as error:
            raise ConfigError(f"technique.source: {error}") from error
        arguments = [*line, *(part for path in config_dirs for part in ("--config-dir", path))]
        content = _without_keys_off(config.as_dict() | {"allowed_targets": None})
        text = json.dumps(content, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        file = f"{name.replace('/', '_')}-{digest}.safetensors"
        path = (folder / "checkpoints" / file).absolute()
        return Source(experiment=name, arguments=tuple(arguments), path=path)


@cache
def _schema() -> DictConfig:
    """The schema as an OmegaConf configuration; ``OmegaConf.merge`` copies it, so it is shared."""
    schema = OmegaConf.structured(Config)
    for field in fields(Config):
        if is_dataclass(field.type):
            schema[field.name] = field.type  # so that only a mapping takes its place
    assert isinstance(schema, DictConfig)
    return schema


def _difference(content: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The part of nested plain data that differs from other data; a component with another
    ``_target_`` as a whole.
    """
    found = {}
    for key, value in content.items():
        before = other.get(key)
        if (
            isinstance(value, Mapping)
            and isinstance(before, Mapping)
            and value.get("_target_") == before.get("_target_")
        ):
            if inner := _difference(value, before):
                found[key] = inner
        elif key not in other or repr(value) != repr(before):
            found[key] = value
    return found


def _without_keys_off(values: Mapping[str, Any]) -> dict[str, Any]:
    """Remove keys that are off (null or false), nested ones too, so that a key added in a later
    version changes no hash while it is off.
    """
    kept = {
        key: _without_keys_off(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
    }
    return {
        key: value
        for key, value in kept.items()
        if value is not None and value is not False and value != {}
    }


def _allowed_targets(overrides: Sequence[Override]) -> tuple[str, ...]:
    """Packages that overrides of ``allowed_targets`` add to the allow-list."""
    names: list[str] = []
    for override in overrides:
        if override.key_or_group == "allowed_targets":
            value: Any = override.value()
            found = value if isinstance(value, list) else [value]
            if not all(isinstance(name, str) and name for name in found):
                raise ConfigError(
                    f"{override.input_line}: write a list of package names, as in"
                    " allowed_targets=[my_package]"
                )
            names += found
    return tuple(names)


def _set_value(config: DictConfig, key: str, value: Any) -> None:
    parent, _, name = key.rpartition(".")
    holder = OmegaConf.select(config, parent) if parent else config
    if not isinstance(holder, DictConfig) or name not in holder.keys():  # noqa: SIM118  # ??? too
        has = (
            f"{parent} has {', '.join(map(str, holder))}"
            if parent and isinstance(holder, DictConfig)
            else f"there is no {parent or key}"
        )
        raise ConfigError(f"{key}: no config has this key; {has}")
    OmegaConf.update(config, key, value, merge=False)
