"""URLs among the locations that a user gives: recognised, shown without secrets, and refused where only a path is accepted."""

import re
from pathlib import Path

from autotune.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|:/)")
"""Start of a URL. One slash is enough: otherwise ``s3:/bucket`` would be the path of a folder named ``s3:``."""


def is_url(location: str | Path) -> bool:
    """Whether a location is a URL, and not a path."""
    return _URL.match(str(location)) is not None


def refuse_url(location: str | Path, key: str, accepted: str = "a folder of this machine") -> None:
    """Refuse a URL where only a path is accepted; otherwise it would be taken for a folder named ``s3:``.

    Raises:
        ConfigError: the location is a URL; names the key, the URL and what is accepted.
    """
    if is_url(location):
        raise ConfigError(f"{key}: found the URL {shown(str(location))}, accepted is {accepted}")


def shown(url: str) -> str:
    """A URL without its parts that may be secret: user, password, and the query, which holds a signed URL's signature."""
    return re.sub(r"//[^/@]*@", "//", url).partition("?")[0] if url.startswith(("http", "ftp", "sftp", "ssh", "smb", "webdav")) else url
