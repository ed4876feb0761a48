"""The benchmark of searches over functions: synthetic ones, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

import benchmarks.measuring
from autotune.search.points import RandomTrial
from autotune.space import Suggestion
from benchmarks.function_search import BUDGETS, FunctionPoints, Synthetic, as_recording, main


def test_a_late_riser_is_flat_for_a_tenth_of_its_training_and_then_rises() -> None:
    for seed in range(20):
        late, early = Synthetic(seed, is_late=True), Synthetic(seed, is_late=False)
        drawn = RandomTrial(np.random.default_rng(seed))
        points = [late.space.suggest(drawn) for _ in range(20)]
        risen = []
        for point in points:
            (seconds, metrics), (_, without) = late.curve(point), early.curve(point)
            assert metrics[:3] == pytest.approx(0.1, abs=0.015)
            assert without[2] > 0.12
            assert (np.diff(seconds) > 0).all()
            risen.append(metrics[-1] - 0.1)
        assert max(risen) > 0.2


def test_a_point_is_trained_again_at_another_pace() -> None:
    function, recording, full_seconds = as_recording("early", 1, None)
    assert (
        np.mean([t.time_to_target(recording.target) is not None for t in recording.trials]) < 0.11
    )
    assert recording.target.max_train_seconds == 1.5 * full_seconds
    points = FunctionPoints(function, seed=0)
    point: Suggestion = recording.trials[0].suggestion
    assert points(point) is point
    points(point)
    first, second = points.trials
    assert first.train_seconds == second.train_seconds
    assert first.metrics != second.metrics
    assert points.last is second


def test_the_first_policy_is_compared_with_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmarks.measuring, "RESULTS", tmp_path)
    command = "--functions early --numbers 0,1 --policies tpe_cap,random_cap --seeds 1"
    assert main(command.split()) == 0
    assert "Best found by tpe_cap / by another, early: 2 functions" in capsys.readouterr().out
    (path,) = tmp_path.glob("function_search_early-*.json")
    result = json.loads(path.read_text())["result"]
    assert len(result["found"]) == 4
    by_budget = {(row[0], row[1]): row[3:] for row in result["found"]}
    for index in range(len(BUDGETS)):
        ratios = [
            by_budget["tpe_cap", number][index] / by_budget["random_cap", number][index]
            for number in (0, 1)
        ]
        told = result["ratios"]["random_cap"][index][0]
        assert told == pytest.approx(float(np.exp(np.log(ratios).mean())))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--surrogate /nowhere", "no surrogate: found /nowhere; give --surrogate DIR"),
        ("--functions late --policies tep", "--policies: found tep; use random,"),
        ("--functions late --numbers 1,x", "--numbers: found 1,x; use whole numbers"),
    ],
)
def test_what_is_missing_or_wrong_is_said_in_a_line(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert message in capsys.readouterr().out
