"""A queue of messages in a file without a name: one process appends, another reads, and neither keeps the messages in memory.

The file is made in the study's folder and has no name from the start, so that nothing is left of it however its processes end, and no
other program can write to it. Only that makes it safe to unpickle.
"""

import os
import pickle
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

_HEADER = struct.Struct("<I?d")  # bytes of the content, whether the message ends a run, when it may be read


class Message(NamedTuple):
    """One message as it was read."""

    ends_run: bool
    not_before: float
    """Time of the monotonic clock before which the message is held back, while runs are timed."""
    content: bytes

    def open(self) -> Any:
        """The object that the message was made of."""
        return pickle.loads(zlib.decompress(self.content))  # noqa: S301  # from a file that only this program can write to


class Spool:
    """An end of the queue: that which appends, or, with a file descriptor of the same file, that which reads.

    Args:
        folder: folder that the file is made in; it need not be on a disk that keeps it.
        descriptor: the file of another end; this object then owns the descriptor.
    """

    def __init__(self, folder: Path | None = None, *, descriptor: int | None = None) -> None:
        if descriptor is None:
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                descriptor = os.dup(file.fileno())
        self.descriptor = descriptor
        self.position = 0
        """Bytes that this end has appended, or read."""

    def append(self, content: Any, *, ends_run: bool = False, not_before: float = 0.0) -> None:
        """Append a message; either whole or, if the disk is full, not at all.

        Raises:
            OSError: the file cannot be written.
        """
        packed = zlib.compress(pickle.dumps(content), 1)
        frame = _HEADER.pack(len(packed), ends_run, not_before) + packed
        written = 0
        try:
            while written < len(frame):
                written += os.pwrite(self.descriptor, frame[written:], self.position + written)
        except OSError:
            os.ftruncate(self.descriptor, self.position)
            raise
        self.position += len(frame)

    def read(self) -> Message | None:
        """The next message, which stays the next one until ``take``; None if there is none yet."""
        header = os.pread(self.descriptor, _HEADER.size, self.position)
        if len(header) < _HEADER.size:
            return None
        size, ends_run, not_before = _HEADER.unpack(header)
        content = os.pread(self.descriptor, size, self.position + _HEADER.size)
        return Message(ends_run, not_before, content) if len(content) == size else None

    def take(self, message: Message) -> None:
        """Go on to the message after this one, which ``read`` has returned."""
        self.position += _HEADER.size + len(message.content)

    def close(self) -> None:
        """Close the file, which ends with the last of its ends."""
        os.close(self.descriptor)


class SpooledObjects:
    """Objects that were appended to a spool, by the places that they are known by; each is read anew when it is asked for."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._end = spool.position
        self._positions: dict[int, int] = {}

    def __contains__(self, place: int) -> bool:
        return place in self._positions

    def take(self, place: int) -> None:
        """Know the next object of the spool by a place."""
        self._spool.position = self._positions[place] = self._end
        message = self._spool.read()
        assert message is not None, "it was appended before"
        self._spool.take(message)
        self._end = self._spool.position

    def __getitem__(self, place: int) -> Any:
        self._spool.position = self._positions[place]
        message = self._spool.read()
        assert message is not None, "it was there before, and nothing is removed from the file"
        return message.open()
