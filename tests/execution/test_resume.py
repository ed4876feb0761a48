"""A study that is killed, and one that is interrupted: nothing that ended is lost or run twice,
and nothing stays behind.
"""

import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.search.study import confirmations, finished_results, read_study
from tests.execution.conftest import fill
from tests.support.patience import exit_code, is_alive, wait_until
from tests.support.studies import rows_of, runs_of

pytestmark = pytest.mark.slow

_NUM_TRIALS = 40
_COMMAND = (
    "experiment=cnn_smoke",
    "study.name=long",
    "study.seed=3",
    "search=tpe",
    "stopping=none",
    "target.value=0.9",
    "target.max_train_seconds=60",
    "epochs=range(25,40)",
    "optimizer.lr=interval(1e-4,1e-3)",
    f"search.num_trials={_NUM_TRIALS}",
    "confirm.num_seeds=6",
    "confirm.budget_fraction=null",
)
"""Trials of a second or so that end one after the other, so that there is time to end the study
in the middle of them; on a busy machine some reach the target, too, so that there is something
to confirm, in so many runs that there is time to end the study among them, too."""
_NUM_CONFIRMATIONS = 12


@dataclass(frozen=True)
class Session:
    """What one process of the study left behind."""

    code: int
    out: str
    err: str
    rows: list[dict[str, str]]
    statuses: dict[str, str]
    """MLflow's status by run name, the study's own included."""
    processes: set[int]
    """Those that Ray started for it."""


@dataclass(frozen=True)
class Long:
    folder: Path
    killed: Session
    interrupted: Session
    interrupted_confirming: Session
    finished: Session

    @property
    def sessions(self) -> tuple[Session, ...]:
        return self.killed, self.interrupted, self.interrupted_confirming, self.finished


def _rows(folder: Path) -> list[dict[str, str]]:
    return rows_of(folder / "outputs/long/trials.csv")


def _statuses(folder: Path) -> dict[str, str]:
    found = {}
    for run in runs_of(folder):
        tags = run.data.tags
        found[f"{tags.get('autotune.run', run.info.run_name)}:{run.info.run_id}"] = (
            f"{run.info.status} {tags.get('autotune.outcome')}"
        )
    return found


@pytest.fixture(scope="module")
def long(commands: Any, tmp_path_factory: pytest.TempPathFactory) -> Long:
    folder = tmp_path_factory.mktemp("long")

    def session(is_time: Callable[[], bool], number: int) -> Session:
        process = commands.start(*_COMMAND, folder=folder)
        wait_until(is_time, process=process)
        started = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as Ctrl-C in a terminal
        else:
            process.send_signal(number)
        code = exit_code(process)
        return Session(
            code,
            (folder / "out.txt").read_text(),
            (folder / "err.txt").read_text(),
            _rows(folder),
            _statuses(folder),
            started,
        )

    num_before = 0

    def has_more_rows(more: int) -> bool:
        return len(_rows(folder)) >= num_before + more

    def is_confirming() -> bool:
        return "confirmation run 2 of" in (folder / "out.txt").read_text()

    killed = session(lambda: has_more_rows(3), signal.SIGKILL)
    num_before = len(killed.rows)
    interrupted = session(lambda: has_more_rows(1), signal.SIGTERM)
    confirming = session(is_confirming, signal.SIGINT)
    last = commands.run(*_COMMAND, folder=folder)
    finished = Session(
        last.returncode, last.stdout, last.stderr, _rows(folder), _statuses(folder), set()
    )
    return Long(folder, killed, interrupted, confirming, finished)


def test_each_session_ended_as_meant(long: Long) -> None:
    assert long.killed.code == -signal.SIGKILL
    assert 3 <= len(long.killed.rows) < _NUM_TRIALS
    assert len(long.killed.rows) + 1 <= len(long.interrupted.rows) < _NUM_TRIALS
    codes = long.interrupted.code, long.interrupted_confirming.code, long.finished.code
    assert codes == (75, 130, 0), (
        long.interrupted.err + long.interrupted_confirming.err + long.finished.err
    )
    assert [session.err for session in long.sessions] == [""] * 4


def test_no_trial_is_lost_or_run_twice(long: Long) -> None:
    before: dict[str, dict[str, str]] = {}
    for session in long.sessions:
        rows = {row["trial"]: row for row in session.rows}
        assert len(rows) == len(session.rows)
        assert before == {trial: rows.get(trial) for trial in before}
        before = rows
    assert len(before) == _NUM_TRIALS
    seeds = [row["seed"] for row in before.values()]
    assert len(set(seeds)) == len(seeds)


def test_trials_that_were_interrupted_continue_under_their_numbers(long: Long) -> None:
    trials = read_study("long", long.folder / "outputs/long").trials
    assert len(trials) == _NUM_TRIALS
    assert not [each for each in trials if each.state.name in {"RUNNING", "WAITING", "FAIL"}]
    assert not (long.folder / "outputs/long/states").exists()


def test_an_interrupt_says_what_goes_on(long: Long) -> None:
    for session in (long.interrupted, long.interrupted_confirming):
        said = session.out.splitlines()
        assert said[-2] == "interrupted; the same study goes on with"
        python, dash_m, autotune, *arguments = shlex.split(said[-1])
        assert (python, dash_m, autotune) == ("python", "-m", "autotune")
        assert sorted(arguments) == sorted(_COMMAND)


def test_confirmation_goes_on_where_it_stood(long: Long) -> None:
    assert f"confirmation run 1 of {_NUM_CONFIRMATIONS}" not in long.finished.out
    assert "trial " not in long.finished.out.partition("confirmation run")[0].replace("trials", "")
    assert (
        len(confirmations(read_study("long", long.folder / "outputs/long"))) == _NUM_CONFIRMATIONS
    )
    assert (long.folder / "outputs/long/best.json").is_file()


def test_no_run_is_left_open_in_mlflow(long: Long) -> None:
    assert any(status.startswith("RUNNING") for status in long.killed.statuses.values())
    for session in long.sessions[1:]:
        assert not [
            name for name, status in session.statuses.items() if status.startswith("RUNNING")
        ]
    ended = {
        name.partition(":")[0]
        for name, status in long.finished.statuses.items()
        if not status.endswith("INTERRUPTED")
    }
    assert ended == {
        "long",
        *(f"trial-{row['trial']}" for row in long.finished.rows),
        *(name for name in ended if name.startswith("confirm-")),
    }
    assert len([name for name in ended if name.startswith("confirm-")]) == _NUM_CONFIRMATIONS


def test_no_process_is_left_behind(long: Long) -> None:
    for session in long.sessions[:3]:
        assert session.processes
        wait_until(lambda left=session.processes: not any(map(is_alive, left)))


def test_a_study_on_a_full_disk_ends_in_one_line_and_goes_on_once_there_is_room(
    commands: Any, tmp_path: Path, small_disk: Path
) -> None:
    arguments = [
        *(each for each in _COMMAND if "num_trials" not in each),
        "search.num_trials=8",
        "confirm.max_runs=0",
    ]
    process = commands.start(*arguments, folder=tmp_path)
    wait_until(lambda: len(_rows(tmp_path)) >= 2, process=process)
    filler = fill(small_disk)
    assert exit_code(process) == 2
    said = (tmp_path / "err.txt").read_text()
    assert said.count("\n") == 1, said
    assert "No space left on device" in said
    filler.unlink()
    kept = set(finished_results(read_study("long", small_disk / "long")))
    assert len(kept) >= 2
    assert not [status for status in _statuses(tmp_path).values() if status.startswith("RUNNING")]

    assert commands.run(*arguments, folder=tmp_path).returncode in (0, 3)
    results = finished_results(read_study("long", small_disk / "long"))
    assert kept < set(results)
    assert len(results) == 8
    assert sorted(results) == sorted(int(row["trial"]) for row in _rows(tmp_path))
