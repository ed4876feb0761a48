"""Tab completion of the command line, by Hydra's completion plug-ins.

The plug-ins' shell scripts call ``autotune -sc query=SHELL`` with the line typed so far in
``COMP_LINE``. Hydra completes only overrides, but reads the whole line, so it is given a line of
the overrides up to the cursor.
"""

import contextlib
import os
import sys
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf.errors import OmegaConfBaseException

from autotune.config.command_line import COMMANDS
from autotune.config.config_files import ConfigFiles
from autotune.errors import ConfigError

_FLAGS_OF_A_FOLDER = ("--config-dir", "-cd")
_FLAGS_WITH_A_VALUE = (*_FLAGS_OF_A_FOLDER, "--cfg", "-c", "--shell-completion", "-sc")


def shell_completion(command: str) -> int:
    """Run ``install=SHELL`` or ``query=SHELL``, which print for the shell; return the exit code.

    Raises:
        ConfigError: the command or shell is unknown, or a ``.py`` file is run, which shells cannot
            complete.
    """
    verb, _, shell = command.partition("=")
    plugin_classes: Any = Plugins.instance().discover(CompletionPlugin)
    plugins = {plugin_class.provides(): plugin_class for plugin_class in plugin_classes}
    if verb not in ("install", "query") or shell not in plugins:
        raise ConfigError(
            f"-sc: found {command!r}; use install= or query= with {', '.join(sorted(plugins))}"
        )
    if verb == "install" and sys.argv[0].endswith(".py"):
        raise ConfigError(
            f'-sc {command}: shells complete the installed command: eval "$(autotune -sc'
            f' {command})"'
        )
    line = os.environ.get("COMP_LINE", "")
    words, folders = _typed(line[: int(os.environ.get("COMP_POINT") or len(line))])
    if verb == "query" and (
        commands := [
            name for name in COMMANDS if len(words) == 1 and words[0] and name.startswith(words[0])
        ]
    ):
        print(" ".join(commands))
        return 0
    # a line that does not compose has no completions
    with (
        contextlib.suppress(
            ConfigError, HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError
        ),
        ConfigFiles(folders).in_hydra(),
    ):
        plugin = plugins[shell](GlobalHydra.instance().config_loader())
        if verb == "install":
            plugin.install()
        elif words:
            os.environ["COMP_LINE"] = " ".join(("autotune", *words))
            plugin.query(config_name="config")
    return 0


def _typed(line: str) -> tuple[list[str], list[str]]:
    """The words of a line up to the cursor, without flags and the command, and the folders of
    ``--config-dir``.

    There are no words where the cursor is at a flag or its value, which the shell itself completes.
    """
    words = line.split()[1:] + ([""] if line.endswith(" ") else [])
    words = words[1:] if len(words) > 1 and words[0] in COMMANDS else words
    typed, folders = [], []
    for flag, word in zip(["", *words], words, strict=False):
        is_value = flag in _FLAGS_WITH_A_VALUE
        folders += [word] if flag in _FLAGS_OF_A_FOLDER else []
        typed += [] if is_value or word.startswith("-") else [word]
    is_at_flag = bool(words) and (not typed or words[-1] != typed[-1])
    return ([] if is_at_flag else typed), folders
