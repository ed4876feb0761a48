"""The configuration files, shipped ones and the user's own, and what Hydra composes of them.

Everything that calls Hydra's ``compose`` is here, and Hydra's global state is the caller's again
afterwards. Hydra reads the shipped folder itself. A file of the user's own may come from anyone, so
it is read and checked here (``autotune.yaml_files``) and reaches Hydra through its ``ConfigStore``:
it cannot change Hydra's settings, choose files outside of its folder, or use resolvers such as
``${oc.env:SECRET}``.

In Hydra, an experiment that chooses ``optimizer: sgd`` and sets ``optimizer.momentum``, as every
exported one does, would pass its momentum on to any other optimizer that a search or the command
line chooses. Here, another option of a group starts from that option's own file, and values from
the command line stay.
"""

import copy
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from autotune.config.build import entries, shipped_options
from autotune.config.experiments import named_files, shipped_folder
from autotune.config.overrides import parse_override, without_plain_text
from autotune.config.schema import STUDY_KEYS, value_at
from autotune.errors import ConfigError, did_you_mean
from autotune.remote import refuse_url, user_path
from autotune.space import override_text
from autotune.yaml_files import load_yaml, read_yaml

Choices: TypeAlias = dict[str, str]
"""Name of the chosen option, by config group."""

_COMMAND_LINE_ONLY: Mapping[str, Any] = {
    "study.folder": "outputs",
    "checkpoint.folder": None,
    "search.storage": None,
    "tracking.uri": None,
    "cluster.address": None,
}
"""Keys that say where files are written or who is sent what, with their defaults: the files of
an experiment cannot set them."""

_BARE = "_bare_"
"""Name of an option without any key."""
_INTERPOLATION = re.compile(r"\$\{[\w.\[\]/-]+\}")
_PACKAGE = re.compile(r"\s*#\s*@package +(\S+) *(\n|$)")


class ConfigFiles:
    """The shipped configuration folder and the user's own ones.

    Args:
        experiments: texts of further experiments, which lie in no file, by name.

    Raises:
        ConfigError: a folder does not exist or is a URL.
    """

    def __init__(
        self, config_dirs: Sequence[str], experiments: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        for config_dir in config_dirs:
            refuse_url(config_dir, "--config-dir")
            if not os.path.isdir(user_path(config_dir)):  # noqa: PTH112  # False of too long a name
                raise ConfigError(f"--config-dir {config_dir}: no such folder")
        self.config_dirs = tuple(user_path(config_dir).resolve() for config_dir in config_dirs)
        self._own: dict[str, Any] = {}
        """Content of each of the user's own files, by group and name: ``model/my_net``."""
        self._packages: dict[str, str | None] = {}
        self._refused: dict[str, ConfigError] = {}
        """Why a file of the user's own cannot be chosen; others still can."""
        self._composed: dict[tuple[str, ...], tuple[dict[str, Any], Choices]] = {}
        for group, folder in itertools.product(_groups(), self.config_dirs):
            for name, path in named_files(folder / group):
                self._read(f"{group}/{name}", path)
        for name, text in experiments.items():
            content = load_yaml(text, f"experiment {name}")
            _check_content(content, "_global_", f"experiment {name}")
            self._own[f"experiment/{name}"] = content
            self._packages[f"experiment/{name}"] = "_global_"

    def _read(self, option: str, path: Path) -> None:
        if option in self._own or option in self._refused:
            return  # another folder of the user's comes first
        try:
            content = read_yaml(path) or {}
            header = _PACKAGE.match(path.read_text(encoding="utf-8"))
            package = header[1] if header else None
            _check_content(content, package or "", str(path))
            if option not in shipped_options():
                OmegaConf.create(content)  # which refuses some keys
                self._own[option], self._packages[option] = content, package
            elif path.read_bytes() != (shipped_folder("conf") / f"{option}.yaml").read_bytes():
                raise ConfigError(
                    f"{option}: autotune ships a file of this name, which hides {path}; choose"
                    " another name"
                )
        except ConfigError as error:
            self._refused[option] = error
        except (OmegaConfBaseException, RecursionError) as error:
            self._refused[option] = ConfigError(f"{path}: {value_message(error)}")

    def options(self, group: str) -> list[str]:
        """Names of a config group's options; empty if there is no such group."""
        known = {*shipped_options(), *self._own, *self._refused}
        return sorted(
            path.removeprefix(f"{group}/") for path in known if path.startswith(f"{group}/")
        )

    def changes_only_its_group(self, group: str, option: str) -> bool:
        """Whether choosing an option changes nothing but the keys beneath its group."""
        path = f"{group}/{option}"
        if group not in _groups() or path in self._refused:
            return False
        return path in shipped_options() or (
            path in self._own
            and "defaults" not in self._own[path]
            and self._packages[path] in (None, "_group_")
        )

    def compose(self, overrides: Sequence[str]) -> tuple[dict[str, Any], Choices]:
        """Compose the configuration of a command line.

        Returns:
            The configuration as plain data that is not resolved, and the chosen options.

        Raises:
            ConfigError: an override or a file is wrong; names the key or file, what was found and
                what to do.
        """
        parsed = [parse_override(text) for text in overrides]
        for override in parsed:
            self._check_override(override)
        config, choices = copy.deepcopy(self._compose(overrides))
        for group, option in choices.items():
            if f"{group}/{option}" in self._refused:
                raise self._refused[f"{group}/{option}"]
        _check_how_files_are_written(config, choices)
        self._check_command_line_only(config, parsed)
        for group in {override.key_or_group for override in parsed} & set(choices):
            if group not in STUDY_KEYS and self._is_replaced(group, choices[group], parsed):
                config[group] = self.option_node(group, choices[group], parsed)
        self._drop_arguments_of_replaced_targets(config, choices, parsed)
        return config, choices

    def option_node(self, group: str, option: str, parsed: Sequence[Override]) -> Any:
        """A group's node with another option: what the option's own file says, or the experiment
        if it chose that option, and the values beneath the group from the command line.
        """
        experiment = _lines_of("experiment", parsed)
        is_its_own = not experiment or self._is_replaced(group, option, parsed)
        beneath = [
            str(override.input_line)
            for override in parsed
            if override.key_or_group.startswith(f"{group}.")
        ]
        if is_its_own and not beneath and self.changes_only_its_group(group, option):
            path = f"{group}/{option}"
            shipped = shipped_folder("conf") / f"{path}.yaml"
            file = self._own[path] if path in self._own else read_yaml(shipped) or {}
            if "defaults" not in file:
                return copy.deepcopy(file)  # what Hydra would compose, at once
        chooses = [f"{group}={override_text(option)}"] if is_its_own else experiment
        return copy.deepcopy(self._compose([*chooses, *beneath])[0][group])

    def _is_replaced(self, group: str, option: str, parsed: Sequence[Override]) -> bool:
        """Whether the experiment chose another option of a group."""
        experiment = _lines_of("experiment", parsed)
        return bool(experiment) and self._compose(experiment)[1].get(group) not in (None, option)

    def _drop_arguments_of_replaced_targets(
        self, config: dict[str, Any], choices: Choices, parsed: Sequence[Override]
    ) -> None:
        """Remove the values of an option's file where the experiment or the command line has
        replaced its ``_target_``: they are arguments of the old target.
        """
        for group, option in choices.items():
            path, node = f"{group}/{option}", config.get(group)
            file = self._own.get(path) or shipped_options().get(path) or {}
            if not isinstance(node, dict) or file.get("_target_") in (None, node.get("_target_")):
                continue
            experiment = _lines_of("experiment", parsed)
            bare = [f"{name}={_BARE}" for name in _groups() if name != "experiment"]
            stated = self._compose([*experiment, *bare])[0].get(group) if experiment else None
            keys = {override.key_or_group for override in parsed}
            config[group] = {
                key: value
                for key, value in node.items()
                if key == "_target_"
                or key not in file
                or key in (stated or {})
                or f"{group}.{key}" in keys
            }

    def _compose(self, overrides: Sequence[str]) -> tuple[dict[str, Any], Choices]:
        """Cached result of Hydra's, which callers must not change."""
        key = tuple(overrides)
        if key not in self._composed:
            try:
                with self.in_hydra(with_bare_options=f"model={_BARE}" in key):
                    composed = compose("config", [*overrides], return_hydra_config=True)
                choices = {
                    str(group): option
                    for group, option in composed.hydra.runtime.choices.items()
                    if not str(group).startswith("hydra/")
                }
                plain: Any = OmegaConf.to_container(composed)
                del plain["hydra"]
            except Exception as error:  # Hydra takes some files apart without a check
                raise self._explained(error, overrides) from error
            self._composed[key] = plain, choices
        return self._composed[key]

    @contextmanager
    def in_hydra(self, *, with_bare_options: bool = False) -> Iterator[None]:
        """Context in which Hydra's global state is set up for these files.

        Args:
            with_bare_options: whether each group also has the option ``_bare_``, without any key.
        """
        store, hydra = ConfigStore.instance(), GlobalHydra.instance()
        saved = store.repo, hydra.hydra
        store.repo = {**store.repo, **{group: {} for group in _groups()}}
        hydra.clear()
        try:
            for group in _groups() if with_bare_options else ():
                store.store(_BARE, {}, group=group)
            for option, content in self._own.items():
                group, _, name = option.rpartition("/")
                store.store(name, content, group=group, package=self._packages[option])
            with initialize_config_dir(str(shipped_folder("conf")), version_base="1.3"):
                yield
        finally:
            hydra.clear()
            store.repo, hydra.hydra = saved

    def _explained(self, error: Exception, overrides: Sequence[str]) -> ConfigError:
        """An error that Hydra raised while it composed, as one line."""
        text = str(error)
        if option := re.search(r"Could not (?:find|load) '([^']+)'", text):
            group, _, name = option[1].partition("/")
            known = self.options(group)
            return self._refused.get(option[1]) or ConfigError(
                f"{group}={name}: there is no such file{did_you_mean(name, known)}"
                + (f"; there are {', '.join(known)}" if known else "")
            )
        if unknown := re.search(r"Could not override '([^']+)'", text):
            groups = [line for line in overrides if self.options(line.partition("=")[0])]
            config, _ = self._compose(groups if groups != [*overrides] else [])
            keys = [where for where, _, _ in entries(config)]
            return ConfigError(unknown_key_message(unknown[1], keys))
        if isinstance(error, HydraException | OmegaConfBaseException) and text:
            return ConfigError(value_message(error))
        return ConfigError(f"{' '.join(overrides)}: cannot be composed: {value_message(error)}")

    def _check_override(self, override: Override) -> None:
        """Refuse Hydra's own settings, and an override of a config group that names none of its
        options.
        """
        group, line = override.key_or_group, override.input_line
        if group == "hydra.searchpath":
            raise ConfigError(f"{line}: use --config-dir DIR")
        known = self.options(group)
        if not known:
            return
        option = override.value()
        if override.is_add() or override.is_force_add():
            raise ConfigError(f"{line}: write it without a plus")
        if option not in known:
            hint = did_you_mean(option, known) if isinstance(option, str) else ""
            several = (
                f"; to search over several, write {group}=choice(A,B)"
                if isinstance(option, list)
                else ""
            )
            raise ConfigError(
                f"{line}: there is no such file{hint}; there are {', '.join(known)}{several}"
            )

    def _check_command_line_only(
        self, config: Mapping[str, Any], parsed: Sequence[Override]
    ) -> None:
        """Refuse a value from an experiment's files for a key that only the command line, or an
        option that it chooses, may set.
        """
        for key, default in _COMMAND_LINE_ONLY.items():
            found = value_at(config, key)
            if found in (None, default):
                continue
            lines = [*_lines_of(key.partition(".")[0], parsed), *_lines_of(key, parsed)]
            if found != value_at(self._compose(lines)[0], key):
                raise ConfigError(
                    f"{key}: found a value in an experiment's files; set {key}=VALUE on the command"
                    " line: an experiment can come from anyone, and this key says where files are"
                    " written or who is sent what"
                )


def _groups() -> list[str]:
    """The config groups of the shipped folder, outermost only."""
    return list(dict.fromkeys(option.partition("/")[0] for option in shipped_options()))


def _lines_of(key: str, parsed: Sequence[Override]) -> list[str]:
    return [str(override.input_line) for override in parsed if override.key_or_group == key]


def _check_how_files_are_written(config: Mapping[str, Any], choices: Choices) -> None:
    """Refuse what Hydra takes from a file without an error, but that does not do what its author
    meant.
    """
    if allowed := config.get("allowed_targets"):
        raise ConfigError(
            f"allowed_targets: found {allowed} in a file; it is read from the command line only:"
            f" add allowed_targets={override_text(allowed)} if you trust that code"
        )
    for group, option in choices.items():
        if group != "experiment" and isinstance(found := config.get(group), str):
            raise ConfigError(
                f"{group}: found {found!r} in a file where {group}={option} has keys; write an"
                f" entry of the defaults list: override /{group}: {found}"
            )
    if "experiment" in config:
        raise ConfigError(
            f"experiment={choices['experiment']}: the file's first line must be: # @package"
            " _global_"
        )


def _check_content(content: Any, package: str, path: str) -> None:
    """Refuse a file of the user's own that is no configuration, or that reaches out of it."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: found a {type(content).__name__}; write key: value")
    defaults = content.get("defaults", [])
    if not isinstance(defaults, list):
        raise ConfigError(f"{path}: defaults: found a {type(defaults).__name__}; write a list")
    if "hydra" in content or "hydra" in package.split("."):
        raise ConfigError(f"{path}: hydra: a file cannot change Hydra's own settings")
    for where, key, value in entries(content):
        root = where.partition(".")[0]
        for text in (key, value):
            if not isinstance(text, str):
                continue
            option = text.rpartition(" ")[2].removeprefix("/")
            leaves_folder = (
                option.startswith("/") or "://" in option or ".." in re.split(r"[/\\]", option)
            )
            if root == "defaults" and leaves_folder:
                raise ConfigError(
                    f"{path}: defaults: found {text}; name a file in the folder of its group"
                )
            if root == "defaults" and "hydra" in re.split(r"[/@.]", option):
                raise ConfigError(
                    f"{path}: defaults: found {text}: a file cannot change Hydra's own settings"
                )
            # of values that only the user's own function is given
            may_be_plain = root in ("training", "search_space")
            if "${" in _INTERPOLATION.sub("", without_plain_text(text) if may_be_plain else text):
                raise ConfigError(
                    f"{path}: {where}: found ${{ with more than a key; a file may have ${{KEY}};"
                    " what is read from the environment belongs on the command line"
                )


def value_message(error: BaseException) -> str:
    """An error of Hydra, OmegaConf, YAML or the file system as one line, which begins with the key
    if there is one.
    """
    cause = error.__cause__
    if getattr(cause, "full_key", None) or (cause and not str(error)):
        return value_message(cause)  # type: ignore[arg-type]  # not None
    key = getattr(error, "full_key", None)
    text = " ".join(re.split(r"\n\s*full_key:", str(error))[0].split())
    if found := re.search(r"is not a subclass of (\w+?)(?:Config)?\. value: (.*)", text):
        return f"{found[1].lower()}: found {found[2]}; write {found[1].lower()}.KEY=VALUE"
    return f"{key}: {text}" if key else text


def unknown_key_message(key: str, known: Sequence[str]) -> str:
    """What to write in place of a key that no configuration has.

    Args:
        known: the keys of the configuration.
    """
    parent = key.rpartition(".")[0]
    is_argument = f"{parent}._target_" in known
    siblings = [name for name in known if name.startswith(f"{parent}.")] if is_argument else known
    hint = did_you_mean(key, [name for name in siblings if not name.endswith("._target_")])
    added = f"; +{key}=VALUE adds an argument" if is_argument and not hint else ""
    return f"{key}: no such key{hint}; --cfg job prints all keys{added}"
