"""Data files on this machine: what stands for ``autotune.remote`` in a stand-alone script."""

from collections.abc import Mapping
from pathlib import Path

from autotune.errors import DataError


def is_remote(location: str) -> bool:
    """False: a script reads files of its machine."""
    return False


def is_file(location: str, key: str) -> bool:
    """Whether there is a file at a path."""
    return fetched(location, key).is_file()


def files_in(location: str, key: str) -> list[str]:
    """Locations of the files in a folder."""
    return [str(path) for path in sorted(fetched(location, key).iterdir())]


def fetched(location: str, key: str) -> Path:
    """The path of a file."""
    return Path(location).expanduser()


def download_files(checksums: Mapping[str, str], folder: Path, absent: str) -> None:
    """Refuse to continue without the files of a data set.

    Raises:
        DataError: always.
    """
    raise DataError(absent)
