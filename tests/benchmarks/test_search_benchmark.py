"""The search benchmark: what it charges, what it counts as lost, and a whole run over tiny recordings."""

import importlib.util
import json
import math
from dataclasses import replace
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
from autotune.space import SearchSpace, Suggestion
from benchmarks.replay.simulation import Stretch, Trace
from benchmarks.search import Search, complete_seeds, main, run_search, summaries_of
from benchmarks.search_parts import VARIANTS
from benchmarks.search_parts import main as search_parts
from benchmarks.search_peers.domains import FlatDomains, Options
from benchmarks.search_peers.policies import POLICIES
from benchmarks.search_peers.scores import BUDGETS, SearchScore, interval, score_trace, top_trials

SPACE = {"lr": {"type": "float", "low": 1e-4, "high": 1.0, "log": True}, "width": [16, 32, 64], "kind": ["a", "b"]}


def write_recording(folder: Path, curves: list[list[float]], max_train_seconds: float = 10.0) -> Path:
    """A recording whose trials have one evaluation a second, with these metrics; the target is 0.9."""
    folder.mkdir(parents=True)
    study = {"metric": "accuracy", "mode": "max", "target": 0.9, "max_train_seconds": max_train_seconds, "num_trials": len(curves)}
    (folder / "study.yaml").write_text(yaml.safe_dump({**study, "clock": "made up", "source": "made up"}))
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
    rows = [(trial, step + 1, step + 1.0, metric) for trial, curve in enumerate(curves) for step, metric in enumerate(curve)]
    columns = dict(zip(("trial", "step", "train_seconds", "metric"), zip(*rows, strict=True), strict=True))
    pq.write_table(pa.table(columns), folder / "curves.parquet")
    return folder


def rising(seconds: int) -> list[float]:
    """A curve that reaches the target after so many seconds."""
    return [0.9 * (each + 1) / seconds for each in range(seconds - 1)] + [0.95]


def many() -> list[list[float]]:
    """Forty trials: four that reach the target, one of them first."""
    return [rising(2), rising(5), rising(6), rising(8)] + [[0.1 + 0.01 * trial] * 8 for trial in range(36)]


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


def test_the_cost_multiple_is_what_was_spent_until_the_winner_over_its_time(recording: Recording) -> None:
    score = score_trace(recording, trace_of((10, 8.0, 8.0, "MISSED"), (0, 10.0, 2.0, "REACHED")), 100.0)
    assert score["cost_multiple"] == 5.0
    assert not score["threw_last_winner_away"]


def test_resuming_and_deciding_are_charged_besides(recording: Recording) -> None:
    trace = trace_of((10, 4.0, 4.0, PAUSED), (11, 6.0, 2.0, "MISSED"), (0, 8.0, 2.0, "REACHED"))
    resumed = replace(trace.stretches[1], from_train_seconds=1.0)
    trace = replace(trace, stretches=(trace.stretches[0], resumed, trace.stretches[2]))
    score = score_trace(recording, trace, 0.0, resume_seconds=1.0, decision_seconds=0.5)
    assert score["num_resumed"] == 1
    assert score["cost_multiple"] == 4.0
    assert score["charged_cost_multiple"] == (8.0 + 1.0 + 3 * 0.5) / 2.0


def test_who_throws_the_last_winner_away_is_charged_a_random_search_on_top(recording: Recording) -> None:
    score = score_trace(recording, trace_of((0, 1.0, 1.0, "STOPPED"), (10, 9.0, 8.0, "MISSED")), 100.0)
    assert score["cost_multiple"] == (9.0 + 100.0) / 2.0
    assert score["threw_last_winner_away"]


def test_a_winner_that_was_stopped_is_lost_and_one_that_was_paused_is_not(recording: Recording) -> None:
    assert top_trials(recording, trace_of((0, 1.0, 1.0, "STOPPED"))) == (1, 1)
    assert top_trials(recording, trace_of((0, 1.0, 1.0, PAUSED))) == (1, 0)
    assert top_trials(recording, trace_of((2, 1.0, 1.0, "STOPPED"))) == (0, 0)  # the top 5% of forty trials are two


def test_a_trial_that_could_not_win_any_more_is_not_lost(recording: Recording) -> None:
    assert top_trials(recording, trace_of((2, 6.0, 6.0, "REACHED"), (1, 9.0, 3.0, "CAPPED"))) == (1, 1)
    assert top_trials(recording, trace_of((0, 2.0, 2.0, "REACHED"), (1, 4.0, 2.0, "STOPPED"))) == (1, 0)


def test_regret_is_that_of_the_time_limit_until_a_trial_has_reached_the_target(recording: Recording) -> None:
    score = score_trace(recording, trace_of((3, 8.0, 8.0, "REACHED"), (0, 10.0, 2.0, "REACHED")), 0.0)
    assert dict(zip(BUDGETS, score["best_ratios"], strict=True)) == {each: 5.0 if each < 4 else 1.0 for each in BUDGETS}


def test_an_interval_holds_the_mean_and_one_search_has_none() -> None:
    logs = np.log(np.array([[10.0, 20.0], [40.0, 30.0], [15.0, 25.0]]))
    low, high = interval(logs)
    assert low < math.exp(logs.mean()) < high
    assert interval(logs[:1, :1]) == (0.0, math.inf)


@pytest.mark.parametrize("policy", ["random", "random_cap", "tpe_cap", "freeze_thaw"])
def test_a_policy_that_stops_nothing_that_could_win_finds_a_winner(recordings: Path, policy: str) -> None:
    score = run_search(Search(recording=recordings / "one", policy=policy, seed=0, num_workers=2))
    assert not score.threw_last_winner_away
    assert score.num_top_lost == 0
    assert 1 <= score.cost_multiple <= 40 * 8 / 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tpe_asha_stock", "tpe_asha_pruned"])
def test_successive_halving_loses_a_winner_that_begins_slowly(tmp_path: Path, policy: str) -> None:
    late = [0.0] * 6 + [0.95]  # at every rung below all others
    folder = write_recording(tmp_path / "late", [late, *([0.1 + 0.01 * trial] * 8 for trial in range(39))])
    scores = [run_search(Search(recording=folder, policy=policy, seed=seed, num_workers=1)) for seed in range(3)]
    lost = [each for each in scores if each.threw_last_winner_away]
    assert lost
    assert all(each.num_top_lost == each.num_top_started == 1 for each in lost)
    assert all(each.num_trials == 40 for each in lost)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [name for name, kind in POLICIES.items() if kind.library is not None])
def test_a_peer_searches_by_its_own_interface(recordings: Path, policy: str) -> None:
    pytest.importorskip(POLICIES[policy].library or "")
    scores = [run_search(Search(recording=recordings / "one", policy=policy, seed=0, num_workers=2)) for _ in range(2)]
    assert scores[0].cost_multiple >= 1
    assert scores[0].cost_multiple == scores[1].cost_multiple


def test_flat_domains_hold_every_branch_and_give_points_back() -> None:
    space = SearchSpace.from_mapping(
        {
            "optimizer": {
                "type": "choice",
                "choices": {"sgd": {"momentum": [0.9, 0.0]}, "adam": {"eps": {"type": "float", "low": 1, "high": 2}}},
            },
            "batch_size": {"type": "power_of_two", "low": 16, "high": 64},
            "fixed": [3],
        },
        "made up",
    )
    flat = FlatDomains(space)
    assert set(flat.domains) == {"optimizer", "optimizer=sgd/momentum", "optimizer=adam/eps", "log2(batch_size)"}
    assert flat.domains["optimizer=sgd/momentum"] == Options(labels=(0.0, 0.9), are_ordered=True)
    point = Suggestion({"optimizer": "sgd", "momentum": 0.9, "batch_size": 32, "fixed": 3})
    assert flat.values(point) == {"optimizer": 0, "optimizer=sgd/momentum": 1, "optimizer=adam/eps": 1.0, "log2(batch_size)": 5}
    assert flat.suggestion(flat.values(point)) == point


def score(policy: str, seed: int, cost_multiple: float, recording: str = "one") -> SearchScore:
    return SearchScore(
        recording=recording,
        policy=policy,
        seed=seed,
        num_workers=1,
        cost_multiple=cost_multiple,
        charged_cost_multiple=1.5 * cost_multiple,
        num_resumed=1,
        threw_last_winner_away=False,
        num_top_started=0,
        num_top_lost=0,
        num_trials=1,
        best_ratios=(1.0,) * len(BUDGETS),
        wall_seconds=1.0,
    )


def test_a_summary_names_the_recording_that_is_worst_relative_to_random_with_cap() -> None:
    scores = [score("random_cap", 0, 100.0), score("random_cap", 0, 10.0, "two"), score("tpe", 0, 50.0), score("tpe", 0, 40.0, "two")]
    best, other = summaries_of(scores)
    assert (best.policy, other.policy) == ("random_cap", "tpe")
    assert (other.worst_recording, other.worst_relative) == ("two", pytest.approx(4.0))
    assert other.relative == pytest.approx(math.sqrt(0.5 * 4.0))
    assert other.lost_winners_fraction is None


def test_where_time_ends_only_whole_seeds_count() -> None:
    scores = [score("random_cap", 0, 1.0), score("tpe", 0, 1.0), score("tpe", 1, 1.0)]
    assert complete_seeds(scores, 2) == scores[:2]


@pytest.mark.slow
def test_a_run_writes_numbers_and_figures(recordings: Path, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--recordings", str(recordings), "--policies", "random,tpe_cap", "--seeds", "2", "--workers", "1,3", "--processes", "0"]
    assert main([*command, "--decision-seconds", "0"]) == 0
    (path,) = results.glob("*.json")
    written: dict[str, Any] = json.loads(path.read_text())["result"]
    assert len(written["searches"]) == 2 * 3 * 2 * 2
    assert {each["policy"] for each in written["policies"]} == {"random", "tpe_cap", "random_cap"}
    assert len(list(results.glob("*.html"))) == 4
    printed = capsys.readouterr().out
    assert "tpe_cap" in printed
    assert "two" in printed


@pytest.mark.slow
def test_every_part_can_be_left_out_of_freeze_thaw(recordings: Path, results: Path) -> None:
    assert search_parts(["--recordings", str(recordings), "--names", "one", "--seeds", "1", "--processes", "0"]) == 0
    (path,) = results.glob("search_parts-*.json")
    written: dict[str, Any] = json.loads(path.read_text())["result"]
    assert [each["policy"] for each in written["variants"]] == list(VARIANTS)
    assert written["variants"][0]["relative"] == 1


def test_without_recordings_it_says_so_in_one_line(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr().out
    assert "AUTOTUNE_RECORDINGS" in printed
    assert printed.count("\n") == 1


def test_names_that_are_none_are_refused_with_those_that_are(recordings: Path, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recordings", str(recordings), "--policies", "tpee"]) == 2
    assert "accepted are random," in capsys.readouterr().out
    assert main(["--recordings", str(recordings), "--names", "three"]) == 2
    assert "one, two" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_skipped_and_said(
    recordings: Path, results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "smac" else found(name, *more))
    arguments = ["--names", "one", "--policies", "smac", "--seeds", "1", "--workers", "1", "--processes", "0", "--decision-seconds", "0"]
    assert main(["--recordings", str(recordings), *arguments]) == 0
    assert "skipped: smac" in capsys.readouterr().out
