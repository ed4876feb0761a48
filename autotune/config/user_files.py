"""Files of the user's own configuration folders, checked before Hydra makes a configuration of
them.

An experiment file can come from anyone. Hydra reads such files through ``UserFiles``, the one place
that all of them pass. It reads them by ``autotune.yaml_files`` and refuses what would reach out of
the configuration: Hydra's own settings, files outside of the folder, and resolvers such as
``${oc.env:SECRET}``.
"""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from autotune.config.build import entries
from autotune.config.overrides import without_plain_text
from autotune.errors import ConfigError
from autotune.yaml_files import load_yaml, read_yaml

SAID_BY_COMMAND: Mapping[str, Any] = {
    "study.folder": "outputs",
    "checkpoint.folder": None,
    "search.storage": None,
    "tracking.uri": None,
    "cluster.address": None,
}
"""Keys that say where files are written or who is sent what, with their defaults: the files of
an experiment cannot set them."""

_SCHEME = "autotune-user-files"
_INTERPOLATION = re.compile(r"\$\{[\w.\[\]/-]+\}")
_HEADER_BYTES = 512


class UserFiles(FileConfigSource):
    """Hydra's source of configuration files for a folder of the user's own."""

    @staticmethod
    def scheme() -> str:
        """What locations of such a folder begin with."""
        return _SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Read and check a file.

        Raises:
            ConfigError: the file cannot be read, exceeds a limit, or says what it may not; names
                the file and what is accepted.
        """
        path = Path(self.path) / self._normalize_file_name(config_path)
        if not path.is_file():
            raise ConfigLoadError(f"Config not found : {path}")
        content = read_yaml(path)
        with path.open(encoding="utf-8") as file:
            # as FileConfigSource does
            header = ConfigSource._get_header_dict(file.read(_HEADER_BYTES))  # noqa: SLF001
        content = {} if content is None else content
        _check_content(content, header.get("package") or "", str(path))
        return ConfigResult(
            config=OmegaConf.create(content),
            path=f"{_SCHEME}://{self.path}",
            provider=self.provider,
            header=header,
        )


def content_of_text(text: str, where: str) -> dict[str, Any]:
    """Content of an experiment that lies in no file, read and checked as one.

    ``where`` names it in messages.

    Raises:
        ConfigError: as ``UserFiles.load_config`` raises it.
    """
    content = load_yaml(text, where)
    _check_content(content, "_global_", where)
    return dict(content)


def location_of(folder: Path) -> str:
    """A folder of the user's own as an entry of Hydra's search path."""
    return f"{_SCHEME}://{folder}"


def register_user_files() -> None:
    """Make ``UserFiles`` known to Hydra, after Hydra's plug-ins."""
    Plugins.instance().register(UserFiles)


def leaves_folder(name: str) -> bool:
    """Whether the name of an option is a path that can lead out of its group's folder."""
    return (
        ".." in PurePosixPath(name.replace("\\", "/")).parts
        or name.startswith("/")
        or "://" in name
    )


def _check_content(content: Any, package: str, path: str) -> None:
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{path}: found a {type(content).__name__}, accepted is a mapping of keys to values"
        )
    defaults = content.get("defaults", [])
    if not isinstance(defaults, list):
        raise ConfigError(
            f"{path}: defaults: found a {type(defaults).__name__}, accepted is a list"
        )
    if "hydra" in content or package.partition(".")[0] == "hydra":
        raise ConfigError(
            f"{path}: hydra: found settings of Hydra's own, accepted are autotune's keys"
        )
    for entry in defaults:
        _check_default(entry, path)
    for where, key, value in entries(content):
        # values that only the user's own function is given
        may_be_plain = where.partition(".")[0] in ("training", "search_space")
        for text in (key, value):
            if isinstance(text, str) and "${" in _INTERPOLATION.sub(
                "", without_plain_text(text) if may_be_plain else text
            ):
                raise ConfigError(
                    f"{path}: {where}: found ${{ with more than a key, accepted in a file is"
                    " ${KEY}; what is read from the environment belongs on the command line"
                )


def _check_default(entry: Any, path: str) -> None:
    """Refuse an entry of a defaults list that chooses a file outside of the folder, or an option
    of Hydra's own.
    """
    for group, option in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
        options = option if isinstance(option, list) else [option]
        texts = [str(text) for text in (group, *options)]
        if any(leaves_folder(text.rpartition(" ")[2].lstrip("/")) for text in texts):
            raise ConfigError(
                f"{path}: defaults: found {entry}, accepted are names of files in the folder of"
                " their group"
            )
        if any(re.search(r"(^|[\s/@])hydra([/@.]|$)", text) for text in texts):
            raise ConfigError(
                f"{path}: defaults: found {entry}, accepted are groups of autotune's, not"
                " Hydra's own"
            )
