"""Storages that are damaged, refused, full or gone: one line says so, and what was written is
kept.
"""

import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.storages.journal import JournalFileBackend

from autotune.errors import StudyError
from autotune.search import storage
from autotune.search.storage import DRIVER, JOURNAL, sole_driver, told_storage_errors
from autotune.search.study import read_study
from tests.search.test_study import open_in
from tests.support.postgresql import PostgreSql, running_postgresql

Lines = list[bytes]


def run_trials(study: optuna.Study, num_trials: int) -> None:
    for _ in range(num_trials):
        trial = study.ask({"x": FloatDistribution(0, 1)})
        trial.set_user_attr(
            "autotune:result", {"seconds": [1.0, 2.5], "error": 'quoted "digest":"1-0"}'}
        )
        study.tell(trial, trial.params["x"])


def told(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [
        (trial.number, trial.state.name, trial.params, trial.values, trial.user_attrs)
        for trial in study.trials
    ]


def lines_of(folder: Path) -> Lines:
    return (folder / JOURNAL).read_bytes().splitlines(keepends=True)


def refusal(folder: Path) -> str:
    """The line with which a journal is refused; the journal stays as it is."""
    before = (folder / JOURNAL).read_bytes()
    with pytest.raises(StudyError) as caught:
        open_in(folder)
    assert "\n" not in str(caught.value)
    assert "restore the file" in str(caught.value)
    assert (folder / JOURNAL).read_bytes() == before
    return str(caught.value)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the journal of five trials."""
    folder = tmp_path_factory.mktemp("journal")
    run_trials(open_in(folder), 5)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def as_any_program(folder: Path) -> optuna.Study:
    """The study as Optuna itself opens it."""
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    return optuna.load_study(study_name="first", storage=storage)


def test_optuna_reads_the_journal_as_any_other(folder: Path) -> None:
    assert told(as_any_program(folder)) == told(read_study("first", folder))


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [*lines[:5], bytes(512) + b"\n", *lines[5:]],
        lambda lines: [*lines[:5], b"\xff\xfe garbage\n", *lines[6:]],
        lambda lines: [*lines[:5], b"[" * 100_000 + b"\n", *lines[6:]],
        lambda lines: [*lines, b"garbage\n"],
        lambda lines: [*lines[:5], b'{"op_code":77}\n', *lines[5:]],
        lambda lines: [*lines, b"[4]\n"],
    ],
)
def test_a_damaged_journal_is_told_and_left_as_it_is(
    folder: Path, change: Callable[[Lines], Lines]
) -> None:
    (folder / JOURNAL).write_bytes(b"".join(change(lines_of(folder))))
    assert f"{folder / JOURNAL}: cannot be read (" in refusal(folder)


def test_a_torn_last_line_is_dropped_by_whoever_goes_on_and_left_by_whoever_reads(
    folder: Path,
) -> None:
    whole = (folder / JOURNAL).read_bytes()
    torn = whole + lines_of(folder)[-1][:-1]
    (folder / JOURNAL).write_bytes(torn)
    assert len(read_study("first", folder).trials) == 5
    assert (folder / JOURNAL).read_bytes() == torn
    study = open_in(folder)
    assert len(study.trials) == 5
    run_trials(study, 1)
    assert (folder / JOURNAL).read_bytes().startswith(whole)
    assert len(read_study("first", folder).trials) == 6


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs to mount a file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_one_line_and_the_study_goes_on_from_all_that_was_written(
    small_disk: Path,
) -> None:
    study = open_in(small_disk)
    written: list[str] = []

    def write_until_it_is_full() -> None:
        while len(written) < 1000:
            study.set_user_attr(f"note {len(written)}", "x" * 1000)
            written.append(f"note {len(written)}")

    said = (
        r"study\.log: cannot be written \(No space left on device\); what was in it is kept, and"
        r" the study continues with: again$"
    )
    with pytest.raises(StudyError, match=said), told_storage_errors("again"):
        write_until_it_is_full()
    assert len(written) > 10
    kept = read_study("first", small_disk).user_attrs
    assert {key for key in kept if key.startswith("note")} == set(written)
    subprocess.run(["mount", "-o", "remount,size=256k", small_disk], check=True)
    again = open_in(small_disk)
    run_trials(again, 3)
    assert len(read_study("first", small_disk).trials) == 3


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSql]:
    with running_postgresql() as server:
        yield server


@pytest.mark.store
def test_a_database_that_goes_is_one_line_and_the_study_goes_on_once_it_is_back(
    server: PostgreSql, tmp_path: Path
) -> None:
    url = server.new_database("goes")
    study = open_in(tmp_path, url=url)
    run_trials(study, 3)
    server.kill()
    try:
        with (
            pytest.raises(StudyError, match=r"^search.storage: [^\n]*continues with: again$"),
            told_storage_errors("again"),
        ):
            run_trials(study, 1)
    finally:
        server.start()
    again = open_in(tmp_path, url=url)
    run_trials(again, 1)
    assert len([trial for trial in again.trials if trial.state.is_finished()]) == 4


def _drive(folder: Path, url: str | None, is_at_work: Any) -> None:
    with sole_driver(open_in(folder, url=url), threading.Event(), print):
        is_at_work.set()
        signal.pause()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts a process that drives a study, and returns its id."""
    spawning, started = multiprocessing.get_context("spawn"), list[Any]()

    def start(url: str | None) -> int:
        is_at_work = spawning.Event()
        started.append(spawning.Process(target=_drive, args=(tmp_path, url, is_at_work)))
        started[-1].start()
        assert is_at_work.wait(60)
        return int(started[-1].pid)

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.mark.parametrize("in_database", [False, True])
def test_a_second_driver_of_a_storage_is_refused_until_the_first_is_gone(
    tmp_path: Path, driver: Callable[..., int], in_database: bool
) -> None:
    url = f"sqlite:///{tmp_path / 'studies.db'}" if in_database else None
    first, said = driver(url), list[str]()
    study = open_in(tmp_path, url=url)
    who = rf"^study\.name=first: process {first} on \S+ runs it; give another study\.name$"
    with pytest.raises(StudyError, match=who), sole_driver(study, threading.Event(), said.append):
        pass
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    with sole_driver(study, threading.Event(), said.append):
        assert study.user_attrs[DRIVER]["pid"] == os.getpid()
    assert (said, study.user_attrs[DRIVER]) == ([], None)


def test_a_driver_on_another_machine_is_given_time_to_say_that_it_lives(
    tmp_path: Path, driver: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_BEAT_SECONDS", 0.2)
    monkeypatch.setattr(storage, "_DEAD_SECONDS", 2.0)
    other, said = open_in(tmp_path), list[str]()
    with sole_driver(other, threading.Event(), said.append):
        monkeypatch.setattr(storage, "_machine", lambda: "another")
        with (
            pytest.raises(StudyError, match="runs it; give"),
            sole_driver(open_in(tmp_path), threading.Event(), said.append),
        ):
            pass
        monkeypatch.undo()
        left = dict(other.user_attrs[DRIVER])
    assert len(said) == 1
    assert "did not end in order; waiting, at most 2 s, to hear" in said[0]
    monkeypatch.setattr(storage, "_DEAD_SECONDS", 1.0)
    other.set_user_attr(DRIVER, {**left, "machine": "another"})  # which was killed
    with sole_driver(other, threading.Event(), said.append):
        pass
    assert len(said) == 2


def test_a_driver_that_stood_still_ends_where_another_has_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(storage, "_DEAD_SECONDS", -1.0)  # each beat comes late
    study, interrupt, said = open_in(tmp_path), threading.Event(), list[str]()
    with sole_driver(study, interrupt, said.append):
        taken = {"host": "b", "machine": "b", "pid": 1, "started": 1, "at": 1.0}
        study.set_user_attr(DRIVER, taken)
        assert interrupt.wait(10)
    assert said == ["study.name=first: another process has taken it over"]
    assert study.user_attrs[DRIVER] == taken
