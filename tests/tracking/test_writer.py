"""The thread that tells a tracker: what it could not write is made from the study's own runs,
and no study waits for it.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import ConfigError
from autotune.tracking import writer
from autotune.tracking.tracker import FinishedRun, StudyEnd, StudyInfo
from autotune.tracking.writer import TrackerWriter
from tests.support.patience import wait_until
from tests.support.tracked import FileTracker, make_info, make_run

OPEN = threading.Event()
"""Whether the trackers of these tests take what they are told."""


class RefusingTracker(FileTracker):
    """Refuses all that it is told until it is open to it."""

    def write(self, line: str) -> None:
        if not OPEN.is_set():
            raise ConnectionError("the server is away\nand more")
        super().write(line)


class HangingTracker(FileTracker):
    """Hangs until it is open."""

    def write(self, line: str) -> None:
        OPEN.wait()
        super().write(line)


class UnopenedTracker:
    """Cannot be opened."""

    def __init__(self, info: StudyInfo, **_: Any) -> None:
        raise ConfigError("tracking: no")


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    OPEN.clear()
    yield
    OPEN.set()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "told"


@pytest.fixture
def said() -> list[str]:
    """What the user is told."""
    return []


def made(
    kind: str, path: Path, said: list[str], ended: list[FinishedRun], **arguments: Any
) -> TrackerWriter:
    node = {
        "_target_": f"{FileTracker.__module__ if kind == 'FileTracker' else __name__}.{kind}",
        "path": str(path),
        **arguments,
    }
    return TrackerWriter(
        node,
        ("tests", __name__),
        make_info=lambda: make_info(path.parent),
        ended=lambda: ended,
        rest_command="autotune study.name=cnn-1",
        say=said.append,
    )


def end(tracker: TrackerWriter) -> None:
    tracker.close(StudyEnd(status="FINISHED"))


def told(path: Path) -> list[str]:
    return (
        [line.partition(" ")[2] for line in path.read_text().splitlines()] if path.is_file() else []
    )


def test_what_a_tracker_is_told_arrives_in_order_and_the_best_scores_at_the_end(
    path: Path, said: list[str]
) -> None:
    runs = [
        (*make_run(number, stopped_at=float(number))[:2], score)
        for number, score in enumerate((2.0, 1.5, None, 1.7))
    ]
    ended: list[FinishedRun] = []
    tracker = made("FileTracker", path, said, ended)
    tracker.wait()
    for trial, result, score in runs:
        tracker.start(trial)
        tracker.evaluate(trial.name, result.evaluations[0])
        tracker.finish(trial, result, score)
        ended.append((trial, result, score))
    wait_until(lambda: len(told(path)) == 12)
    end(tracker)
    assert (told(path)[-1], said, tracker.is_complete) == (
        "close FINISHED [(1, 2.0), (2, 1.5), (3, 1.5), (4, 1.5)]",
        [],
        True,
    )
    assert told(path)[:-1] == [
        f"{verb} trial-{number}" for number in range(4) for verb in ("start", "evaluate", "finish")
    ]


def test_of_the_runs_that_ended_before_those_that_a_tracker_lacks_are_made(
    path: Path, said: list[str]
) -> None:
    runs = [make_run(number) for number in range(3)]
    end(made("FileTracker", path, said, runs, complete=["trial-1"]))
    assert told(path)[:-1] == ["finish trial-0", "finish trial-2"]


def test_nothing_is_written_while_runs_are_timed(path: Path, said: list[str]) -> None:
    ended: list[FinishedRun] = []
    tracker = made("FileTracker", path, said, ended)
    tracker.wait()
    tracker.may_write.clear()
    tracker.start(make_run(0)[0])
    time.sleep(0.3)
    assert told(path) == []
    tracker.may_write.set()
    wait_until(lambda: told(path) == ["start trial-0"])
    tracker.may_write.clear()
    ended.append(make_run(0))
    tracker.finish(*ended[0])
    end(tracker)
    assert told(path)[1:] == ["finish trial-0", "close FINISHED [(1, 1.5)]"]


def test_a_server_that_is_away_for_a_while_gets_every_run_at_the_end(
    path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_MAX_QUEUED", 5)  # which is less than is told
    runs = [make_run(number) for number in range(20)]
    tracker = made("RefusingTracker", path, said, runs)
    for run in runs:
        tracker.start(run[0])
        tracker.finish(*run)
    wait_until(lambda: bool(said))
    OPEN.set()
    end(tracker)
    assert sorted(told(path)[:-1]) == sorted(f"finish trial-{number}" for number in range(20))
    assert said == [
        "Refusing does not take what it is told (the server is away and more); the study"
        " continues, and it is tried again"
    ]
    assert tracker.is_complete


def test_what_a_tracker_never_took_is_told_with_the_command_that_writes_it(
    path: Path, said: list[str]
) -> None:
    tracker = made("RefusingTracker", path, said, [make_run(number) for number in range(9)])
    end(tracker)
    assert said[1:] == [
        "Refusing lacks 9 runs; what is missing is written by\n  autotune study.name=cnn-1"
    ]
    assert not tracker.is_complete


@pytest.mark.parametrize("hurries", [True, False])
def test_a_tracker_that_hangs_is_left_behind(path: Path, said: list[str], hurries: bool) -> None:
    tracker = made("HangingTracker", path, said, [make_run()], close_seconds=0.2)
    if hurries:
        tracker.close_seconds = 0.2
        tracker.close_if_open(is_interrupt=True)
    else:
        end(tracker)
    assert (len(said), tracker.is_complete) == (1, False)
    assert "Hanging lacks 1 runs" in said[0]


def test_an_interrupted_study_is_closed_once(path: Path, said: list[str]) -> None:
    tracker = made("FileTracker", path, said, [])
    for is_interrupt in (True, False):
        tracker.close_if_open(is_interrupt=is_interrupt)
    assert told(path) == ["close KILLED []"]


def test_a_tracker_that_cannot_be_opened_is_told_before_anything_is_trained(
    path: Path, said: list[str]
) -> None:
    tracker = made("UnopenedTracker", path, said, [])
    with pytest.raises(ConfigError, match="tracking: no"):
        tracker.wait()
    tracker.close_if_open(is_interrupt=False)
    assert said == []
