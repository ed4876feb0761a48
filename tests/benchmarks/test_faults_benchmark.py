"""The fault bench: rows of its that cost little hold, and each kind of fault that it looks for
is seen where there is one; and what the killing bench makes of the trainings' diary.
"""

import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.__main__ import run_row
from benchmarks.faults.killing import differing, missing_keys, renamed, repeats
from benchmarks.faults.rows import ROWS
from benchmarks.faults.study import Study

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("training-killed", 2), ("ctrl-c-twice", 1)])
def test_a_study_goes_on_after_a_fault_and_its_records_agree(name: str, count: int) -> None:
    [row] = [row for row in ROWS if row.name == name]
    found = run_row(row, count=count, num_trials=30)
    assert list(found.wrong()) == []
    assert found.injected == count
    assert found.finished >= 30


@pytest.mark.slow
def test_a_trial_that_is_lost_for_good_is_in_every_record() -> None:
    [row] = [row for row in ROWS if row.name == "training-killed"]
    found = run_row(replace(row, overrides=["search.max_retries=0"]), count=2, num_trials=30)
    assert list(found.wrong()) == []


@pytest.fixture(scope="module")
def ended() -> Iterator[Study]:
    """A small study that has ended, with nothing wrong."""
    study = Study("ended", 0, num_trials=12)
    try:
        study.finish()
        study.check()
        yield study
    finally:
        study.close()


def _rewrite(path: Path, pattern: str, new: str) -> None:
    text = path.read_text()
    path.write_text(re.sub(pattern, new, text, count=1, flags=re.MULTILINE))
    assert path.read_text() != text


def _add_twice(study: Study) -> None:
    rows = (study.folder / "trials.csv").read_text().splitlines()
    (study.folder / "trials.csv").write_text("\n".join([*rows, rows[-1]]) + "\n")


def _in_mlflow(study: Study, statement: str) -> None:
    with sqlite3.connect(study.home / "mlflow.db") as database:
        assert database.execute(statement).rowcount > 0


def _lose_confirmation(study: Study) -> None:
    _rewrite(study.folder / "study.log", r'^.*"autotune:confirmed:.*\n', "")


_ONE_RUN = (
    "where run_uuid = (select run_uuid from tags where key = 'autotune.run' and value = 'trial-3')"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tamper", "told"),
    [
        (
            "lost",
            lambda study: _rewrite(study.folder / "trials.csv", r"^3,.*\n", ""),
            "trials.csv: trial-3",
        ),
        ("lost", _lose_confirmation, "storage: confirm-"),
        (
            "lost",
            lambda study: _in_mlflow(study, f"delete from tags {_ONE_RUN}"),
            "MLflow: trial-3",
        ),
        ("doubled", _add_twice, "trials.csv: trial-"),
        (
            "disagreeing",
            lambda study: _rewrite(study.folder / "trials.csv", r"^3,[A-Z]+", "3,LOST"),
            "trials.csv: trial-3 is",
        ),
        (
            "disagreeing",
            lambda study: _rewrite(
                study.folder / "best.json", r'"num_trials": \d+', '"num_trials": 11'
            ),
            "best.json: 11",
        ),
        (
            "disagreeing",
            lambda study: _in_mlflow(study, f"delete from metrics {_ONE_RUN}"),
            "MLflow: trial-3 is",
        ),
        (
            "disagreeing",
            lambda study: shutil.rmtree(study.folder / "recording"),
            "recording: cannot be read",
        ),
        (
            "leftovers",
            lambda study: _in_mlflow(study, f"update runs set status = 'RUNNING' {_ONE_RUN}"),
            "MLflow run trial-3 is open",
        ),
        (
            "leftovers",
            lambda study: (study.folder / "study.log.lock").symlink_to("study.log"),
            "study.log.lock",
        ),
    ],
)
def test_what_is_wrong_with_the_records_is_seen(
    ended: Study, kind: str, tamper: Callable[[Study], None], told: str
) -> None:
    for name in ("lost", "doubled", "disagreeing", "leftovers"):
        getattr(ended, name).clear()
    kept = ended.home / "kept"
    shutil.copytree(ended.folder, kept, symlinks=True)
    shutil.copy(ended.home / "mlflow.db", kept / "mlflow.db")
    try:
        tamper(ended)
        ended.check()
        assert any(told in line for line in getattr(ended, kind)), getattr(ended, kind)
    finally:
        shutil.rmtree(ended.folder)
        # in place: a client keeps the file open
        shutil.copyfile(kept / "mlflow.db", ended.home / "mlflow.db")
        (kept / "mlflow.db").unlink()
        kept.rename(ended.folder)


@pytest.mark.slow
def test_an_ended_study_has_nothing_wrong(ended: Study) -> None:
    for name in ("lost", "doubled", "disagreeing", "leftovers"):
        getattr(ended, name).clear()
    ended.check()
    assert (ended.lost, ended.doubled, ended.disagreeing, ended.leftovers, ended.faults) == (
        set(),
        set(),
        set(),
        set(),
        [],
    )


def _lines(steps: range, at: float, **facts: Any) -> list[dict[str, Any]]:
    """The diary of a training that makes a step a second."""
    own = {"run": "trial-0", "seed": 7, "rate": 0.1, "width": 8, "rank": 0, "folder": "trial-0"}
    return [
        {**own, "step": step, "at": at + index, "digest": f"{step}", **facts}
        for index, step in enumerate(steps)
    ]


def test_a_step_that_is_made_again_is_charged_to_the_kill_before_it() -> None:
    kills = [(5.5, "sigterm"), (20.0, "kill-driver"), (30.0, "kill-node")]
    lines = [
        *_lines(range(1, 6), 1),  # killed after step 5, with a state of step 5
        *_lines(range(6, 11), 15),  # killed after step 10, with a state of step 8
        *_lines(range(9, 13), 21),
    ]
    assert repeats(lines, kills) == {"kill-driver": 2}


def test_a_trial_that_begins_anew_with_another_number_is_made_again() -> None:
    lines = [
        *_lines(range(1, 6), 1),
        *_lines(range(1, 8), 10, run="trial-3", seed=8, folder="trial-3"),
    ]
    assert repeats(lines, [(6.0, "ctrl-c")]) == {"ctrl-c": 5}
    [told] = renamed(lines)
    assert "trial-0 (seed 7), trial-3 (seed 8)" in told


def test_runs_of_one_configuration_on_several_seeds_are_several_trainings() -> None:
    lines = [
        *_lines(range(1, 6), 1),
        *_lines(range(1, 6), 10, run="confirm-0-0", seed=8),
        *_lines(range(1, 6), 20, run="confirm-0-1", seed=9),
    ]
    assert not repeats(lines, [(9.0, "ctrl-c")])
    assert list(renamed(lines)) == []


def test_a_step_that_differs_from_what_it_was_or_should_be_is_told_once_a_run() -> None:
    undisturbed = _lines(range(1, 11), 1)
    lines = [*_lines(range(1, 6), 1), *_lines(range(5, 11), 10)]
    assert list(differing(lines, undisturbed)) == []
    lines += _lines(range(8, 11), 30, digest="other")
    assert list(differing(lines, undisturbed)) == ["trial-0 (rate 0.1, seed 7): step 8 differs"]
    other = _lines(range(1, 3), 40, run="trial-9", seed=9)
    assert list(differing(other, undisturbed)) == [
        "trial-9 (rate 0.1, seed 9): no such trial in the undisturbed study"
    ]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_keys()), reason="trainings keep no state while they train")
@pytest.mark.parametrize("name", ["killed-own", "killed-function", "killed-command"])
def test_trainings_that_are_killed_continue_from_their_last_state(name: str) -> None:
    [row] = [row for row in ROWS if row.name == name]
    assert row.killed is not None
    ways = ("kill-driver", "sigterm", "kill-rank-0")
    small = replace(row.killed, unit_seconds=8.0, num_trials=2, ways=ways)
    found = run_row(replace(row, killed=small))
    # on a busy machine much is trained between two states
    assert [line for line in found.wrong() if "of all steps" not in line] == []
    assert found.injected >= 2
