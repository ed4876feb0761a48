"""Files at URLs, through fsspec: fetched to this machine's cache, or written there.

And official files, downloaded by pooch.

The wait for another machine would make a trial slow, or let it count as hung. So code that measures
time registers a pause here, and all pauses are entered while this process waits.
"""

import fcntl
import hashlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autotune.errors import ConfigError, explained
from autotune.files import appending, make_folder
from autotune.redaction import without_secrets

CACHE_VARIABLE = "AUTOTUNE_CACHE"
CONNECT_SECONDS = 10.0
"""Limit in seconds for connecting to a server."""
_READ_SECONDS = 60.0
"""Limit in seconds for a server's silence; the transfer of a whole file has no limit."""
_DATABASE_PORTS = {
    "postgresql": 5432,
    "mysql": 3306,
    "mariadb": 3306,
    "mssql": 1433,
}
_pauses: list[Callable[[], AbstractContextManager[None]]] = []


def is_url(location: str | Path) -> bool:
    """Whether a location is a URL, and not a path.

    One slash is enough: ``s3:/bucket`` is no folder.
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+(::|:/)", str(location)) is not None


def user_path(text: str | Path) -> Path:
    """A path that a user typed, with the home folder for ``~`` and without ``file://``."""
    try:
        return Path(re.sub(r"^(file|local)://", "", str(text))).expanduser()
    except RuntimeError:  # there is no such user
        return Path(text)


def refuse_url(location: str | Path, key: str, accepted: str = "a folder of this machine") -> None:
    """Refuse a URL where only a path is accepted.

    Raises:
        ConfigError: the location is a URL; names the key and what is accepted.
    """
    if is_url(location):
        raise ConfigError(f"{key}: found the URL {without_secrets(str(location))}, use {accepted}")


def is_remote(location: str) -> bool:
    """Whether a location is a URL of another machine: ``file://`` is a path of this one."""
    return is_url(location) and not location.startswith(("file:", "local:"))


def is_file(location: str, key: str) -> bool:
    """Whether there is a file at a path or URL.

    One that there is no permission to look at counts as absent.

    Raises:
        DataError: the URL is malformed, or its machine does not answer.
    """
    if not is_remote(location):
        return user_path(location).is_file()
    with _opened(location, key) as (filesystem, path):
        try:
            return bool(filesystem.info(path)["type"] == "file")
        except (FileNotFoundError, PermissionError) as error:
            if isinstance(error.__cause__, OSError):  # no answer
                raise
            return False


def fetched(location: str, key: str) -> Path:
    """Path of a file on this machine.

    One at a URL is fetched into the cache unless its present version is there.

    Raises:
        DataError: the URL's file does not exist or cannot be read.
    """
    if not is_remote(location):
        return user_path(location)
    with _opened(location, key) as (filesystem, path):
        info = filesystem.info(path)
        version = {name: value for name, value in info.items() if name not in ("time", "atime")}
        digest = hashlib.sha256(f"{location} {version}".encode()).hexdigest()[:20]
        name = urlsplit(location).path.rstrip("/").rpartition("/")[2] or "file"
        folder = make_folder(cache_folder() / digest)
        with appending(folder / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / name).is_file():
                num_bytes = f" ({info['size'] / 1e6:,.1f} MB)" if info.get("size") else ""
                shown = without_secrets(location)
                print(f"fetching {shown}{num_bytes} to {folder}", file=sys.stderr, flush=True)
                filesystem.get_file(path, str(folder / ".part"))
                (folder / ".part").replace(folder / name)
    return folder / name


def download_files(checksums: Mapping[str, str], folder: Path, absent: str) -> None:
    """Download official files into a folder.

    Args:
        checksums: MD5 checksum of each file, by its URL.
        absent: what was looked for and not found, for messages.

    Raises:
        DataError: a file could not be downloaded completely.
    """
    import pooch  # noqa: PLC0415  # only for a download

    pooch.get_logger().setLevel("WARNING")
    downloader = pooch.HTTPDownloader(timeout=(CONNECT_SECONDS, CONNECT_SECONDS))
    for url, md5 in checksums.items():
        name = url.rpartition("/")[2]
        with explained(
            f"{absent}, and downloading {url} to '{folder}' failed",
            advice="; put the files there or set data.root",
        ):
            pooch.retrieve(url, f"md5:{md5}", fname=name, path=folder, downloader=downloader)


def cache_folder() -> Path:
    """Folder of this machine in which fetched files are cached."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return user_path(os.environ.get(CACHE_VARIABLE) or f"{caches}/autotune")


@contextmanager
def paused_while_waiting(pause: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Register a pause for as long as the context lasts: it is entered while this process waits
    for another machine.
    """
    _pauses.append(pause)
    try:
        yield
    finally:
        _pauses.remove(pause)


def kind_of_database(url: str) -> str:
    """Kind of the database that a URL names, such as ``postgresql``, without the driver."""
    return urlsplit(url).scheme.partition("+")[0]


def check_listens(url: str) -> None:
    """Check that a database's server answers, since a client retries for minutes.

    A URL without a host is not checked.

    Raises:
        OSError: nothing listens at the host and port of the URL.
    """
    parts, kind = urlsplit(url), kind_of_database(url)
    if parts.hostname and kind in _DATABASE_PORTS:
        address = parts.hostname, parts.port or _DATABASE_PORTS[kind]
        socket.create_connection(address, timeout=CONNECT_SECONDS).close()


@contextmanager
def _opened(url: str, key: str) -> Iterator[tuple[Any, str]]:
    """File system of a URL and the path in it.

    Any error inside is a DataError of one line, and clocks stand still.
    """
    with ExitStack() as paused:
        for pause in _pauses:
            paused.enter_context(pause())
        paused.enter_context(explained(f"{key}: {url}"))
        import aiohttp  # noqa: PLC0415  # only files at URLs need it
        import fsspec  # noqa: PLC0415  # takes 0.1 s

        if "//" not in url and "::" not in url:
            raise ValueError(f"a URL has two slashes: {url.replace(':/', '://')}")
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=_READ_SECONDS)
        http = {"client_kwargs": {"timeout": timeout, "trust_env": True}}
        filesystem, path = fsspec.url_to_fs(url, **(http if url.startswith("http") else {}))
        filesystem.invalidate_cache()
        yield filesystem, path
