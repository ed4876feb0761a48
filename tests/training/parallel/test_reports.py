"""How ranks agree on reports: each waits for the others as long as they live."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from autotune.errors import ConfigError, TimedOutError
from autotune.training.parallel import reports
from autotune.training.parallel.ranks import open_store
from autotune.training.parallel.reports import FollowingRank, LeadingRank


@pytest.fixture
def leader() -> LeadingRank:
    return LeadingRank(open_store(), 2)


@pytest.fixture
def follower(leader: LeadingRank) -> FollowingRank:
    assert leader._store is not None
    short = timedelta(seconds=0.2)
    store = TCPStore("127.0.0.1", leader._store.port, is_master=False, timeout=short)
    return FollowingRank(store, 1, sees_folder=True)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """Where the other rank runs."""
    with ThreadPoolExecutor(1) as threads:
        yield threads


def nothing(*_: Path) -> None: ...


def test_a_rank_waits_for_the_decision_longer_than_a_store_does(
    leader: LeadingRank, follower: FollowingRank, thread: ThreadPoolExecutor
) -> None:
    returned = thread.submit(follower.report, nothing, nothing)
    time.sleep(1.0)
    assert not returned.done()
    leader.reported()
    leader.go_on()
    returned.result()


def test_the_first_rank_waits_for_what_another_one_writes(
    leader: LeadingRank, follower: FollowingRank, thread: ThreadPoolExecutor, tmp_path: Path
) -> None:
    written = threading.Event()

    def keep(folder: Path) -> None:
        time.sleep(0.5)
        written.set()

    returned = thread.submit(follower.report, keep, nothing)
    leader.reported()
    leader.together(str(tmp_path), nothing)
    assert written.is_set()
    leader.go_on()
    returned.result()


def test_a_rank_that_has_returned_gives_no_mean(
    leader: LeadingRank, follower: FollowingRank, thread: ThreadPoolExecutor
) -> None:
    follower.shared({"metric": 0.2})
    returned = thread.submit(follower.report, nothing, nothing)
    assert leader.mean({"metric": 0.4}) == {"metric": pytest.approx(0.3)}
    leader.reported()
    leader.go_on()
    returned.result()
    follower.end()
    for _ in range(2):  # whichever report
        with pytest.raises(ConfigError, match="rank 1 has returned; each process must call report"):
            leader.mean({"metric": 0.4})
        leader.reported()
        leader.go_on()


def test_a_mean_takes_as_long_as_reports_take(
    leader: LeadingRank,
    follower: FollowingRank,
    thread: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reports, "_MIN_MEAN_SECONDS", 0.01)
    time.sleep(0.2)
    thread.submit(lambda: (time.sleep(1.0), follower.shared({"metric": 0.2})))
    assert leader.mean({"metric": 0.2}) == {"metric": 0.2}
    leader.reported()
    leader.go_on()
    leader._longest_seconds = 0.02
    with pytest.raises(TimedOutError, match=r"rank 1 did not report within \d s; each process"):
        leader.mean({"metric": 0.2})
