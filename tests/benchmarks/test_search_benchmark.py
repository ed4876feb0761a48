"""The search benchmark: what it charges, what it counts as lost, and a whole run over tiny
recordings.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.measuring
from autotune.measurement import PAUSED
from autotune.recording import Recording, read_recording
from benchmarks.replay.simulation import Stretch, Trace
from benchmarks.search import Search, main, run_search
from benchmarks.search_peers.policies import POLICIES
from benchmarks.search_peers.scores import score_trace, top_trials
from tests.support.recordings import write_raw_recording

SPACE = {
    "lr": {"type": "float", "low": 1e-4, "high": 1.0, "log": True},
    "width": [16, 32, 64],
    "kind": ["a", "b"],
}


def write_recording(folder: Path, curves: list[list[float]]) -> Path:
    """A recording of trials at random points with these curves."""
    rng = np.random.default_rng(0)
    points = {
        "lr": [float(10 ** rng.uniform(-4, 0)) for _ in curves],
        "width": [int(rng.choice([16, 32, 64])) for _ in curves],
        "kind": [str(rng.choice(["a", "b"])) for _ in curves],
    }
    return write_raw_recording(folder, SPACE, points, curves)


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


@pytest.mark.parametrize(
    ("stretches", "cost_multiple", "is_lost"),
    [
        ([(10, 8.0, 8.0, "MISSED"), (0, 10.0, 2.0, "REACHED")], 5.0, False),
        # a random search comes on top
        ([(0, 1.0, 1.0, "STOPPED"), (10, 9.0, 8.0, "MISSED")], (9.0 + 100.0) / 2.0, True),
    ],
)
def test_the_cost_multiple_is_what_was_spent_until_the_winner_over_its_time(
    recording: Recording,
    stretches: list[tuple[int, float, float, str]],
    cost_multiple: float,
    is_lost: bool,
) -> None:
    score = score_trace(recording, trace_of(*stretches), 100.0)
    assert (score["cost_multiple"], score["threw_last_winner_away"]) == (cost_multiple, is_lost)


def test_a_search_that_was_ended_is_charged_what_it_spent_and_lost_nothing(
    recording: Recording,
) -> None:
    trace = trace_of((10, 8.0, 8.0, "MISSED"), (0, 9.0, 1.0, "STOPPED"))
    score = score_trace(recording, trace, 0.0, max_seconds=9.0)
    assert (score["cost_multiple"], score["threw_last_winner_away"]) == (4.5, False)


def test_searches_end_at_a_budget_and_are_each_of_other_trials(recordings: Path) -> None:
    of_half = [
        run_search(
            Search(
                recording=recordings / "one",
                policy="random",
                seed=seed,
                num_workers=1,
                best_times=5,
                keep=0.5,
            )
        )
        for seed in range(4)
    ]
    assert all(score.cost_multiple <= 5 for score in of_half)
    assert any(score.cost_multiple == 5 for score in of_half)
    assert not any(score.threw_last_winner_away for score in of_half)


@pytest.mark.parametrize(
    ("stretches", "winners"),
    [
        ([(0, 1.0, 1.0, "STOPPED")], (1, 1)),
        ([(0, 1.0, 1.0, PAUSED)], (1, 0)),
        # the top 5% of forty trials are two
        ([(2, 1.0, 1.0, "STOPPED")], (0, 0)),
        ([(2, 6.0, 6.0, "REACHED"), (1, 9.0, 3.0, "CAPPED")], (1, 1)),
        # it could not win any more
        ([(0, 2.0, 2.0, "REACHED"), (1, 4.0, 2.0, "STOPPED")], (1, 0)),
    ],
)
def test_a_winner_that_was_stopped_is_lost_and_one_that_was_paused_is_not(
    recording: Recording,
    stretches: list[tuple[int, float, float, str]],
    winners: tuple[int, int],
) -> None:
    assert top_trials(recording, trace_of(*stretches)) == winners


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
