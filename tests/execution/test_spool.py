"""A queue in a file: whole messages or none, and nothing of it stays behind."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autotune.execution.spool import Spool, SpooledObjects


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


def test_objects_of_a_spool_are_read_anew_by_their_places(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    runs = SpooledObjects(other_end(spool))
    for place in (7, 2, 5):
        spool.append({"place": place})
        runs.take(place)
    assert [runs[place] for place in (2, 5, 7, 2)] == [{"place": place} for place in (2, 5, 7, 2)]
    assert 2 in runs
    assert 3 not in runs
