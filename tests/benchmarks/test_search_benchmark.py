"""The search benchmark: what it charges, what it counts as lost, and a whole run over tiny
recordings.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import benchmarks.measuring
from autotune.measurement import PAUSED
from autotune.recording import Recording, read_recording
from benchmarks.replay.simulation import Stretch, Trace
from benchmarks.search import Search, main, run_search
from benchmarks.search_peers.policies import POLICIES
from benchmarks.search_peers.scores import score_trace, top_trials

SPACE = {
    "lr": {"type": "float", "low": 1e-4, "high": 1.0, "log": True},
    "width": [16, 32, 64],
    "kind": ["a", "b"],
}


def write_recording(
    folder: Path, curves: list[list[float]], max_train_seconds: float = 10.0
) -> Path:
    """A recording whose trials have one evaluation a second, with these metrics.

    The target is 0.9.
    """
    folder.mkdir(parents=True)
    study = {
        "metric": "accuracy",
        "mode": "max",
        "target": 0.9,
        "max_train_seconds": max_train_seconds,
        "num_trials": len(curves),
    }
    (folder / "study.yaml").write_text(
        yaml.safe_dump({**study, "clock": "made up", "source": "made up"})
    )
    (folder / "space.yaml").write_text(yaml.safe_dump(SPACE))
    rng = np.random.default_rng(0)
    trials = list(range(len(curves)))
    points = {
        "trial": trials,
        "lr": [float(10 ** rng.uniform(-4, 0)) for _ in trials],
        "width": [int(rng.choice([16, 32, 64])) for _ in trials],
        "kind": [str(rng.choice(["a", "b"])) for _ in trials],
    }
    pq.write_table(pa.table(points), folder / "trials.parquet")
    rows = [
        (trial, step + 1, step + 1.0, metric)
        for trial, curve in enumerate(curves)
        for step, metric in enumerate(curve)
    ]
    columns = dict(
        zip(("trial", "step", "train_seconds", "metric"), zip(*rows, strict=True), strict=True)
    )
    pq.write_table(pa.table(columns), folder / "curves.parquet")
    return folder


def rising(seconds: int) -> list[float]:
    """A curve that reaches the target after so many seconds."""
    return [0.9 * (each + 1) / seconds for each in range(seconds - 1)] + [0.95]


def many() -> list[list[float]]:
    """Forty trials: four that reach the target, one of them first."""
    return [rising(2), rising(5), rising(6), rising(8)] + [
        [0.1 + 0.01 * trial] * 8 for trial in range(36)
    ]


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        write_recording(tmp_path / "recordings" / name, many())
    return tmp_path / "recordings"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(benchmarks.measuring, "RESULTS", tmp_path / "results")
    monkeypatch.delenv("AUTOTUNE_RECORDINGS", raising=False)
    return tmp_path / "results"


def trace_of(*stretches: tuple[int, float, float, str]) -> Trace:
    """A trace of (trial, clock seconds at its end, train seconds, outcome) with one worker."""
    return Trace(
        num_workers=1,
        stretches=tuple(
            Stretch(
                trial=trial,
                worker=0,
                started_seconds=stopped - seconds,
                stopped_seconds=stopped,
                from_train_seconds=0.0,
                train_seconds=seconds,
                outcome=outcome,
            )
            for trial, stopped, seconds, outcome in stretches
        ),
    )


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return read_recording(write_recording(tmp_path / "made", many()))


def test_the_cost_multiple_is_what_was_spent_until_the_winner_over_its_time(
    recording: Recording,
) -> None:
    score = score_trace(
        recording, trace_of((10, 8.0, 8.0, "MISSED"), (0, 10.0, 2.0, "REACHED")), 100.0
    )
    assert score["cost_multiple"] == 5.0
    assert not score["threw_last_winner_away"]


def test_who_throws_the_last_winner_away_is_charged_a_random_search_on_top(
    recording: Recording,
) -> None:
    score = score_trace(
        recording, trace_of((0, 1.0, 1.0, "STOPPED"), (10, 9.0, 8.0, "MISSED")), 100.0
    )
    assert score["cost_multiple"] == (9.0 + 100.0) / 2.0
    assert score["threw_last_winner_away"]


def test_a_winner_that_was_stopped_is_lost_and_one_that_was_paused_is_not(
    recording: Recording,
) -> None:
    assert top_trials(recording, trace_of((0, 1.0, 1.0, "STOPPED"))) == (1, 1)
    assert top_trials(recording, trace_of((0, 1.0, 1.0, PAUSED))) == (1, 0)
    # the top 5% of forty trials are two
    assert top_trials(recording, trace_of((2, 1.0, 1.0, "STOPPED"))) == (0, 0)


def test_a_trial_that_could_not_win_any_more_is_not_lost(recording: Recording) -> None:
    assert top_trials(recording, trace_of((2, 6.0, 6.0, "REACHED"), (1, 9.0, 3.0, "CAPPED"))) == (
        1,
        1,
    )
    assert top_trials(recording, trace_of((0, 2.0, 2.0, "REACHED"), (1, 4.0, 2.0, "STOPPED"))) == (
        1,
        0,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [name for name, kind in POLICIES.items() if kind.library is not None]
)
def test_a_peer_searches_by_its_own_interface(recordings: Path, policy: str) -> None:
    pytest.importorskip(POLICIES[policy].library or "")
    scores = [
        run_search(Search(recording=recordings / "one", policy=policy, seed=0, num_workers=2))
        for _ in range(2)
    ]
    assert scores[0].cost_multiple >= 1
    assert scores[0].cost_multiple == scores[1].cost_multiple


@pytest.mark.slow
def test_a_run_writes_numbers_and_figures(
    recordings: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "--recordings",
        str(recordings),
        "--policies",
        "random,tpe_cap",
        "--seeds",
        "2",
        "--workers",
        "1,3",
        "--processes",
        "0",
    ]
    assert main([*command, "--decision-seconds", "0"]) == 0
    (path,) = results.glob("*.json")
    written: dict[str, Any] = json.loads(path.read_text())["result"]
    assert len(written["searches"]) == 2 * 3 * 2 * 2
    assert {each["policy"] for each in written["policies"]} == {"random", "tpe_cap", "random_cap"}
    assert len(list(results.glob("*.html"))) == 4
    printed = capsys.readouterr().out
    assert "tpe_cap" in printed
    assert "two" in printed
