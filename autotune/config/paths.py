"""Where the configuration and the search spaces that come with autotune lie."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_folder(name: str) -> Path:
    """``conf`` or ``search_spaces``: inside the package once installed, beside it in a source checkout."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
