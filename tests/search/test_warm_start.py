"""What a search takes from earlier studies: matched by key, told what is left out, believed only
as far as the new trials agree.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from autotune.errors import ConfigError
from autotune.measurement import Target
from autotune.objective import AmortisedTime
from autotune.policy import Start
from autotune.recording import RecordedTrial, Recording
from autotune.search.curve_model import GaussianProcess
from autotune.search.freeze_thaw import FreezeThawSampler
from autotune.search.scheduler import PointPlacement, Scheduler
from autotune.search.stopping import CapAtIncumbent, NeverStop
from autotune.search.warm_start import EarlierStudy, earlier_study, first_points
from autotune.space import SearchSpace, Suggestion
from benchmarks.replay.simulation import replay
from tests.support.policies import policy_over

TARGET = Target(metric="accuracy", value=0.9, mode="max", max_train_seconds=64.0)
ERROR = Target(metric="error", value=3.0, mode="min", max_train_seconds=640.0)
OBJECTIVE = AmortisedTime(num_trainings=1)
SPACE = SearchSpace.from_mapping(
    {
        "lr": {"type": "float", "low": 1e-4, "high": 1.0, "log": True},
        "size": {"type": "power_of_two", "low": 8, "high": 64},
    },
    "",
)


def study_of(
    space: Mapping[str, Any], *rows: Mapping[str, Any], target: Target = TARGET
) -> Recording:
    """A recording of trials with these values, each with one evaluation."""
    trials = [
        RecordedTrial(
            number=number,
            suggestion=Suggestion(values),
            steps=(1.0,),
            train_seconds=(1.0,),
            metrics=(0.1 * number,),
        )
        for number, values in enumerate(rows)
    ]
    return Recording(target=target, space=SearchSpace.from_mapping(space, ""), trials=tuple(trials))


def test_trials_are_matched_by_key_and_what_is_left_out_is_said() -> None:
    wider = {
        "lr": {"type": "float", "low": 1e-6, "high": 10.0, "log": True},
        "momentum": {"type": "float", "low": 0, "high": 1},
    }
    recorded = study_of(
        wider,
        {"lr": 0.1, "momentum": 0.5},
        {"lr": 5.0, "momentum": 0.1},
        {"lr": 1.0 + 1e-12, "momentum": 0.1},
    )
    found = earlier_study("old", recorded, SPACE)
    assert [(each.number, dict(each.suggestion.values)) for each in found.trials] == [
        (0, {"lr": 0.1}),
        (2, {"lr": 1.0}),
    ]
    assert (
        found.summary
        == "old: 2 of 3 trials; 1 left out, whose lr this search space does not have; left out:"
        " momentum, not in this search space; unknown there: size"
    )


def test_a_study_of_which_nothing_fits_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^warm_start: old: 0 of 1 trials; .*; use a study of which a trial fits",
    ) as refused:
        earlier_study("old", study_of({"width": [1, 2]}, {"width": 1}), SPACE)
    assert "\n" not in str(refused.value)


def curve(number: int, lr: float, size: int, *, best_lr: float, target: Target) -> RecordedTrial:
    """Rises to a limit that the rate decides.

    A step's seconds grow with the size; an error is a hundred times the lack of accuracy.
    """
    miss = abs(math.log10(lr / best_lr))
    steps = tuple(float(each) for each in range(1, 33))
    accuracies = [(0.97 - 0.1 * miss) * (1 - math.exp(-each / (2 + 2 * miss))) for each in steps]
    slow = size / 8 * (1 if target is TARGET else 10)
    metrics = tuple(each if target is TARGET else 3.0 + 100 * (0.9 - each) for each in accuracies)
    seconds = tuple(each * slow for each in steps)
    return RecordedTrial(
        number=number,
        suggestion=Suggestion({"lr": lr, "size": size}),
        steps=steps,
        train_seconds=seconds,
        metrics=metrics,
    )


def recording(best_lr: float, seed: int, count: int = 60, target: Target = TARGET) -> Recording:
    rng = np.random.default_rng(seed)
    points = [(float(10 ** rng.uniform(-4, 0)), int(2 ** rng.integers(3, 7))) for _ in range(count)]
    trials = [
        curve(number, lr, size, best_lr=best_lr, target=target)
        for number, (lr, size) in enumerate(points)
    ]
    return Recording(target=target, space=SPACE, trials=tuple(trials))


def policy(
    place: PointPlacement | None, *earlier: EarlierStudy, seed: int = 0, pausing: bool = True
) -> Scheduler:
    sampler = FreezeThawSampler(
        space=SPACE, target=TARGET, objective=OBJECTIVE, seed=seed, earlier=earlier
    )
    return policy_over(
        SPACE,
        TARGET,
        seed=seed,
        first=first_points(earlier, SPACE, seed=seed),
        stopping=CapAtIncumbent(objective=OBJECTIVE, cap_margin=1.0) if pausing else NeverStop(),
        sampler=sampler if pausing else None,
        place=place,
    )


def cost(recorded: Recording, *earlier: EarlierStudy) -> float:
    """Mean over seeds of the logarithm of the seconds until a good trial was found."""
    found = []
    for seed in range(3):
        # bound at once
        trace = replay(recorded, lambda place, seed=seed: policy(place, *earlier, seed=seed))  # type: ignore[misc]
        found.append(trace.seconds_until(recorded, 0.1))
    return float(np.mean(np.log([each for each in found if each is not None])))


@pytest.mark.parametrize("pausing", [True, False])
def test_the_first_points_are_the_best_of_earlier_studies(pausing: bool) -> None:
    one, other = (earlier_study(str(seed), recording(1e-2, seed), SPACE) for seed in (1, 2))
    expected = first_points([one, other], SPACE, seed=0)
    best = [
        min(each.trials, key=lambda trial: trial.time_to_target(TARGET) or math.inf)
        for each in (one, other)
    ]
    assert [dict(each.values) for each in expected[:2]] == [
        dict(each.suggestion.values) for each in best
    ]
    made = policy(None, one, other, pausing=pausing)
    answers = [made.suggest() for _ in range(6)]
    tried = [answer.trial.suggestion for answer in answers if isinstance(answer, Start)]
    # a search that pauses has points drawn by chance in between
    places = [0, 2, 4] if pausing else [0, 1, 2]
    assert [tried[place] for place in places] == expected
    assert all(tried[place] not in expected for place in range(6) if place not in places)


def test_a_related_study_helps_whatever_its_metric_and_its_speed() -> None:
    recorded = recording(1e-2, 0, count=300)
    assert cost(recorded, earlier_study("like", recording(1e-2, 1, target=ERROR), SPACE)) < cost(
        recorded
    ) - math.log(1.25)


def test_a_study_that_the_rows_contradict_is_left_out() -> None:
    rng = np.random.default_rng(0)
    points = np.column_stack([rng.random((40, 2)), np.zeros(40), np.arange(40.0)])
    truth = np.sin(3 * points[:, 0]) + points[:, 1]
    prior_means = np.column_stack([truth, -truth])
    model = GaussianProcess(2, of_curves=True)
    for _ in range(2):  # hyperparameters are learnt, and used
        model.fit(points[:20], truth[:20], np.arange(20), prior_means[:20])
    plain, right, wrong = (
        model.predict(points[20:], prior_means[20:] + step)[0]
        for step in ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0])
    )
    assert (right - plain).mean() > 0.3  # what a step of the one that agrees is worth
    assert wrong == pytest.approx(plain)
