"""The folders that come with autotune, and the experiments in them and among the user's own."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_folder(name: str) -> Path:
    """Path of the folder ``conf`` or ``search_spaces``: inside the package if installed, beside
    it in a source checkout.
    """
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def named_files(group: Path) -> list[tuple[str, Path]]:
    """The files of a config group, each with the name that chooses it: with its folder, if it is
    in one beneath the group's.
    """
    try:
        paths = sorted(group.rglob("*.yaml"))
    except OSError:  # such as a name that is too long, which is refused where it is composed
        return []
    return [(path.relative_to(group).with_suffix("").as_posix(), path) for path in paths]


def options(group: str, config_dirs: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Name and purpose (the first line of its comments) of every option of a group, such as
    ``experiment``, the user's own first.
    """
    purposes: dict[str, str] = {}
    for folder in (*map(Path, config_dirs), shipped_folder("conf")):
        for name, path in named_files(folder / group):
            comments = re.findall(r"^#[# ]*(.*)", path.read_text(errors="replace"), re.MULTILINE)
            purposes.setdefault(
                name, next((line for line in comments if line and "@package" not in line), "")
            )
    return list(purposes.items())


def options_help(group: str, config_dirs: Sequence[str] = ()) -> str:
    """List all options of a group with their purposes, as indented lines of a help text."""
    return help_rows(options(group, config_dirs))


def help_rows(rows: Sequence[tuple[str, str]]) -> str:
    """Names with their purposes, as indented lines of a help text in two columns."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {purpose}" for name, purpose in rows)


def require_experiment(is_there: bool, config_dirs: Sequence[str]) -> None:
    """Refuse a command line that names no experiment.

    Raises:
        ConfigError: ``is_there`` is False; the message names all experiments.
    """
    if not is_there:
        names = ", ".join(name for name, _ in options("experiment", config_dirs))
        raise ConfigError(f"no experiment: add experiment=NAME with NAME one of {names}")


def names_experiment(overrides: Sequence[str]) -> bool:
    """Whether the overrides choose an experiment, without composing them."""
    return any(override.startswith(("experiment=", "+experiment=")) for override in overrides)


def dated_name(what: str) -> str:
    """Name of a study that was given none, which is that of a folder: what it tunes, and the
    time.
    """
    name = re.sub(r"[^\w.-]+", "_", what).lstrip("_.-")
    if not re.match(r"[A-Za-z0-9]", name):
        name = f"study_{name}"
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
