"""A file or folder at a URL, by fsspec: looked at, copied here and written there, with every failure said in one line.

``located`` is the way in: what reads a path of the user's takes a ``Path`` or a ``RemotePath`` of it, and both say in the same words
what is there. ``file://`` is a path like any other.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from autotune.errors import DataError
from autotune.remote.clock_pause import waiting
from autotune.remote.url import is_url, shown

_CONNECT_SECONDS = 10.0
"""How long an HTTP server may take to be connected to."""
_READ_SECONDS = 60.0
"""How long it may be silent; a whole file may take as long as it takes."""

_OF_THIS_MACHINE = ("file://", "local://")
_APPEARS_WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "hf", "http", "https"})
"""Protocols whose files are seen once they are whole; with others a file gets its name when it is."""
_FORBIDDEN = (401, 403)
_ABSENT = (404, 410)
"""What HTTP servers answer."""

_VERSION_FIELDS = frozenset(
    {
        "size", "etag", "content-md5", "content_md5", "md5", "md5hash", "md5checksum", "checksum", "digest", "crc32c", "generation",
        "versionid", "version_id", "blob_id", "oid", "mtime", "modified", "last-modified", "last_modified", "lastmodified",
        "modificationtime", "updated", "created",
    }
)  # fmt: skip
"""What file systems call that by which a changed file is told, in lower case; others, such as an owner, change without the content."""


def located(location: str, key: str) -> "Path | RemotePath":
    """What a path or URL of the user's names.

    Args:
        location: of a file or a folder.
        key: of the configuration, for messages.

    Raises:
        DataError: a URL whose protocol is not known, or needs a package that is not installed.
    """
    if not is_url(location):
        return Path(location).expanduser()
    here = next((each for each in _OF_THIS_MACHINE if location.startswith(each)), None)
    if here is not None:
        return Path(location.removeprefix(here)).expanduser()
    protocol, _, rest = location.partition(":")
    if not rest.startswith(("//", ":")):
        raise DataError(f"{key}: found {location}, accepted is a path, or a URL such as {protocol}://{rest.lstrip('/')}")
    return RemotePath.opened(location, key)


class RemotePath:
    """A file or folder at a URL, which need not be there. Its verbs wait for another machine: see ``autotune.remote.clock_pause``."""

    def __init__(self, filesystem: Any, path: str, url: str, key: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self._key = key
        self.url = url
        self._denied: list[str] = []

    @classmethod
    def opened(cls, url: str, key: str) -> "RemotePath":
        """The place that a URL names; what it holds is looked at anew, whatever this process was told of it before.

        Raises:
            DataError: the protocol is not known, or its package is not installed.
        """
        with waiting():  # importing what a protocol needs is a part of fetching, too
            return cls._opened(url, key)

    @classmethod
    def _opened(cls, url: str, key: str) -> "RemotePath":
        import fsspec  # noqa: PLC0415  # a tenth of a second, and --help does without it

        protocol = re.split("::|:/", url, maxsplit=1)[0]
        if protocol not in fsspec.available_protocols():
            close = difflib.get_close_matches(protocol, fsspec.available_protocols(), n=1)
            guess = f" (did you mean {close[0]}?)" if close else ""
            raise DataError(
                f"{key}: {shown(url)}: there is no protocol {protocol!r}{guess}; accepted are those of fsspec: s3, gs, az, hf, ..."
            )
        try:
            filesystem, path = fsspec.url_to_fs(url, **_settings(protocol))
        except ImportError as error:
            raise DataError(f"{key}: {shown(url)}: {_what_to_install(protocol, error)}") from error
        except Exception as error:
            raise DataError(f"{key}: {shown(url)}: cannot be opened: {_line(error)}") from error
        filesystem.invalidate_cache()
        return cls(filesystem, path, url, key)

    def __truediv__(self, name: str) -> "RemotePath":
        child = RemotePath(self._filesystem, f"{self._path.rstrip('/')}/{name}", f"{self.url.rstrip('/')}/{name}", self._key)
        child._denied = self._denied
        return child if name != "." else self

    def __str__(self) -> str:
        return shown(self.url)

    @property
    def name(self) -> str:
        """The last part of the path."""
        path = re.sub(r"^https?://[^/]*|[?].*", "", self._path) if self.url.startswith("http") else self._path
        return path.rstrip("/").rpartition("/")[2]

    @property
    def parent_url(self) -> str:
        """The URL of the folder that this lies in."""
        url, mark, query = self.url.partition("?") if self.url.startswith("http") else (self.url, "", "")
        return url.rstrip("/").rpartition("/")[0] + mark + query

    def lacks(self, what: str, accepted: str) -> DataError:
        """The error that what was looked for is not here; it says so where some of it could not be looked at."""
        denied = f", and no permission to look at {self._denied[0]}" if self._denied else ""
        return DataError(f"{self._key}: no {what} under {self} (accepted: {accepted}){denied}")

    def is_file(self) -> bool:
        """Whether a file is there. One that may not be looked at counts as absent, since some stores answer so where there is none.

        Raises:
            DataError: the other machine does not answer.
        """
        try:
            with self._explained("looked at"):
                return bool(self._filesystem.info(self._path)["type"] == "file")
        except _AbsentError:
            return False
        except _DeniedError:
            self._denied.append(str(self))
            return False

    def is_folder(self) -> bool:
        """Whether a folder is there; of a web server's, which are files too, those whose URL ends with a slash.

        Raises:
            DataError: it cannot be looked at, or there is nothing.
        """
        with self._explained("looked at"):
            if self.url.startswith("http"):
                return self.url.endswith("/")
            return bool(self._filesystem.info(self._path)["type"] == "directory")

    def files(self) -> list["RemotePath"]:
        """The files that lie in this folder, by name.

        Raises:
            DataError: they cannot be listed.
        """
        with self._explained("listed"):
            found = self._filesystem.ls(self._path, detail=True)
        names = {each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "file"}
        return [self / name for name in sorted(names)]

    def version(self) -> Mapping[str, str]:
        """What tells this file from another that takes its place: size, checksum, time, as far as the other machine says.

        Raises:
            DataError: there is no such file, or it cannot be looked at.
        """
        with self._explained("looked at"):
            info = self._filesystem.info(self._path)
        if info["type"] != "file" or not self.name:
            raise DataError(f"{self._key}: {self}: is a folder, accepted is a file")
        fields = {str(key).lower(): value for key, value in info.items()}
        return {key: str(value) for key, value in sorted(fields.items()) if key in _VERSION_FIELDS and value is not None}

    def copy_to(self, path: Path, callback: Any = None) -> None:
        """Copy the file into one of this machine, whole or with an error.

        Args:
            path: of the file, written in place.
            callback: of fsspec's, told of the progress.

        Raises:
            DataError: there is no such file, it cannot be read, or did not arrive whole.
        """
        size = self.version().get("size")
        with self._explained("read"):
            self._filesystem.get_file(self._path, str(path), **({"callback": callback} if callback else {}))
        if size is not None and path.stat().st_size != int(size):
            raise DataError(f"{self._key}: {self}: {path.stat().st_size} bytes arrived of {size}; the same command tries again")

    def put(self, path: Path) -> None:
        """Write a copy of a file of this machine, so that a reader sees the old file or the new one.

        Raises:
            DataError: it cannot be written.
        """
        with self._explained("written"):
            if not _APPEARS_WHOLE.isdisjoint(_protocols(self._filesystem)):
                method = {"method": "put"} if self.url.startswith("http") else {}
                self._filesystem.put_file(str(path), self._path, **method)
                return
            folder, _, name = self._path.rpartition("/")
            part = f"{folder}/.{name}.part"
            self._filesystem.makedirs(folder or "/", exist_ok=True)
            try:
                self._filesystem.put_file(str(path), part)
                self._filesystem.mv(part, self._path)
            except BaseException:
                with suppress(Exception):
                    self._filesystem.rm_file(part)
                raise

    def remove(self) -> None:
        """Take the file away, where that is allowed; it is of no harm otherwise."""
        with waiting(), suppress(Exception):
            self._filesystem.rm_file(self._path)

    @contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        """Turn whatever a file system raises into one line."""
        with waiting():
            try:
                yield
            except Exception as error:
                reason = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ is not None else error
                status = getattr(reason, "status", None)
                if status in _FORBIDDEN or isinstance(reason, PermissionError):
                    raise _DeniedError(f"{self._key}: {self}: cannot be {done}: no permission") from error
                if status in _ABSENT or isinstance(reason, FileNotFoundError):
                    raise _AbsentError(f"{self._key}: {self}: there is no such file or folder") from error
                said = f"the server answered {status}" if isinstance(status, int) else _line(reason)
                raise DataError(f"{self._key}: {self}: cannot be {done}: {said}") from error


class _AbsentError(DataError):
    """There is no such file."""


class _DeniedError(DataError):
    """It may not be looked at."""


def _protocols(filesystem: Any) -> tuple[str, ...]:
    return (filesystem.protocol,) if isinstance(filesystem.protocol, str) else tuple(filesystem.protocol)


def _settings(protocol: str) -> dict[str, Any]:
    """What a file system is made with, where fsspec's own configuration does not say: its HTTP ends any transfer after five minutes."""
    if protocol not in ("http", "https"):
        return {}
    try:
        import aiohttp  # noqa: PLC0415  # only this protocol needs it
    except ImportError:
        return {}  # fsspec says what to install
    from fsspec.config import conf  # noqa: PLC0415  # after the check that it is wanted

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
    settings = {"client_kwargs": {"timeout": timeout, "trust_env": True}, "headers": {"Accept-Encoding": "identity"}}
    return {key: value for key, value in settings.items() if key not in conf.get(protocol, {})}


def _what_to_install(protocol: str, error: ImportError) -> str:
    from fsspec.registry import known_implementations  # noqa: PLC0415  # after the check that it is wanted

    known = known_implementations.get(protocol, {})
    package = known.get("class", "fsspec").partition(".")[0]
    if package != "fsspec":
        return f"its package is not installed: pip install {package}"
    return f"a package is not installed: {known.get('err') or _line(error)}"


def _line(error: BaseException) -> str:
    """An error as one line: its class too, where its text alone says little."""
    text = " ".join((getattr(error, "strerror", None) or str(error)).split())
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")
