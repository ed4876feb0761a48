"""Composes the experiment, the command line and a suggestion into one checked, resolved configuration.

Hydra composes, OmegaConf checks the result against the schema, and every ``_target_`` is checked against the allow-list before anything is
built from it. Every error of Hydra and OmegaConf is turned into one line.

A suggestion is composed as Hydra would compose its overrides, but without calling Hydra each time, which takes some 100 ms while a device
waits: Hydra composes each option of a group once, and the options of a suggestion are then combined (``autotune.config.group_options``).
A test checks that both ways give the same configuration.
"""

import difflib
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from autotune.config.allowed import check_target_names
from autotune.config.group_options import changes_only, with_options
from autotune.config.group_overrides import drop_values_of_another_target, group_choices, keep_own_values
from autotune.config.paths import shipped_folder
from autotune.config.schema import FIXED_KEYS, Config, TrialConfig
from autotune.config.sources import INHERITED_KEYS, Source, checkpoint_of
from autotune.errors import ConfigError, InvalidTrialError
from autotune.remote.url import refuse_url
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
            config = OmegaConf.to_object(OmegaConf.merge(_schema(), self.plain))
        except OmegaConfBaseException as error:
            raise ConfigError(_explain_value(error)) from error
        assert isinstance(config, Config)
        return config

    @cached_property
    def trial(self) -> TrialConfig:
        """The part of the configuration that one training needs."""
        return TrialConfig.from_dict(self.plain)

    def lookup(self, key: str) -> Any:
        """Value of a config key; for a config group, the name of its chosen option; None if there is no such key."""
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
        source_of: if the experiment is itself a source of another (``autotune.config.sources``), the chain of sources that ends with it.

    Raises:
        ConfigError: a folder does not exist or is a URL, or an override does not parse or deletes a key.
    """

    def __init__(self, overrides: Sequence[str] = (), config_dirs: Sequence[str] = (), *, source_of: tuple[str, ...] = ()) -> None:
        for config_dir in config_dirs:
            refuse_url(config_dir, "--config-dir")
        self.config_dirs = tuple(Path(config_dir).expanduser().resolve() for config_dir in config_dirs)
        for folder, config_dir in zip(self.config_dirs, config_dirs, strict=True):
            if not folder.is_dir():
                raise ConfigError(f"--config-dir {config_dir}: no such folder")
        parsed = [_parse(text) for text in overrides]
        self.sweeps = {
            override.key_or_group: str(override.input_line).split("=", 1)[1] for override in parsed if override.is_sweep_override()
        }
        self.allowed_targets = _allowed_targets(parsed)
        self.overrides = tuple(
            text
            for text, override in zip(overrides, parsed, strict=True)
            if not override.is_sweep_override() and override.key_or_group != "allowed_targets"
        )
        for override in parsed:
            if override.is_delete():
                raise ConfigError(f"{override.input_line}: a key cannot be taken out; accepted is key=value")
        self.sources: dict[str, Source] = {}
        """Experiments that a technique of a composed configuration starts from, by name."""
        self._source_of = source_of
        self._bases: dict[tuple[str, ...], tuple[DictConfig, dict[str, str]]] = {}
        self._checked_bases: dict[tuple[str, ...], tuple[bytes, dict[str, str]]] = {}
        """Configurations that passed the schema, pickled, by the options that a suggestion chooses; its values are set in a copy."""
        self._is_separate: dict[str, bool] = {}
        self._composed_files: dict[tuple[str, ...], DictConfig] = {}
        self._composed_points: dict[tuple[tuple[str, ...], int], Composed] = {}
        """The latest composed suggestions, by point and seed: checks and runs compose the same ones again."""

    def refuse_sweeps(self) -> None:
        """Refuse sweeps on the command line, for commands that run a single configuration.

        Raises:
            ConfigError: a key has a sweep; names the key.
        """
        if self.sweeps:
            raise ConfigError(
                f"{next(iter(self.sweeps))}: is a sweep; accepted is one value (autotune without a command searches over several)"
            )

    def compose(self, overrides: Sequence[str] = ()) -> Composed:
        """Compose the configuration of the command line with further overrides applied after it.

        Raises:
            ConfigError: a key or value is wrong; names the key, what was found and what is accepted.
        """
        config, choices = self._base(tuple(overrides))
        return self._resolved(self._checked(config, choices), choices)

    def compose_suggestion(self, suggestion: Suggestion, *, seed: int) -> Composed:
        """Compose the configuration of one point of the search space; the latest points are cached.

        Raises:
            InvalidTrialError: the point cannot be composed, or no training can run its configuration.
        """
        known = self._composed_points.get((suggestion.key, seed))
        if known is not None:
            return known
        groups = {key: f"{key}={override_text(value)}" for key, value in suggestion.values.items() if self.is_group(key)}
        try:
            config, choices = self._checked_options(groups)
            for key, value in suggestion.values.items():
                if not self.is_group(key):
                    _set_value(config, key, value)
            config.seed = seed
            composed = self._resolved(config, choices)
            _ = composed.trial
        except ConfigError as error:
            raise InvalidTrialError(str(error)) from error
        except OmegaConfBaseException as error:
            raise InvalidTrialError(_explain_value(error)) from error
        if len(self._composed_points) >= _MAX_CACHED_POINTS:
            del self._composed_points[next(iter(self._composed_points))]
        self._composed_points[suggestion.key, seed] = composed
        return composed

    def is_group(self, key: str) -> bool:
        """Whether a key names a config group, so that its value is the name of an option."""
        return key in self._choices

    @property
    def missing_sources(self) -> list[Source]:
        """The sources whose checkpoint does not exist yet."""
        return [source for source in self.sources.values() if not source.path.is_file()]

    def has_key(self, key: str) -> bool:
        """Whether the configuration of the command line has a value for a key."""
        absent = object()
        return OmegaConf.select(self._base(())[0], key, default=absent) is not absent

    def experiment_content(self, name: str) -> dict[str, Any]:
        """Content of an experiment's own file, without the files that it builds on; empty if there is no such file."""
        paths = [folder / "experiment" / f"{name}.yaml" for folder in (shipped_folder("conf"), *self.config_dirs)]
        path = next((path for path in paths if path.is_file()), None)
        return dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path else {}

    def _stated_keys(self, config: DictConfig) -> frozenset[str]:
        """Keys of the top two levels in the experiment's own file, and in the files of the experiments in its defaults list."""
        keys: set[str] = set()
        names = [group_choices(config).get("experiment")]
        while names:
            name = names.pop()
            if name is not None:
                content = self.experiment_content(name)
                keys |= set(content) | {f"{key}.{inner}" for key, value in content.items() if isinstance(value, dict) for inner in value}
                bases = [entry for entry in content.get("defaults") or [] if isinstance(entry, str) and entry != "_self_"]
                names += [base.rpartition("/")[2].partition("@")[0] for base in bases]
        return frozenset(keys)

    def _option_content(self, group: str, option: str) -> dict[str, Any]:
        """Content of the file of a config group's option; empty if there is no such file."""
        return _yaml_content(*(folder / group / f"{option}.yaml" for folder in (shipped_folder("conf"), *self.config_dirs)))

    def config_yaml(self, config_type: str, *, resolve: bool) -> str:
        """The composed configuration as YAML: ``job`` for autotune's part, ``hydra`` for Hydra's own part, ``all`` for both."""
        config = self._hydra_compose(())
        if resolve:
            _ = self.compose()
            OmegaConf.resolve(config)
        hydra_part = OmegaConf.masked_copy(config, "hydra")
        job_part = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        return OmegaConf.to_yaml({"job": job_part, "hydra": hydra_part, "all": config}[config_type])

    @cached_property
    def _choices(self) -> dict[str, str]:
        return self._base(())[1]

    def _base(self, overrides: tuple[str, ...]) -> tuple[DictConfig, dict[str, str]]:
        """Fresh copy of what Hydra composes for the command line and these overrides, and the chosen option of each group."""
        if overrides not in self._bases:
            config = self._hydra_compose(overrides)
            choices = group_choices(config)
            self._check_names(choices)
            self._bases[overrides] = (OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]), choices)
        config, choices = self._bases[overrides]
        copied = config.copy()
        OmegaConf.set_struct(copied, True)  # unknown keys are refused, as by Hydra
        return copied, choices

    def _with_options(self, groups: Mapping[str, str]) -> tuple[DictConfig, dict[str, str]]:
        """Same result as ``_base`` for one override a group, but Hydra is not called if each option changes only its own group."""
        nested = any(group.startswith(f"{other}/") for group in groups for other in groups)
        if len(groups) < 2 or nested or not all(self._changes_only(group, text) for group, text in groups.items()):
            return self._base(tuple(groups.values()))
        config, choices = self._base(())
        return with_options(config, choices, {group: self._bases[(text,)] for group, text in groups.items()})

    def _checked_options(self, groups: Mapping[str, str]) -> tuple[DictConfig, dict[str, str]]:
        """Fresh copy of the configuration with one override a group, of the schema's types, so values set in it are checked."""
        options = tuple(groups.values())
        if options not in self._checked_bases:
            config, choices = self._with_options(groups)
            checked = self._checked(config, choices)
            OmegaConf.set_struct(checked, True)
            self._checked_bases[options] = pickle.dumps(checked), choices
        pickled, choices = self._checked_bases[options]
        return pickle.loads(pickled), choices  # noqa: S301  # pickled above; six times as fast as a copy

    def _changes_only(self, group: str, override: str) -> bool:
        """Whether choosing an option of a group changes only the keys beneath that group."""
        if override not in self._is_separate:
            try:
                self._is_separate[override] = changes_only(group, before=self._base(()), after=self._base((override,)))
            except ConfigError:  # it may compose beside another option
                self._is_separate[override] = False
        return self._is_separate[override]

    def _hydra_compose(self, overrides: tuple[str, ...]) -> DictConfig:
        """Compose with Hydra, and apply autotune's rules for groups whose option was replaced (``autotune.config.group_overrides``)."""
        all_overrides = [*self.overrides, *overrides]
        config = self._compose_files(all_overrides)
        parsed, stated = [_parse(text) for text in all_overrides], self._stated_keys(config)
        keep_own_values(config, parsed, stated, self._compose_files_cached)
        drop_values_of_another_target(config, stated | {override.key_or_group for override in parsed}, self._option_content)
        return config

    def _compose_files_cached(self, overrides: list[str]) -> DictConfig:
        """Cached result of ``_compose_files``, which callers must not change."""
        key = tuple(overrides)
        if key not in self._composed_files:
            self._composed_files[key] = self._compose_files(overrides)
        return self._composed_files[key]

    def _compose_files(self, overrides: list[str]) -> DictConfig:
        all_overrides = list(overrides)
        if self.config_dirs:
            paths = ",".join("'" + f"file://{folder}".replace("'", "\\'") + "'" for folder in self.config_dirs)
            all_overrides.append(f"hydra.searchpath=[{paths}]")
        try:
            with hydra_set_up():
                return compose("config", all_overrides, return_hydra_config=True)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._file_that_is_not_text()}: is not text; accepted is YAML in UTF-8") from error
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
            raise ConfigError(self._explain(error)) from error

    def _checked(self, config: DictConfig, choices: Mapping[str, str]) -> DictConfig:
        """The configuration with all values checked against and converted to the schema's types.

        Raises:
            ConfigError: a value does not fit the schema, or a configuration file is written in a way that is not accepted.
        """
        if config.get("allowed_targets"):
            raise ConfigError(
                f"allowed_targets: found {list(config.allowed_targets)} in a file; it is read from the command line only: "
                f"add allowed_targets={override_text(list(config.allowed_targets))} if you trust that code"
            )
        for group, option in choices.items():
            found = OmegaConf.select(config, group.replace("/", "."), throw_on_missing=False)
            if isinstance(found, str) and group != "experiment":
                raise ConfigError(
                    f"{group}: found {found!r} in a file where {group}={option} has keys; accepted there is an entry of the defaults list: "
                    f"override /{group}: {found}"
                )
        if "experiment" in config:
            raise ConfigError(f"experiment={choices['experiment']}: the file's first line must be: # @package _global_")
        try:
            config.allowed_targets = list(self.allowed_targets)
            checked = OmegaConf.merge(_schema(), config)
        except OmegaConfBaseException as error:
            raise ConfigError(_explain_value(error)) from error
        assert isinstance(checked, DictConfig)
        return checked

    def _resolved(self, checked: DictConfig, choices: Mapping[str, str]) -> Composed:
        try:
            plain = OmegaConf.to_container(checked, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(_explain_value(error)) from error
        assert isinstance(plain, dict)
        check_target_names(plain, self.allowed_targets)
        refuse_url(plain["study"]["folder"], "study.folder")
        self._name_checkpoint(plain["technique"], Path(plain["study"]["folder"]))
        return Composed({str(key): value for key, value in plain.items()}, choices)

    def _name_checkpoint(self, technique: dict[str, Any], folder: Path) -> None:
        """Fill in the file of the source experiment's weights as ``checkpoint``, if a technique names a source."""
        name = technique.get("source")
        if name is None:
            return
        if technique.get("checkpoint") is not None:
            raise ConfigError(f"technique: found source {name} and checkpoint {technique['checkpoint']}, accepted is one of them")
        if name not in self.sources:
            self.sources[name] = self._find_source(name, folder)
        technique["checkpoint"] = str(self.sources[name].path)

    def _find_source(self, name: str, folder: Path) -> Source:
        if name in self._source_of:
            raise ConfigError(f"technique.source: {' from '.join([*self._source_of, name])}: an experiment cannot start from itself")
        inherited = {key: text for text in self.overrides if (key := _parse(text).key_or_group) in INHERITED_KEYS}
        allowed = [f"allowed_targets={override_text(list(self.allowed_targets))}"] if self.allowed_targets else []
        config_dirs = [str(folder) for folder in self.config_dirs]
        try:
            source_composer = Composer([f"experiment={name}", *allowed], config_dirs)
            overrides = [f"experiment={name}", *(text for key, text in inherited.items() if source_composer.has_key(key)), *allowed]
            config = Composer(overrides, config_dirs, source_of=(*self._source_of, name)).compose().trial
        except ConfigError as error:
            raise ConfigError(f"technique.source: {error}") from error
        arguments = [*overrides, *(part for folder in config_dirs for part in ("--config-dir", folder))]
        return Source(experiment=name, arguments=tuple(arguments), path=checkpoint_of(name, config, folder))

    def _check_names(self, choices: Mapping[str, str]) -> None:
        """Refuse a user's option with the name of a shipped one, which Hydra takes in its place, if their files differ."""
        for group, option in choices.items():
            shipped = shipped_folder("conf") / group / f"{option}.yaml"
            for folder in self.config_dirs:
                own = folder / group / f"{option}.yaml"
                if own.is_file() and shipped.is_file() and own.read_bytes() != shipped.read_bytes():
                    raise ConfigError(f"{group}={option}: autotune ships a file of this name, which hides {own}; accepted is another name")

    def _file_that_is_not_text(self) -> Path | str:
        for path in (path for folder in self.config_dirs for path in sorted(folder.rglob("*.yaml")) if path.is_file()):
            try:
                path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                return path
        return "a configuration file"

    def _explain(self, error: Exception) -> str:
        """Hydra's error as one line: the key, what was found and what is accepted."""
        if not str(error) and isinstance(error.__cause__, Exception):
            return _explain_value(error.__cause__)
        message = str(error)
        if message.startswith("Config group override must be"):
            groups = [text for text in self.overrides if (shipped_folder("conf") / _parse(text).key_or_group).is_dir()]
            wrong = [text for text in groups if not isinstance(_parse(text).value(), str | list | dict)]
            return f"{', '.join(wrong)}: accepted is GROUP=NAME with the name of one of the group's files"
        if isinstance(error, MissingConfigException) and (missing := re.search(r"Could not find '([^']+)'", message)):
            group, _, option = missing[1].rpartition("/")
            options = error.options or []
            accepted = f"accepted are {', '.join(options)}" if options else "there is no such file"
            return f"{group}={option}: {accepted}{did_you_mean(option, options)}"
        if unknown := re.search(r"Could not override '([^']+)'", message):
            key = unknown[1]
            if key in self.known_keys():
                return f"{key}: is a config group; accepted is the name of one of its files, or a key in it as in {key}.KEY=value"
            part = key.rpartition(".")[0] + "."
            is_argument = f"{part}_target_" in self.known_keys()
            known = [name for name in self.known_keys() if not is_argument or (name.startswith(part) and name != f"{part}_target_")]
            meant = did_you_mean(key, known)
            added = f"; another argument is added with a plus: +{key}=VALUE" if is_argument and not meant else ""
            return f"{key}: no such key{meant}; accepted keys are shown by --cfg job{added}"
        return _explain_value(error)

    def known_keys(self) -> list[str]:
        """Every key of the shipped default configuration, groups included, for the "did you mean" of error messages."""
        return _default_keys()


@cache
def _yaml_content(*paths: Path) -> dict[str, Any]:
    """Content of the first of the files that exists; empty if none does, or if it is no mapping."""
    path = next((path for path in paths if path.is_file()), None)
    content = yaml.safe_load(path.read_text(encoding="utf-8")) if path else None
    return content if isinstance(content, dict) else {}


@cache
def _default_keys() -> list[str]:
    with hydra_set_up():
        return list(_flat_keys(OmegaConf.to_container(compose("config", []))))


@cache
def _schema() -> DictConfig:
    """The schema as an OmegaConf configuration; ``OmegaConf.merge`` copies it, so it is shared."""
    schema = OmegaConf.structured(Config)
    assert isinstance(schema, DictConfig)
    return schema


def split_overrides(composer: Composer, overrides: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Split the overrides that describe the training into options by config group and values by config key.

    Overrides on how a study is run are left out, so the rest can be written into an exported experiment.
    """
    groups: dict[str, str] = {}
    values: dict[str, Any] = {}
    for text in overrides:
        override = _parse(text)
        key = override.key_or_group
        if re.split(r"[./]", key)[0] in FIXED_KEYS - {"target", "evaluate_every_samples"}:
            continue
        if composer.is_group(key) and isinstance(override.value(), str):
            groups[key] = str(override.value())
        else:
            values[key] = _plain(override)
    return groups, values


def _plain(override: Override) -> Any:
    return OmegaConf.to_container(OmegaConf.create({"value": override.value()}))["value"]  # type: ignore[index,call-overload]  # made from a mapping


@contextmanager
def hydra_set_up() -> Iterator[None]:
    """Context in which Hydra's global state is set up for the shipped configuration; afterwards the caller's state is restored."""
    saved = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(shipped_folder("conf")), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().clear()
        GlobalHydra.instance().hydra = saved


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"{text!r}: not an override; accepted is key=value (quote values with special characters: 'key=\"a b\"')"
        ) from error


def _allowed_targets(overrides: Sequence[Override]) -> tuple[str, ...]:
    """Packages that overrides of ``allowed_targets`` add to the allow-list."""
    names: list[str] = []
    for override in overrides:
        if override.key_or_group == "allowed_targets":
            value = override.value()
            found = [value] if isinstance(value, str) else value
            if not isinstance(found, list) or not all(isinstance(name, str) and name for name in found):
                raise ConfigError(f"{override.input_line}: accepted is a list of package names, as in allowed_targets=[my_package]")
            names += found
    return tuple(names)


def _flat_keys(value: Any, prefix: str = "") -> Iterator[str]:
    for key, inner in value.items():
        yield f"{prefix}{key}"
        if isinstance(inner, Mapping):
            yield from _flat_keys(inner, f"{prefix}{key}.")


def did_you_mean(found: str, known: Sequence[str]) -> str:
    """Hint for an error message on the known name that is most similar to the one found; empty if none is similar."""
    close = difflib.get_close_matches(found, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _set_value(config: DictConfig, key: str, value: Any) -> None:
    parent, _, name = key.rpartition(".")
    if parent and OmegaConf.select(config, parent) is None:  # null in the schema: OmegaConf would fail an assertion
        raise ConfigError(f"{key}: Key '{name}' is not in struct")
    OmegaConf.update(config, key, value, merge=False)


def _explain_value(error: Exception) -> str:
    """An error of OmegaConf, YAML or the file system as one line that begins with the key, if there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if part := re.search(r"(\w+) is not a subclass of (\w+)Config\. value: (.*)", lines[0] if lines else ""):
        return f"{part[2].lower()}: found {part[3]}, accepted is a mapping"
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")
    text = " ".join(line for line in lines if not re.match(r"(full_key|object_type|reference_type):?|object_type=|reference_type=", line))
    if "is not a ListConfig, list or tuple" in text:
        text = f"accepted is a list, such as {key}=[...]"
    return f"{key}: {text}" if key else text
