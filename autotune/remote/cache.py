"""Files of other machines, fetched once a machine: into the folder of ``AUTOTUNE_CACHE``, one process at a time.

A file appears there under its name once it is whole, so whoever reads it sees all of it, and one that has changed at its URL since is
fetched again. Nothing is ever taken out: the folder may be emptied by hand whenever nothing runs.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.errors import DataError
from autotune.files import replacing
from autotune.remote.clock_pause import waiting
from autotune.remote.path import RemotePath
from autotune.remote.url import shown

CACHE_VARIABLE = "AUTOTUNE_CACHE"
_SECONDS_BETWEEN_LINES = 10.0
"""Of the progress of a long transfer."""
_SECONDS_WORTH_A_LINE = 1.0
"""Of a transfer that has ended."""

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)


def fetched(path: Path | RemotePath) -> Path:
    """The file on this machine: a path as it is, a remote file as it is now at its URL.

    Files of one remote folder lie in one folder here too, under their own names.

    Raises:
        DataError: there is no such file, it cannot be read, or the cache cannot be written.
    """
    if isinstance(path, Path):
        return path
    with waiting():
        return _fetched(path)


def cache_folder() -> Path:
    """Where fetched files are kept on this machine."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "autotune"


def say_what_is_fetched() -> None:
    """Have lines on what is fetched go to stderr too."""
    if not logger.handlers:
        logger.addHandler(_ToStderr())


class _ToStderr(logging.Handler):
    """Prints to what stderr is at that moment: a terminal's display may have put itself in between."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the line."""
        print(record.getMessage(), file=sys.stderr, flush=True)


def _fetched(remote: RemotePath) -> Path:
    folder = cache_folder() / _folder_name(remote.parent_url)
    target, record = folder / remote.name, folder / f".{remote.name}.json"
    with _explained(folder), _sole_fetcher(folder, remote):
        version = remote.version()
        if _is_current(target, record, version):
            return target
        began = time.monotonic()
        logger.info("fetching %s%s to %s", remote, _megabytes(version), folder)
        with replacing(target) as part:
            remote.copy_to(part, _progress(remote))
            record.unlink(missing_ok=True)  # else it would vouch for the new file, too
            num_bytes = part.stat().st_size
        record.write_text(json.dumps({"url": shown(remote.url), "version": version, "num_bytes": num_bytes}), encoding="utf-8")
        if (seconds := time.monotonic() - began) >= _SECONDS_WORTH_A_LINE:
            logger.info("fetched %s in %.1f s", remote, seconds)
    return target


def _is_current(target: Path, record: Path, version: Mapping[str, str]) -> bool:
    """Whether the file here is the one at the URL; where the other machine tells nothing by which to know, it is not."""
    try:
        kept, num_bytes = json.loads(record.read_text(encoding="utf-8")), target.stat().st_size
    except (OSError, ValueError):
        return False
    return bool(version) and isinstance(kept, dict) and kept.get("version") == version and kept.get("num_bytes") == num_bytes


def _folder_name(url: str) -> str:
    """A folder's name that tells a person the URL, and any two URLs apart."""
    readable = re.sub(r"[^\w.-]+", "-", shown(url))[-80:].strip("-.")
    return f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


@contextmanager
def _sole_fetcher(folder: Path, remote: RemotePath) -> Iterator[None]:
    """Wait until no other process of this machine fetches the file, and let none while the context lasts."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{remote.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process, which is fetching %s", remote)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{CACHE_VARIABLE}: {folder}: cannot be written: {error.strerror or error}; accepted is a folder with room for fetched files"
        ) from error


def _megabytes(version: Mapping[str, str]) -> str:
    return f" ({int(version['size']) / 1e6:,.1f} MB)" if int(version.get("size", 0)) >= 1e5 else ""


def _progress(remote: RemotePath) -> Any:
    """What has arrived, in a line now and then."""
    from fsspec.callbacks import Callback  # noqa: PLC0415  # it is imported by whoever has a remote file

    said_at = time.monotonic()

    def say(size: int | None, value: int, **_: object) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= _SECONDS_BETWEEN_LINES:
            said_at = time.monotonic()
            logger.info("fetching %s: %s%s MB", remote, f"{value / 1e6:,.1f}", f" of {size / 1e6:,.1f}" if size else "")

    return Callback(hooks={"progress": say})
