"""Importances of parameters for steps to target and seconds a step, from made-up curves whose
steps and seconds are formulas.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.measurement import Target
from autotune.recording import RecordedTrial, Recording
from autotune.search.importances import Importances, log_steps_to_target, time_importances
from autotune.space import SearchSpace, Suggestion

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=1e6)
SPACE = SearchSpace.from_mapping(
    {
        "optimizer": {
            "type": "choice",
            "choices": {
                "sgd": {"optimizer.lr": {"type": "float", "low": 1e-3, "high": 1, "log": True}},
                "adamw": {
                    "optimizer.eps": {"type": "float", "low": 1e-9, "high": 1e-6, "log": True}
                },
            },
        },
        "batch_size": {"type": "power_of_two", "low": 16, "high": 512},
        "model.widths": [[8, 16], [16, 32]],
    },
    "space.yaml",
)


def log_steps(values: dict[str, Any]) -> float:
    off = abs(math.log10(values["optimizer.lr"] / 0.03)) if values["optimizer"] == "sgd" else 0.8
    return math.log(50) + 1.5 * off


def trained(number: int, values: dict[str, Any], num_evaluations: int) -> RecordedTrial:
    """A trial whose accuracy is 0.9 after ``exp(log_steps)`` steps, ended there or after
    ``num_evaluations`` of ten steps.
    """
    needed = math.exp(log_steps(values))
    steps = [10.0 * index for index in range(1, num_evaluations + 1)]
    steps = steps[
        : next((index + 1 for index, step in enumerate(steps) if step >= needed), len(steps))
    ]
    seconds = 0.01 * values["batch_size"] * (1.3 if values["model.widths"] == [16, 32] else 1.0)
    return RecordedTrial(
        number=number,
        suggestion=Suggestion(values),
        steps=tuple(steps),
        train_seconds=tuple(5.0 + seconds * step for step in steps),
        prepare_seconds=(5.0,) * len(steps),
        metrics=tuple(1 - 0.1 ** ((step / needed) ** 0.5) for step in steps),
    )


def recording(
    num_trials: int = 40,
    evaluations: Callable[[random.Random], int] = lambda draw: draw.choice([1, 3, 40]),
) -> Recording:
    """Trials at random points, most of which were stopped after one evaluation or three."""
    draw, trials = random.Random(0), []
    for number in range(num_trials):
        values: dict[str, Any] = {"optimizer": draw.choice(["sgd", "adamw"])}
        if values["optimizer"] == "sgd":
            values["optimizer.lr"] = 10 ** draw.uniform(-3, 0)
        else:
            values["optimizer.eps"] = 10 ** draw.uniform(-9, -6)
        values |= {
            "batch_size": 2 ** draw.randint(4, 9),
            "model.widths": draw.choice([[8, 16], [16, 32]]),
        }
        trials.append(trained(number, values, evaluations(draw)))
    return Recording(target=TARGET, space=SPACE, trials=tuple(trials))


def importances(recorded: Recording) -> Importances:
    found = time_importances(recorded)
    assert found is not None
    return found


def ordered(found: Importances, quantity: str) -> list[str]:
    """The parameters, the one that decides most of a quantity first."""
    return [*found.shares[quantity].sort_values(ascending=False).index]


def test_what_decides_steps_and_what_decides_seconds_a_step_are_told_apart() -> None:
    found = importances(recording())
    assert [*found.shares] == ["time to target", "steps to target", "seconds a step"]
    assert [*found.shares.index] == ordered(found, "time to target")
    assert ordered(found, "steps to target")[0] == "optimizer=sgd/optimizer.lr"
    assert ordered(found, "seconds a step")[0] == "batch_size"
    assert found.num_trials == 40
    assert found.shares.sum().to_numpy() == pytest.approx(1)
    assert found.shares.to_numpy().min() >= 0
    assert importances(recording()).shares.equals(found.shares), "the same at each call"


def test_steps_of_a_stopped_trial_are_estimated_from_how_far_it_came() -> None:
    trials = recording().trials
    estimated = log_steps_to_target(trials, TARGET)
    true = np.array([log_steps(dict(trial.suggestion.values)) for trial in trials])
    is_stopped = np.array([trial.index_of_target(TARGET) is None for trial in trials])
    assert is_stopped.sum() > 20
    assert np.corrcoef(estimated[is_stopped], true[is_stopped])[0, 1] > 0.9
    assert (estimated >= np.log([trial.steps[-1] for trial in trials]) - 1e-9).all()


def test_without_trials_at_the_target_the_best_metric_of_a_few_takes_its_place() -> None:
    found = importances(recording(evaluations=lambda draw: 3))
    time, steps, _ = found.shares
    assert time.startswith("time to accuracy 0.")
    assert steps.startswith("steps to accuracy 0.")
    assert ordered(found, steps)[0] == "optimizer=sgd/optimizer.lr"
    assert ordered(found, "seconds a step")[0] == "batch_size"


def test_of_a_quantity_that_is_the_same_in_all_trials_no_parameter_has_a_share() -> None:
    trials = [
        replace(trial, metrics=(0.5, 0.9), **_cut(trial, 2))
        for trial in recording(evaluations=lambda draw: 2).trials
    ]
    found = importances(Recording(target=TARGET, space=SPACE, trials=tuple(trials)))
    assert not found.shares["steps to target"].any()
    assert ordered(found, "time to target")[0] == "batch_size"


def _cut(trial: RecordedTrial, length: int) -> dict[str, Any]:
    fields = ("steps", "train_seconds", "prepare_seconds")
    return {name: getattr(trial, name)[:length] for name in fields}


def test_too_few_trials_say_nothing() -> None:
    assert time_importances(recording(7)) is None
    assert time_importances(replace(recording(), trials=())) is None


def test_a_parameter_that_never_varied_is_left_out() -> None:
    recorded = recording()
    same = [
        replace(trial, suggestion=Suggestion({**trial.suggestion.values, "batch_size": 64}))
        for trial in recorded.trials
    ]
    found = importances(replace(recorded, trials=tuple(same)))
    assert "batch_size" not in found.shares.index
    nothing = [
        replace(trial, suggestion=recorded.trials[0].suggestion) for trial in recorded.trials
    ]
    assert time_importances(replace(recorded, trials=tuple(nothing))) is None
