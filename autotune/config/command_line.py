"""The command line that all commands share: Hydra's ``key=value`` overrides, and a few of Hydra's flags.

Hydra composes; its own ``main`` is not used, because it would print mistakes over several lines, exit with 1, and run
callbacks that a configuration names.
"""

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from autotune.collector import spare_imports
from autotune.config.paths import shipped_folder
from autotune.errors import AutotuneError, ConfigError, WorkerError

if TYPE_CHECKING:
    from autotune.config.compose import Composer

EXIT_WORKER_ERROR = 1
EXIT_BAD_INPUT = 2
EXIT_NOT_REACHED = 3
EXIT_INTERRUPTED = 130

COMMANDS = {
    "tune": ("autotune.tune", "find the fastest configuration; the word may be left out"),
    "train": ("autotune.train", "train one configuration"),
    "compare": ("autotune.compare", "compare two configurations"),
    "scale": ("autotune.scale", "measure what more workers bring"),
    "profile": ("autotune.profile", "say where a step's time goes, and which key to try"),
    "diagnose": ("autotune.diagnose", "say what this machine is, gives and cannot run"),
    "export": ("autotune.export", "write what a study found as an experiment"),
    "record": ("autotune.record", "write a study that MLflow keeps as a recording"),
    "replay": ("autotune.replay.__main__", "replay a search over a recording"),
}
"""Module and purpose by name; a module has a function ``NAME_command``, which takes the arguments and returns the exit code."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A parsed command line."""

    overrides: tuple[str, ...]
    config_dirs: tuple[str, ...]
    cfg: str | None
    """Print this part of the configuration (job, hydra, all) and run nothing."""
    resolve: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help shows what is accepted")


def parse_command_line(program: str, purpose: str, epilog: str, arguments: Sequence[str], *, takes: str = "experiment=NAME") -> CommandLine:
    """Parse flags and overrides; prints help or version and exits where asked. What is fetched from then on is said on stderr.

    Raises:
        ConfigError: an unknown flag.
    """
    parser = _Parser(
        prog=program,
        usage=f"{program} [flags] {takes} [key=value ...]",
        description=purpose,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="any key of the configuration, in Hydra's grammar")
    parser.add_argument(
        "--config-dir",
        "-cd",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of your own config groups, searched too",
    )
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"), help="print the composed configuration and run nothing")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: interpolations resolved")
    parser.add_argument("--multirun", "-m", action="store_true", help="taken for Hydra's sake: sweeps are read without it")
    parser.add_argument("--version", action="version", version=f"autotune {_version()}")
    parser.add_argument(
        "--shell-completion",
        "-sc",
        metavar="COMMAND",
        help='tab completion: eval "$(autotune -sc install=bash)" (bash, zsh, fish)',
    )
    found = parser.parse_intermixed_args(list(arguments))
    if found.shell_completion is not None:
        from autotune.config.completion import shell_completion  # noqa: PLC0415  # loads Hydra's plug-ins

        sys.exit(shell_completion(found.shell_completion, [*found.overrides], found.config_dir))
    from autotune.remote.cache import say_what_is_fetched  # noqa: PLC0415  # after --help

    say_what_is_fetched()
    return CommandLine(overrides=tuple(found.overrides), config_dirs=tuple(found.config_dir), cfg=found.cfg, resolve=found.resolve)


def composer_of(line: CommandLine, overrides: Sequence[str]) -> "Composer":
    """What composes the configuration of a command line, with the user's own modules importable.

    Args:
        line: the command line, for its folders.
        overrides: those of the command line that are keys of the configuration.

    Raises:
        ConfigError: a folder that is not there, or an override that does not parse.
    """
    from autotune.config.compose import Composer  # noqa: PLC0415  # after --help; imports Hydra

    import_user_code_from(line.config_dirs)
    return Composer(overrides, line.config_dirs)


def print_config(line: CommandLine, composer: "Composer") -> bool:
    """Print the configuration where ``--cfg`` asks for it, and say whether it did."""
    if line.cfg:
        print(composer.config_yaml(line.cfg, resolve=line.resolve), end="")
    return line.cfg is not None


def experiments(config_dirs: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Name and first comment line of every experiment there is."""
    found: dict[str, str] = {}
    for folder in (*map(Path, config_dirs), shipped_folder("conf")):
        for path in sorted((folder / "experiment").glob("*.yaml")):
            comments = (line.lstrip("# ").strip() for line in path.read_text(errors="replace").splitlines() if line.startswith("#"))
            found.setdefault(path.stem, next((line for line in comments if line and "@package" not in line), ""))
    return list(found.items())


def experiments_help(config_dirs: Sequence[str] = ()) -> str:
    """The experiments as indented lines of a help text."""
    rows = experiments(config_dirs)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {purpose}" for name, purpose in rows)


def commands_help() -> str:
    """The commands as indented lines of a help text."""
    return "\n".join(f"  autotune {name:<9} {purpose}" for name, (_, purpose) in COMMANDS.items())


def require_experiment(is_there: bool, config_dirs: Sequence[str]) -> None:
    """Refuse a command line that names no experiment.

    Raises:
        ConfigError: with the names there are.
    """
    if not is_there:
        names = ", ".join(name for name, _ in experiments(config_dirs))
        raise ConfigError(f"no experiment; accepted is experiment=NAME with NAME one of {names}")


def names_experiment(overrides: Sequence[str]) -> bool:
    """Whether overrides pick an experiment, told without composing them."""
    return any(each.startswith(("experiment=", "+experiment=")) for each in overrides)


def import_user_code_from(config_dirs: Sequence[str]) -> list[str]:
    """Make modules of the user's own importable, and return where they may lie.

    That is the working folder, and the folders of ``--config-dir`` and those around them.
    """
    folders = [str(Path.cwd())]
    for each in config_dirs:
        folder = Path(each).expanduser().resolve()
        folders += [str(folder), str(folder.parent)]
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    return folders


def run_main(command: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run an entry point on the process's own command line, and end the process with its exit code."""
    spare_imports()
    sys.exit(run_command(command, sys.argv[1:]))


def run_command(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run an entry point; any failure that autotune explains becomes one line on stderr and exit code 2.

    Code of the user's that failed is told with its traceback, and exit code 1.
    """
    try:
        return command(arguments)
    except WorkerError as error:
        print(f"autotune: {error}\n{error.traceback_text.rstrip()}", file=sys.stderr)
        return EXIT_WORKER_ERROR
    except AutotuneError as error:
        print(f"autotune: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("autotune: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _version() -> str:
    try:
        return importlib.metadata.version("autotune")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
