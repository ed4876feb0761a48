"""Cache of remote files: each is fetched once per machine, into the folder of ``AUTOTUNE_CACHE``, by one process at a time.

A file gets its name in the cache once it is complete, so readers never see a part of it, and it is fetched again if it has changed at its
URL. Nothing is ever removed: the folder may be emptied by hand while nothing runs.
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

from autotune.errors import DataError, FileError
from autotune.files import make_folder, opened_to_lock, replace_file, replacing
from autotune.hiding import without_secrets
from autotune.remote.path import RemotePath, waiting
from autotune.remote.url import user_path

CACHE_VARIABLE = "AUTOTUNE_CACHE"
_SECONDS_BETWEEN_LINES = 10.0
"""Seconds between two log lines on the progress of a long transfer."""
_SECONDS_WORTH_A_LINE = 1.0
"""Duration of a transfer in seconds from which a log line reports its end."""

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)


def fetched(path: Path | RemotePath) -> Path:
    """Path of a file on this machine; a remote file is first fetched into the cache, unless its present version is there.

    Files of one remote folder are cached in one folder, under their own names.

    Raises:
        DataError: the remote file does not exist or cannot be read, or the cache cannot be written.
    """
    if isinstance(path, Path):
        return path
    folder = cache_folder() / _folder_name(path.parent_url)
    target, record = folder / path.name, folder / f".{path.name}.json"
    try:
        with waiting(), _sole_fetcher(folder, path):
            version = path.version()
            if not _is_current(target, record, path, version):
                _fetch(target, record, path, version)
    except FileError as error:
        raise DataError(f"{CACHE_VARIABLE}: {error}; accepted is a folder with room for fetched files") from error
    except OSError as error:
        raise DataError(
            f"{CACHE_VARIABLE}: {folder}: cannot be written: {error.strerror or error}; accepted is a folder with room for fetched files"
        ) from error
    return target


def cache_folder() -> Path:
    """Folder of this machine in which fetched files are cached."""
    chosen = os.environ.get(CACHE_VARIABLE) or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/autotune"
    return user_path(chosen)


def say_what_is_fetched() -> None:
    """Print log lines on fetched files to stderr."""
    if not logger.handlers:
        logger.addHandler(_ToStderr())


class _ToStderr(logging.Handler):
    """Prints to the current ``sys.stderr``, which a terminal's live display may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log record's message."""
        print(record.getMessage(), file=sys.stderr, flush=True)


def _is_current(target: Path, record: Path, remote: RemotePath, version: Mapping[str, str]) -> bool:
    """Whether the cached file has the version of the one at the URL; False if the remote machine gives no version."""
    try:
        return bool(version) and json.loads(record.read_text(encoding="utf-8")) == _description(target, remote, version)
    except (OSError, ValueError):
        return False


def _description(target: Path, remote: RemotePath, version: Mapping[str, str]) -> dict[str, Any]:
    """What a cached file's record says of it."""
    return {"url": without_secrets(remote.url), "version": version, "num_bytes": target.stat().st_size}


def _fetch(target: Path, record: Path, remote: RemotePath, version: Mapping[str, str]) -> None:
    began, size = time.monotonic(), int(version.get("size", 0))
    logger.info("fetching %s%s to %s", remote, f" ({size / 1e6:,.1f} MB)" if size >= 1e5 else "", target.parent)
    with replacing(target) as part:
        remote.copy_to(part, _progress(remote))
        record.unlink(missing_ok=True)  # it describes the old file
    replace_file(record, json.dumps(_description(target, remote, version)))
    if (seconds := time.monotonic() - began) >= _SECONDS_WORTH_A_LINE:
        logger.info("fetched %s in %.1f s", remote, seconds)


def _folder_name(url: str) -> str:
    """Name of the cache folder of a URL: readable, and different for any two URLs."""
    readable = re.sub(r"[^\w.-]+", "-", without_secrets(url))[-80:].strip("-.")
    return f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


@contextmanager
def _sole_fetcher(folder: Path, remote: RemotePath) -> Iterator[None]:
    """Hold the lock on fetching a file: wait for other processes of this machine, and keep them out inside the context."""
    with opened_to_lock(make_folder(folder) / f".{remote.name}.lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process, which is fetching %s", remote)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _progress(remote: RemotePath) -> Any:
    """Callback for fsspec that logs the progress of a transfer now and then."""
    from fsspec.callbacks import Callback  # noqa: PLC0415  # only remote files need fsspec

    logged_at = time.monotonic()

    def log(size: int | None, value: int, **_: object) -> None:
        nonlocal logged_at
        if time.monotonic() - logged_at >= _SECONDS_BETWEEN_LINES:
            logged_at = time.monotonic()
            logger.info("fetching %s: %s%s MB", remote, f"{value / 1e6:,.1f}", f" of {size / 1e6:,.1f}" if size else "")

    return Callback(hooks={"progress": log})
