"""Downloads a data set's official files, only if the user asked for it with ``data.download=true``.

Every URL comes with a checksum, so the result is the official file or an error. Tuning often runs on machines without a network:
a failed download ends within seconds, without retries, in one line that says where to put the files instead.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import DataError

CONNECT_SECONDS = 8.0
"""Timeout for connecting to each address of the host."""
READ_SECONDS = 10.0
"""Timeout for a connection on which no data arrives."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One official file: its URL and the MD5 checksum of its content."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        """The file's name, the last part of its URL."""
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True, kw_only=True)
class RemoteDataSet:
    """A data set that can be downloaded."""

    name: str
    files: tuple[RemoteFile, ...]
    accepted: str
    """The forms of the data set that are accepted under ``data.root``, as error messages list them."""


def obtain(data_set: RemoteDataSet, folder: Path, *, root: Path, download: bool) -> None:
    """Download the files of a data set that was not found under ``root`` into ``folder``.

    Raises:
        DataError: ``download`` is false, or a file could not be downloaded completely.
    """
    absent = f"data.root: no {data_set.name} under '{root}' (accepted: {data_set.accepted})"
    if not download:
        raise DataError(f"{absent}; set data.download=true to fetch it, or data.root to where it lies")
    for file in data_set.files:
        try:
            _fetch(file, folder)
        # requests' errors are OSError too; pooch raises ValueError for a wrong checksum.
        except (OSError, ValueError) as error:
            reason = f"downloading {file.url} to '{folder}' failed: {_reason(error)}"
            raise DataError(f"{absent}, and {reason}; put the files there or set data.root") from error


def _fetch(file: RemoteFile, folder: Path) -> None:
    import pooch  # noqa: PLC0415  # only for a download; takes half a second with requests
    import requests  # noqa: PLC0415  # only for a download

    pooch.get_logger().setLevel(logging.WARNING)
    logger.info("downloading %s to %s", file.url, folder)
    downloader = pooch.HTTPDownloader(timeout=(CONNECT_SECONDS, READ_SECONDS), chunk_size=1 << 20)
    try:
        pooch.retrieve(file.url, known_hash=f"md5:{file.md5}", fname=file.name, path=folder, downloader=downloader)
    except requests.HTTPError as error:
        if error.response is not None:
            error.response.close()  # pooch leaves its connection open
        raise


def _reason(error: Exception) -> str:
    """The cause of a failed download in a few words; the text of a connection error is a chain of nested reprs."""
    import requests  # noqa: PLC0415  # comes with pooch, and is imported by it already

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"the server answered {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    if isinstance(error, requests.RequestException):
        return "the connection broke off"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "its checksum is not the official file's"
