"""Tab completion of the command line, by Hydra's own plug-ins.

Their shell scripts call ``autotune -sc query=SHELL`` with the line typed so far in ``COMP_LINE``. Hydra completes overrides
only, and reads the whole line; so it is given the overrides up to the cursor, and what else it needs is taken from the flags.
"""

import os
import sys
from pathlib import Path

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf.errors import OmegaConfBaseException

from autotune.config.compose import hydra_composing
from autotune.errors import ConfigError

_FLAGS_OF_A_FOLDER = ("--config-dir", "-cd")
_FLAGS_WITH_A_VALUE = (*_FLAGS_OF_A_FOLDER, "--cfg", "-c", "--shell-completion", "-sc")


def shell_completion(command: str, overrides: list[str], config_dirs: list[str]) -> int:
    """Print what ``install=SHELL``, ``uninstall=SHELL`` or ``query=SHELL`` is to print, and return the exit code.

    Raises:
        ConfigError: another command, another shell, or a command line around it that cannot be completed.
    """
    verb, _, shell = command.partition("=")
    found = {each.provides(): each for each in Plugins.instance().discover(CompletionPlugin)}
    if verb not in ("install", "uninstall", "query") or shell not in found:
        shells = "|".join(sorted(found))
        raise ConfigError(f"-sc {command}: accepted are install=SHELL, uninstall=SHELL and query=SHELL with SHELL {shells}")
    if overrides:
        raise ConfigError(f"-sc {command}: found {' '.join(overrides)} too, accepted is -sc alone")
