"""The scaling benchmark: what it says of one search, and a whole run over a tiny recording."""

import json
from pathlib import Path

import pytest

import benchmarks.measuring
from autotune.outcome import Outcome
from benchmarks.replay.simulation import Stretch, Trace
from benchmarks.scaling import Search, _score, main, rows_of
from tests.benchmarks.test_warm_start_benchmark import write_twenty


def stretch(worker: int, started: float, stopped: float, outcome: str) -> Stretch:
    return Stretch(
        trial=0,
        worker=worker,
        started_seconds=started,
        stopped_seconds=stopped,
        from_train_seconds=0.0,
        train_seconds=1.0,
        outcome=outcome,
    )


def test_idle_seconds_are_a_share_of_all_that_the_workers_had() -> None:
    search = Search(recording=Path("one"), policy="tpe", num_workers=2, seed=0)
    trace = Trace(
        stretches=(stretch(0, 0.0, 10.0, Outcome.REACHED), stretch(1, 0.0, 5.0, Outcome.STOPPED)),
        num_workers=2,
    )
    score = _score(search, trace, 2.0, [0.001, 0.003, 0.002])
    assert (score.wall_multiple, score.idle_share) == (5.0, 0.25)
    assert (score.median_answer_ms, score.answers_per_training) == (
        pytest.approx(2.0),
        pytest.approx(0.3),
    )
    (row,) = rows_of([score, score])
    assert (row.num_searches, row.wall_multiple) == (2, pytest.approx(5.0))


@pytest.mark.slow
def test_a_run_keeps_every_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.measuring, "RESULTS", tmp_path / "results")
    write_twenty(tmp_path / "recordings" / "one")
    settings = ["--policies", "random", "--workers", "1,4", "--seeds", "1"]
    assert main(["--recordings", str(tmp_path / "recordings"), *settings]) == 0
    (path,) = (tmp_path / "results").glob("scaling-*.json")
    rows = json.loads(path.read_text())["result"]["rows"]
    assert [row["num_workers"] for row in rows] == [1, 4]
    assert str(tmp_path) not in path.read_text()
