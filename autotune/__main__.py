"""The console script ``autotune``, also ``python -m autotune``: runs the command that its first
argument names, or tunes without one.
"""

import importlib
import re
from collections.abc import Sequence

from autotune.config.command_line import COMMANDS, run_main
from autotune.errors import ConfigError, did_you_mean


def autotune_command(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name, or else ``tune``, and return its exit code.

    Raises:
        ConfigError: the first argument is a word that names no command.
    """
    name, rest = (
        (arguments[0], arguments[1:])
        if arguments and re.fullmatch(r"\w+", arguments[0])
        else ("tune", arguments)
    )
    if name not in COMMANDS:
        raise ConfigError(
            f"{name}: no such command{did_you_mean(name, COMMANDS)}; there are"
            f" {', '.join(COMMANDS)}, and key=value alone tunes"
        )
    command = getattr(importlib.import_module(COMMANDS[name][0]), f"{name}_command")
    exit_code: int = command(rest)
    return exit_code


def main() -> None:
    """Entry point of the console script and of ``python -m autotune``."""
    run_main(autotune_command)


if __name__ == "__main__":
    main()
