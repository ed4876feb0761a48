"""URLs among the paths that a user gives: told apart, shown, and refused where only a path will do."""

import re
from pathlib import Path

from autotune.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|:/)")
"""One slash too: as a path, ``s3:/bucket`` would be a folder of that name."""


def is_url(location: str | Path) -> bool:
    """Whether a location of the user's is a URL, and not a path."""
    return _URL.match(str(location)) is not None


def refuse_url(location: str | Path, key: str, accepted: str = "a folder of this machine") -> None:
    """Refuse a URL where only a path will do, which would otherwise be a folder called ``s3:``.

    Raises:
        ConfigError: with the key, what was found and what is accepted.
    """
    if is_url(location):
        raise ConfigError(f"{key}: found the URL {shown(str(location))}, accepted is {accepted}")


def shown(url: str) -> str:
    """A URL without what may be secret: user and password, and the query that a signed one has."""
    return re.sub(r"//[^/@]*@", "//", url).partition("?")[0] if url.startswith(("http", "ftp", "sftp", "ssh", "smb", "webdav")) else url
