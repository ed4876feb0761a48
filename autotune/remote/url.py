"""URLs and paths that a user gives: URLs of files and of databases are recognised, and refused where only a path is accepted."""

import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from autotune.errors import ConfigError

CONNECT_SECONDS = 10.0
"""Limit in seconds for connecting to a server."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|:/)")
"""Start of a URL. One slash is enough: otherwise ``s3:/bucket`` would be the path of a folder named ``s3:``."""
_DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306, "mssql": 1433, "oracle": 1521}


def is_url(location: str | Path) -> bool:
    """Whether a location is a URL, and not a path."""
    return _URL.match(str(location)) is not None


def user_path(text: str | Path) -> Path:
    """A path that a user typed, with the home folder for ``~``; as it is typed if there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def refuse_url(location: str | Path, key: str, accepted: str = "a folder of this machine") -> None:
    """Refuse a URL where only a path is accepted; otherwise it would be taken for a folder named ``s3:``.

    Raises:
        ConfigError: the location is a URL; names the key, the URL and what is accepted.
    """
    if is_url(location):
        raise ConfigError(f"{key}: found the URL {location}, accepted is {accepted}")


def kind_of_database(url: str) -> str:
    """Kind of the database that a URL names, such as ``postgresql``, without the driver."""
    return urlsplit(url).scheme.partition("+")[0]


def check_listens(url: str) -> None:
    """Check that a database's server answers, since without it a database client retries for minutes; a URL without a host is not checked.

    Raises:
        OSError: nothing listens at the host and port of the URL.
    """
    parts, kind = urlsplit(url), kind_of_database(url)
    if parts.hostname and kind in _DATABASE_PORTS:
        socket.create_connection((parts.hostname, parts.port or _DATABASE_PORTS[kind]), timeout=CONNECT_SECONDS).close()
