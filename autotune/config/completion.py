"""Tab completion of the command line, by Hydra's completion plug-ins.

The plug-ins' shell scripts call ``autotune -sc query=SHELL`` with the line typed so far in
``COMP_LINE``. Hydra completes only overrides, but reads the whole line, so it is given a line that
has the overrides up to the cursor, and the folders of ``--config-dir`` as an override.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf.errors import OmegaConfBaseException

from autotune.config.command_line import COMMANDS
from autotune.config.config_files import hydra_set_up
from autotune.config.user_files import location_of
from autotune.errors import ConfigError
from autotune.remote import user_path

_FLAGS_OF_A_FOLDER = ("--config-dir", "-cd")
_FLAGS_WITH_A_VALUE = (*_FLAGS_OF_A_FOLDER, "--cfg", "-c", "--shell-completion", "-sc")


def shell_completion(command: str, overrides: list[str], config_dirs: list[str]) -> int:
    """Run ``install=SHELL``, ``uninstall=SHELL`` or ``query=SHELL``, which print for the shell, and
    return the exit code.

    Raises:
        ConfigError: the command or shell is unknown, more is given beside it, or a ``.py`` file is
            run, which shells cannot complete.
    """
    verb, _, shell = command.partition("=")
    plugin_classes: Any = Plugins.instance().discover(CompletionPlugin)
    plugins = {plugin_class.provides(): plugin_class for plugin_class in plugin_classes}
    if (
        verb not in ("install", "uninstall", "query")
        or shell not in plugins
        or overrides
        or config_dirs
    ):
        found = " ".join((command, *overrides, *config_dirs))
        raise ConfigError(
            f"-sc: found {found!r}, accepted are install=, uninstall= or query= with"
            f" {', '.join(sorted(plugins))}"
        )
    if verb != "query" and sys.argv[0].endswith(".py"):
        raise ConfigError(
            f'-sc {command}: shells complete the installed command: eval "$(autotune -sc'
            f' {command})"'
        )
    with hydra_set_up():
        plugin = plugins[shell](GlobalHydra.instance().config_loader())
        if verb == "install":
            plugin.install()
        elif verb == "uninstall":
            if shell != "fish":
                # Hydra removes only the function that this rule calls
                print(f"complete -r {Path(sys.argv[0]).name} 2> /dev/null")
            plugin.uninstall()
        elif commands := _commands_typed(_line_to_cursor()):
            print(" ".join(commands))
        elif (overrides_typed := _overrides_typed(_line_to_cursor())) is not None:
            os.environ["COMP_LINE"] = overrides_typed
            with contextlib.suppress(
                ConfigError,
                HydraException,
                OmegaConfBaseException,
                yaml.YAMLError,
                OSError,
                ValueError,
            ):
                # a line that does not compose has no completions
                plugin.query(config_name="config")
    return 0


def _line_to_cursor() -> str:
    line = os.environ.get("COMP_LINE", "")
    return line[: int(os.environ.get("COMP_POINT") or len(line))]


def _commands_typed(line: str) -> list[str]:
    """Commands that complete the line's first word.

    None if the cursor is past that word or no command begins with it.
    """
    words = line.split()[1:]
    return (
        [name for name in COMMANDS if name.startswith(words[0])]
        if len(words) == 1 and not line.endswith(" ")
        else []
    )


def _overrides_typed(line: str) -> str | None:
    """The line for Hydra's plug-in, without flags.

    None if the cursor is at a flag or its value, which the shell itself completes.
    """
    words = line.split()[1:] + ([""] if line.endswith(" ") else [])
    words = words[1:] if len(words) > 1 and words[0] in COMMANDS else words
    overrides, folders, flag = [], [], ""
    for word in words:
        if flag in _FLAGS_WITH_A_VALUE:
            folders += [word] if flag in _FLAGS_OF_A_FOLDER else []
            flag, is_at_flag = "", True
        else:
            flag = word if word.startswith("-") else ""
            is_at_flag = bool(flag)
            overrides += [] if flag else [word]
    if not words or is_at_flag:
        return None
    paths = ",".join(f"'{location_of(user_path(folder).resolve())}'" for folder in folders)
    return " ".join(("autotune", f"hydra.searchpath=[{paths}]", *overrides))
