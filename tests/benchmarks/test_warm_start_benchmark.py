"""The warm-start benchmark: what it makes of earlier studies, its ratios, and a whole run over
tiny recordings.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import benchmarks.measuring
from autotune.measurement import Target, TrialResult
from autotune.outcome import Outcome
from autotune.recording import read_recording, write_recording
from benchmarks.warm_start import Score, changed, main, ratios_of
from tests.support.records import make_evaluation, make_result

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=40.0)


def result(trial: int, lr: float, seconds: float) -> TrialResult:
    """A trial that reaches the target at its fourth evaluation, after so many seconds."""
    evaluations = [
        make_evaluation(
            seconds * step / 4,
            step=step,
            epoch=step,
            samples=step,
            metric=0.23 * step,
            loss=0.0,
            outcome=Outcome.REACHED if step == 4 else None,
        )
        for step in range(1, 5)
    ]
    return make_result(trial, Outcome.REACHED, *evaluations, values={"lr": lr})


def write_twenty(folder: Path, *, high: float = 1.0) -> None:
    """A recording of twenty trials, over rates up to ``high``."""
    write_recording(
        folder,
        results=[result(trial, trial / 20, 4.0 + abs(trial - 7)) for trial in range(20)],
        target=TARGET,
        space={"lr": {"type": "float", "low": 0.0, "high": high}},
        source="made up",
    )


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Two recordings of one search space, and one of another."""
    for name, high in (("kin_a", 1.0), ("kin_b", 1.0), ("other_c", 2.0)):
        write_twenty(tmp_path / "recordings" / name, high=high)
    return tmp_path / "recordings"


def test_earlier_studies_are_thinned_of_winners_shuffled_or_inverted(recordings: Path) -> None:
    one, other = (read_recording(recordings / name) for name in ("kin_a", "kin_b"))
    rng = np.random.default_rng(0)
    assert [each.number for each in changed(one, "thinned", other, rng)] == [
        each for each in range(20) if each != 7
    ]
    inverted = {
        each.number: each.time_to_target(TARGET) for each in changed(one, "inverted", other, rng)
    }
    assert (inverted[7], inverted[19]) == (16.0, 4.0)
    shuffled = changed(one, "shuffled", other, rng)
    assert [each.suggestion for each in shuffled] == [each.suggestion for each in one.trials]
    assert sorted(each.train_seconds for each in shuffled) == sorted(
        each.train_seconds for each in one.trials
    )
    assert shuffled != list(one.trials)


def test_a_ratio_is_cold_over_warm() -> None:
    scores = [
        Score(
            recording=name, kind=kind, seed=seed, cost_multiple=cost, num_trials=1, wall_seconds=1.0
        )
        for name, costs in (("kin_a", (20.0, 10.0)), ("own_b", (30.0, 60.0)))
        for kind, cost in zip(("cold", "whole"), costs, strict=True)
        for seed in range(2)
    ]
    ratios = {each.group: each for each in ratios_of(scores)}
    assert {group: each.ratio for group, each in ratios.items()} == pytest.approx(
        {"all": 1.0, "kin": 2.0, "own": 0.5}
    )
    assert (ratios["all"].worst_recording, ratios["all"].num_searches) == ("own_b", 4)
    assert math.isclose(ratios["kin"].low, 2.0)


@pytest.mark.slow
def test_a_run_keeps_every_search(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks.measuring, "RESULTS", tmp_path / "results")
    assert main(["--recordings", str(recordings), "--seeds", "1", "--kinds", "whole"]) == 0
    (path,) = (tmp_path / "results").glob("warm_start-*.json")
    searches = json.loads(path.read_text())["result"]["searches"]
    assert [(each["recording"], each["kind"], each["seed"]) for each in searches] == [
        (name, kind, 0) for name in ("kin_a", "kin_b") for kind in ("cold", "whole")
    ]
    assert str(tmp_path) not in path.read_text()
