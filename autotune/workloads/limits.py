"""Limits on what a data file may take: data can come from anyone, and a small file can open to more than the memory.

Sizes are checked before memory is taken: those of files as they are, and those of compressed files while they are opened.
"""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from autotune.errors import DataError

MAX_BYTES = 1 << 29
"""Limit in bytes on the content of one data file, unless ``data.max_bytes`` says another."""


def check_size(path: Path, max_bytes: int, *, num_bytes: int | None = None) -> None:
    """Check that a path is a file, and that what it holds is not too large.

    Args:
        path: the file.
        max_bytes: value of ``data.max_bytes``.
        num_bytes: size in bytes of what the file opens to; None means the size of the file itself.

    Raises:
        OSError: there is no such file.
        DataError: the path is a folder, a device or a pipe, or there is too much in it.
    """
    if not path.is_file():
        path.stat()  # raises the error if it is not there
        raise DataError(f"data: {path} is no regular file; accepted is one")
    if (path.stat().st_size if num_bytes is None else num_bytes) > max_bytes:
        raise DataError(
            f"data: {path} holds more than data.max_bytes = {max_bytes} bytes; +data.max_bytes={2 * max_bytes} allows twice that"
        )


class LimitedReader:
    """Reads a file up to a limit, and refuses to read past it; made by ``limited_reader``."""

    def __init__(self, file: IO[bytes], path: Path, max_bytes: int) -> None:
        self._file, self._path, self._max_bytes, self._left = file, path, max_bytes, max_bytes

    def read(self, num_bytes: int) -> bytes:
        """The next bytes, at most ``num_bytes``; fewer only at the end.

        Raises:
            DataError: the limit is passed.
        """
        content = self._file.read(max(0, min(num_bytes, self._left + 1)))
        self._left -= len(content)
        if self._left < 0:
            check_size(self._path, self._max_bytes, num_bytes=self._max_bytes + 1)
        return content


@contextmanager
def limited_reader(path: Path, max_bytes: int) -> Iterator[LimitedReader]:
    """Open a file, gzipped or not, to be read up to a limit in bytes, the value of ``data.max_bytes``.

    Raises:
        OSError: there is no such file.
        DataError: the path is no file, or the file is too large.
    """
    check_size(path, max_bytes)
    with path.open("rb") as file:
        is_gzipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not is_gzipped:
            yield LimitedReader(file, path, max_bytes)
            return
        with gzip.GzipFile(fileobj=file, mode="rb") as opened:
            yield LimitedReader(cast("IO[bytes]", opened), path, max_bytes)
