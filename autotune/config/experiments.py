"""The configuration files and search spaces that come with autotune, and the experiments among them and among the user's own."""

from collections.abc import Sequence
from pathlib import Path

from autotune.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_folder(name: str) -> Path:
    """Path of the folder ``conf`` or ``search_spaces``: inside the package if installed, beside it in a source checkout."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def experiments(config_dirs: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Name and purpose (the first line of its comments) of every experiment, the user's own first."""
    purposes: dict[str, str] = {}
    for folder in (*map(Path, config_dirs), shipped_folder("conf")):
        for path in sorted((folder / "experiment").glob("*.yaml")):
            comments = (line.lstrip("# ").strip() for line in path.read_text(errors="replace").splitlines() if line.startswith("#"))
            purposes.setdefault(path.stem, next((line for line in comments if line and "@package" not in line), ""))
    return list(purposes.items())


def experiments_help(config_dirs: Sequence[str] = ()) -> str:
    """List all experiments with their purposes, as indented lines of a help text."""
    rows = experiments(config_dirs)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {purpose}" for name, purpose in rows)


def require_experiment(is_there: bool, config_dirs: Sequence[str]) -> None:
    """Refuse a command line that names no experiment.

    Raises:
        ConfigError: ``is_there`` is False; the message names all experiments.
    """
    if not is_there:
        names = ", ".join(name for name, _ in experiments(config_dirs))
        raise ConfigError(f"no experiment; accepted is experiment=NAME with NAME one of {names}")


def names_experiment(overrides: Sequence[str]) -> bool:
    """Whether the overrides choose an experiment, without composing them."""
    return any(override.startswith(("experiment=", "+experiment=")) for override in overrides)
