"""A queue in a file: whole messages or none, and nothing of it stays behind."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autotune.execution.spool import Spool, SpooledSequence


def other_end(spool: Spool) -> Spool:
    return Spool(descriptor=os.dup(spool.descriptor))


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """A disk that is full once a file has this size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_messages_arrive_in_order_and_leave_no_file(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    reader = other_end(spool)
    assert reader.read() is None
    for number in range(3):
        spool.append(("finish", number), ends_run=number == 2, not_before=float(number))
    told = []
    while (message := reader.read()) is not None:
        assert reader.read() == message, "it stays the next one until it is taken"
        told.append((message.open(), message.ends_run, message.not_before))
        reader.take(message)
    assert told == [(("finish", 0), False, 0.0), (("finish", 1), False, 1.0), (("finish", 2), True, 2.0)]
    assert list(tmp_path.iterdir()) == []


def test_a_message_that_a_full_disk_does_not_take_is_left_out_whole(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    reader = other_end(spool)
    spool.append("first")
    with largest_file(spool.position + 100), pytest.raises(OSError, match="too large"):
        spool.append(os.urandom(10_000))
    assert os.fstat(spool.descriptor).st_size == spool.position
    spool.append("last")
    told = []
    while (message := reader.read()) is not None:
        told.append(message.open())
        reader.take(message)
    assert told == ["first", "last"]


def test_a_spool_is_a_sequence_that_is_read_anew(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number in range(5):
        spool.append({"number": number})
    runs = SpooledSequence(other_end(spool))
    assert [run["number"] for run in runs] == [0, 1, 2, 3, 4]
    assert runs[3] == {"number": 3}
    assert runs[1:3] == [{"number": 1}, {"number": 2}]
