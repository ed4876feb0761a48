"""Folders of the configuration files and search spaces that come with autotune."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_folder(name: str) -> Path:
    """Path of the folder ``conf`` or ``search_spaces``: inside the package if installed, beside it in a source checkout."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
