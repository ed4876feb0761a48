"""Data files on this machine: what stands for ``autotune.remote`` and for downloads in a stand-alone script."""

import os
from pathlib import Path
from typing import Any

from autotune.errors import DataError


class RemotePath:
    """Type of files at URLs; a script has none."""


def located(location: str, key: str) -> Path:
    """The path of a file or folder."""
    return Path(os.path.expanduser(location))  # noqa: PTH111  # as it is if there is no such user


def fetched(path: Path) -> Path:
    """The path itself: the file is on this machine."""
    return path


def obtain(data_set: Any, folder: Path, *, root: Path, download: bool) -> None:
    """Refuse to go on without the files of a data set.

    Raises:
        DataError: always.
    """
    raise DataError(f"no {data_set.name} under '{root}' (accepted: {data_set.accepted})")
