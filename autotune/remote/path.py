"""Files and folders at URLs, through fsspec: looked at, copied to this machine and written there; every failure is one line.

Code that reads a location of the user's calls ``located``, which gives a ``Path`` or a ``RemotePath``. A ``file://`` URL gives a ``Path``.
The wait for another machine would make a trial slow, or let it count as hung. So code that measures time registers a pause here, all of
which are entered while this process waits, and neither side needs to know the other.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from autotune.errors import DataError
from autotune.hiding import without_secrets
from autotune.remote.url import CONNECT_SECONDS, is_url, user_path

_READ_SECONDS = 60.0
"""Limit in seconds for an HTTP server's silence; the transfer of a whole file has no limit."""

_APPEARS_WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "hf", "http", "https"})
"""Protocols whose files are visible only once they are complete; with others, a file is written under another name and then renamed."""

_VERSION_FIELDS = frozenset(
    {
        "size", "etag", "content-md5", "content_md5", "md5", "md5hash", "md5checksum", "checksum", "digest", "crc32c", "generation",
        "versionid", "version_id", "blob_id", "oid", "mtime", "modified", "last-modified", "last_modified", "lastmodified",
        "modificationtime", "updated", "created",
    }
)  # fmt: skip
"""Names in lower case, across file systems, of fields that change with a file's content; others, such as an owner, change without it."""

_Pause = Callable[[], AbstractContextManager[None]]
"""Makes a context in which one clock or deadline is paused."""
_pauses: list[_Pause] = []
_is_waiting = False
"""Whether the registered pauses are entered now."""


def located(location: str, key: str) -> "Path | RemotePath":
    """Turn a path or URL that the user gave into a ``Path`` or a ``RemotePath``.

    Args:
        location: path or URL of a file or folder, which may not exist.
        key: config key of the location, for messages.

    Raises:
        DataError: a URL is malformed, its protocol is unknown, or a package that the protocol needs is not installed.
    """
    local = re.sub(r"^(file|local)://", "", location)
    if local != location or not is_url(location):
        return user_path(local)
    with waiting():  # importing a protocol's packages is a part of fetching, too
        return RemotePath(*_opened(location, key), location, key)


class RemotePath:
    """A file or folder at a URL, which may not exist; its methods pause trainings' clocks and deadlines."""

    def __init__(self, filesystem: Any, path: str, url: str, key: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self._key = key
        self.url = url
        self._denied: list[str] = []

    def __truediv__(self, name: str) -> "RemotePath":
        child = RemotePath(self._filesystem, f"{self._path.rstrip('/')}/{name}", f"{self.url.rstrip('/')}/{name}", self._key)
        child._denied = self._denied
        return child if name != "." else self

    def __str__(self) -> str:
        return without_secrets(self.url)

    @property
    def name(self) -> str:
        """Last part of the path: the name of the file or folder."""
        path = re.sub(r"^https?://[^/]*|[?].*", "", self._path) if self.url.startswith("http") else self._path
        return path.rstrip("/").rpartition("/")[2]

    @property
    def parent_url(self) -> str:
        """URL of the folder that contains this file or folder."""
        url, mark, query = self.url.partition("?") if self.url.startswith("http") else (self.url, "", "")
        return url.rstrip("/").rpartition("/")[0] + mark + query

    def lacks(self, what: str, accepted: str) -> DataError:
        """Error for a folder that lacks ``what``; it also names the first file that there was no permission to look at."""
        denied = f", and no permission to look at {self._denied[0]}" if self._denied else ""
        return DataError(f"{self._key}: no {what} under {self} (accepted: {accepted}){denied}")

    def is_file(self) -> bool:
        """Whether a file exists. Without permission to look at it, it counts as absent, since some stores answer so for a missing file.

        Raises:
            DataError: the remote machine does not answer.
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
        """Whether the URL names a folder; with HTTP, where folders are files too, whether it ends with a slash.

        Raises:
            DataError: there is no such file or folder, or it cannot be looked at.
        """
        with self._explained("looked at"):
            if self.url.startswith("http"):
                return self.url.endswith("/")
            return bool(self._filesystem.info(self._path)["type"] == "directory")

    def files(self) -> list["RemotePath"]:
        """The files in this folder, sorted by name.

        Raises:
            DataError: the folder cannot be listed.
        """
        with self._explained("listed"):
            entries = self._filesystem.ls(self._path, detail=True)
        names = {entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "file"}
        return [self / name for name in sorted(names)]

    def version(self) -> Mapping[str, str]:
        """Fields that change if another file takes this file's place: size, checksum, time, as far as the remote machine gives them.

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
        """Copy the file to this machine, completely or with an error.

        Args:
            path: file of this machine, written in place.
            callback: fsspec callback that is told of the progress.

        Raises:
            DataError: there is no such file, it cannot be read, or it did not arrive completely.
        """
        size = self.version().get("size")
        with self._explained("read"):
            self._filesystem.get_file(self._path, str(path), **({"callback": callback} if callback else {}))
        if size is not None and path.stat().st_size != int(size):
            raise DataError(f"{self._key}: {self}: {path.stat().st_size} bytes arrived of {size}; the same command tries again")

    def put(self, path: Path) -> None:
        """Replace the remote file by a copy of a file of this machine, so that readers see the old file or the new one.

        Raises:
            DataError: the remote file cannot be written.
        """
        with self._explained("written"):
            protocol = self._filesystem.protocol  # one name, or several
            if not _APPEARS_WHOLE.isdisjoint((protocol,) if isinstance(protocol, str) else protocol):
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
        """Remove the file if possible; a failure is ignored, since a file that stays does no harm."""
        with waiting(), suppress(Exception):
            self._filesystem.rm_file(self._path)

    @contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        """Turn any error of a file system inside the context into a DataError of one line; ``done`` is the failed action, as in "read"."""
        with waiting():
            try:
                yield
            except Exception as error:
                reason = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ is not None else error
                status = getattr(reason, "status", None)
                if status in (401, 403) or isinstance(reason, PermissionError):
                    raise _DeniedError(f"{self._key}: {self}: cannot be {done}: no permission") from error
                if status in (404, 410) or isinstance(reason, FileNotFoundError):
                    raise _AbsentError(f"{self._key}: {self}: there is no such file or folder") from error
                cause = f"the server answered {status}" if isinstance(status, int) else _line(reason)
                raise DataError(f"{self._key}: {self}: cannot be {done}: {cause}") from error


class _AbsentError(DataError):
    """A remote file or folder does not exist."""


class _DeniedError(DataError):
    """Permission is missing to use a remote file or folder."""


@contextmanager
def paused_while_waiting(pause: _Pause) -> Iterator[None]:
    """Register a pause for as long as the context lasts: it is entered whenever this process waits for another machine."""
    _pauses.append(pause)
    try:
        yield
    finally:
        _pauses.remove(pause)


@contextmanager
def waiting() -> Iterator[None]:
    """Context for code that waits for another machine: all registered pauses are entered; may be nested."""
    global _is_waiting  # noqa: PLW0603  # one flag for the process, like the list of pauses
    if _is_waiting:
        yield
        return
    with ExitStack() as paused:
        for pause in _pauses:
            paused.enter_context(pause())
        _is_waiting = True
        try:
            yield
        finally:
            _is_waiting = False


def _opened(url: str, key: str) -> tuple[Any, str]:
    """File system of a URL, without what fsspec has cached on its content, and the path in it."""
    protocol, _, rest = url.partition(":")
    if not rest.startswith(("//", ":")):
        raise DataError(f"{key}: found {url}, accepted is a path, or a URL such as {protocol}://{rest.lstrip('/')}")
    import fsspec  # noqa: PLC0415  # takes 0.1 s; --help does not need it

    known = fsspec.available_protocols()
    if protocol not in known:
        guess = "".join(f" (did you mean {name}?)" for name in difflib.get_close_matches(protocol, known, n=1))
        raise DataError(
            f"{key}: {without_secrets(url)}: there is no protocol {protocol!r}{guess}; accepted are those of fsspec: s3, gs, az, hf, ..."
        )
    try:
        filesystem, path = fsspec.url_to_fs(url, **_settings(protocol))
    except Exception as error:
        reason = _what_to_install(protocol, error) if isinstance(error, ImportError) else f"cannot be opened: {_line(error)}"
        raise DataError(f"{key}: {without_secrets(url)}: {reason}") from error
    filesystem.invalidate_cache()
    return filesystem, path


def _settings(protocol: str) -> dict[str, Any]:
    """Arguments for an HTTP file system that fsspec's configuration does not set; fsspec itself ends any transfer after five minutes."""
    if protocol not in ("http", "https"):
        return {}
    import aiohttp  # noqa: PLC0415  # only HTTP needs it
    from fsspec.config import conf  # noqa: PLC0415  # only remote files need fsspec

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=_READ_SECONDS)
    settings = {"client_kwargs": {"timeout": timeout, "trust_env": True}, "headers": {"Accept-Encoding": "identity"}}
    return {key: value for key, value in settings.items() if key not in conf.get(protocol, {})}


def _what_to_install(protocol: str, error: ImportError) -> str:
    from fsspec.registry import known_implementations  # noqa: PLC0415  # only remote files need fsspec

    known = known_implementations.get(protocol, {})
    package = known.get("class", "fsspec").partition(".")[0]
    if package != "fsspec":
        return f"its package is not installed: pip install {package}"
    return f"a package is not installed: {known.get('err') or _line(error)}"


def _line(error: BaseException) -> str:
    """An error as one line, with its class unless it is an OSError with a text."""
    text = " ".join((getattr(error, "strerror", None) or str(error)).split())
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")
