"""Importances of parameters, from made-up results of which one parameter alone decides."""

import math
import random
from typing import Any

import pytest

from autotune.measurement import TrialResult
from autotune.outcome import Outcome
from autotune.search.importances import importances
from autotune.search.samplers import quiet_optuna
from autotune.space import SearchSpace

SPACE = SearchSpace.from_mapping(
    {
        "optimizer": {
            "type": "choice",
            "choices": {
                "sgd": {"optimizer.lr": {"type": "float", "low": 1e-3, "high": 1, "log": True}},
                "adamw": {"optimizer.eps": {"type": "float", "low": 1e-9, "high": 1e-6, "log": True}},
            },
        },
        "batch_size": {"type": "power_of_two", "low": 16, "high": 512},
        "model.widths": [[8, 16], [16, 32]],
    },
    "space.yaml",
)


@pytest.fixture(autouse=True)
def quiet() -> None:
    quiet_optuna()


def results_and_scores(num_trials: int = 60) -> tuple[list[TrialResult], dict[int, float]]:
    """Trials at random points, of which those of sgd with a rate near 0.03 are fast and those far from it miss the target."""
    draw = random.Random(0)
    results, scores = [], {}
    for number in range(num_trials):
        values: dict[str, Any] = {"optimizer": draw.choice(["sgd", "adamw"])}
        if values["optimizer"] == "sgd":
            values["optimizer.lr"] = 10 ** draw.uniform(-3, 0)
            off = abs(math.log10(values["optimizer.lr"] / 0.03))
        else:
            values["optimizer.eps"] = 10 ** draw.uniform(-9, -6)
            off = 0.8
        values |= {"batch_size": 2 ** draw.randint(4, 9), "model.widths": draw.choice([[8, 16], [16, 32]])}
        reached = off < 1
        if reached:
            scores[number] = 1 + off + 0.01 * draw.random()
        results.append(
            TrialResult(
                trial=number,
                values=values,
                overrides=(),
                seed=0,
                outcome=Outcome.REACHED if reached else Outcome.MISSED,
                evaluations=(),
                started_at=0.0,
                stopped_at=1.0,
                fingerprint={},
            )
        )
    return results, scores


def ending(result: TrialResult, outcome: Outcome, **values: Any) -> TrialResult:
    return TrialResult.from_dict({**result.as_dict(), "outcome": outcome, **values})


def test_the_parameter_that_decides_comes_first() -> None:
    found = importances(*results_and_scores(), SPACE)
    assert next(iter(found)) == "optimizer=sgd/optimizer.lr"
    assert sum(found.values()) == pytest.approx(1)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert set(found) <= {name.replace("batch_size", "log2(batch_size)") for name, _, _ in SPACE.items()}
    assert found["optimizer=sgd/optimizer.lr"] > 2 * found.get("model.widths", 0)


def test_too_few_trials_at_the_target_say_nothing() -> None:
    results, scores = results_and_scores()
    few = dict(list(scores.items())[:3])
    assert importances(results, few, SPACE) == {}
    assert importances([], {}, SPACE) == {}


def test_a_parameter_that_never_varied_is_left_out() -> None:
    results, scores = results_and_scores()
    same = [ending(each, each.outcome, values={**each.values, "batch_size": 64}) for each in results]
    assert "log2(batch_size)" not in importances(same, scores, SPACE)


def test_what_could_not_be_trained_and_a_baseline_outside_of_the_space_do_not_count() -> None:
    results, scores = results_and_scores()
    expected = importances(results, scores, SPACE)
    first = max(each.trial for each in results) + 1
    others = [
        ending(results[0], Outcome.OUT_OF_MEMORY, trial=first),
        ending(results[0], Outcome.DIVERGED, trial=first + 1),
        ending(results[0], Outcome.ERRORED, trial=first + 2),
        ending(results[0], Outcome.REACHED, trial=first + 3, values={}),
    ]
    assert importances([*results, *others], {**scores, first + 3: 1.0}, SPACE) == expected


def test_scores_below_zero_rank_censored_trials_last_too() -> None:
    results, scores = results_and_scores()
    shifted = {number: score - 100 for number, score in scores.items()}
    assert importances(results, shifted, SPACE) == pytest.approx(importances(results, scores, SPACE))
