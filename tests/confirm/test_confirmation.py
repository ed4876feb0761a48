"""Confirming: which configurations race, how a race is kept, and what its runs say of baseline
and winner.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from autotune.confirm.confirmation import (
    Confirmation,
    PlannedRace,
    conclude,
    plan_race,
)
from autotune.confirm.race import MIN_PAIRS, RaceLimits
from autotune.confirm.statistics import RunScore
from autotune.measurement import TrialResult
from autotune.objective import AmortisedTime, Objective
from autotune.outcome import Outcome
from autotune.reporting.scores import run_score
from autotune.space import Suggestion
from tests.support.records import make_evaluation, make_result

OBJECTIVE = AmortisedTime(num_trainings=1)
BASELINE = Suggestion({"lr": 0.1})


def made(
    trial: int, seconds: float | None, *, reached: bool = True, lr: float = 0.1
) -> TrialResult:
    """The result of a trial; without ``seconds`` it crashed."""
    outcome = Outcome.REACHED if reached else Outcome.MISSED if seconds else Outcome.ERRORED
    evaluations = [make_evaluation(seconds)] if seconds else []
    return make_result(trial, outcome, *evaluations, values={"lr": lr}, stopped_at=0.0)


def planned(
    times: Mapping[int, float],
    results: Mapping[int, TrialResult] | None = None,
    *,
    baseline: Suggestion = BASELINE,
    num_candidates: int = 8,
    first_round: int = 0,
) -> PlannedRace:
    """A race of trials that are expected to take so many seconds; trial 0 is the baseline.

    Without ``results`` they took as long, each with a configuration of its own.
    """
    usual = {trial: made(trial, each, lr=0.1 * (trial + 1)) for trial, each in times.items()}
    return plan_race(
        baseline_trial=0,
        baseline=baseline,
        results=results or usual,
        expected_scores=times,
        objective=OBJECTIVE,
        num_candidates=num_candidates,
        first_round=first_round,
    )


def concluded(
    baseline: Sequence[float | None],
    winner: Sequence[float | None],
    *,
    missed: Sequence[tuple[int, int]] = (),
    objective: Objective = OBJECTIVE,
    min_reach_rate: float = 0.0,
) -> Confirmation:
    """A race of one candidate: seconds of each pair's runs, None for one that crashed.

    Those in ``missed`` fell short of the target.
    """
    runs = {
        (trial, number): made(
            trial, each, reached=each is not None and (trial, number) not in missed
        )
        for trial, row in enumerate((baseline, winner))
        for number, each in enumerate(row)
    }
    limits = RaceLimits(
        max_runs=40, num_pairs=max(len(baseline), len(winner)), min_reach_rate=min_reach_rate
    )
    return conclude(planned({0: 2.0, 1: 1.0}), runs, limits, objective)


def test_the_baseline_comes_first_and_each_configuration_once() -> None:
    times, rates = {0: 5.0, 1: 2.0, 2: 3.0, 3: 1.0, 4: 4.0}, (1.0, 0.2, 0.3, 0.2, 1.0)
    results = {trial: made(trial, times[trial], lr=rates[trial]) for trial in times}
    race = planned(times, results, baseline=Suggestion({"lr": 1}))
    assert [(each.trial, each.label, each.expected_score) for each in race.configurations] == [
        (0, "baseline", 5.0),
        (3, "trial 3", 1.0),
        (2, "trial 2", 3.0),
    ]
    assert race.train_seconds == 15.0
    assert len(planned(times, results, num_candidates=1).configurations) == 2


def test_a_baseline_that_fell_short_is_expected_to_take_more_than_it_spent() -> None:
    results = {0: made(0, 7.0, reached=False), 1: made(1, 2.0, lr=0.2)}
    baseline, _ = planned({1: 2.0}, results).configurations
    assert (baseline.expected_score, baseline.least_score) == (None, 7.0)


def test_a_race_is_kept_and_goes_on_as_it_was_planned() -> None:
    race = planned({0: 5.0, 1: 2.0, 2: 3.0}, first_round=7)
    results = {trial: made(trial, 1.0, lr=0.1 * (trial + 1)) for trial in range(3)}
    assert PlannedRace.from_dict(race.as_dict(), BASELINE, results) == race


def on_device(
    device_type: str, trial: int, *, build_seconds: float = 0.0, wall_seconds: float = 9.0
) -> TrialResult:
    """A training of one second, which spent half a second on preparing and evaluating, too."""
    result = made(trial, 1.0, lr=0.1 * (trial + 1))
    phases = replace(
        result.evaluations[0],
        build_seconds=build_seconds,
        prepare_seconds=0.25,
        evaluate_seconds=0.25,
    )
    return replace(
        result,
        evaluations=(phases,),
        stopped_at=wall_seconds,
        fingerprint={"device_type": device_type},
    )


@pytest.mark.parametrize(
    ("device_type", "wanted"), [("cpu", [1.0, 1.0, 1.0]), ("cuda", [6.5, 6.5, 8.5])]
)
def test_on_a_gpu_a_run_is_expected_to_take_what_a_trial_took_in_a_fresh_process(
    device_type: str, wanted: list[float]
) -> None:
    # the first trial's process was a fresh one; the last one was also compiled
    build_seconds = [5.0, 0.1, 7.0]
    results = {
        trial: on_device(device_type, trial, build_seconds=each, wall_seconds=900.0)
        for trial, each in enumerate(build_seconds)
    }
    race = planned({0: 3.0, 1: 1.0, 2: 2.0}, results)
    assert [arm.run_seconds for arm in race.configurations] == wanted
    assert race.train_seconds == 3.0


@pytest.mark.parametrize(("device_type", "num_pairs"), [("cpu", 9), ("cuda", MIN_PAIRS)])
def test_on_a_gpu_all_seconds_of_a_run_are_taken_from_the_budget(
    device_type: str, num_pairs: int
) -> None:
    race, limits = planned({0: 1.0, 1: 1.0, 2: 1.0}), RaceLimits(max_runs=100, max_seconds=40.0)
    runs: dict[tuple[int, int], TrialResult] = {}
    while not (now := race.state(runs, limits, OBJECTIVE)).claim_rounds:
        runs |= {key: on_device(device_type, key[0]) for key in now.pending}
    assert len(now.claim_rounds) == num_pairs


def test_runs_of_an_earlier_race_have_no_part_in_a_later_one() -> None:
    race = planned({0: 5.0, 1: 1.0}, first_round=4)
    old = {(trial, number): made(trial, 1.0) for trial in (0, 1) for number in range(4)}
    limits = RaceLimits(max_runs=40, num_pairs=2)
    assert race.state(old, limits, OBJECTIVE).pending == race.state({}, limits, OBJECTIVE).pending
    new = {(trial, number): made(trial, [4.0, 2.0][trial]) for trial in (0, 1) for number in (4, 5)}
    confirmed = conclude(race, {**old, **new}, limits, OBJECTIVE)
    assert confirmed.speed_up is not None
    assert (confirmed.speed_up.ratio, len(confirmed.runs)) == (2.0, 4)


@pytest.mark.parametrize(
    ("baseline", "winner", "missed", "min_reach_rate", "best", "ratio", "claim"),
    [
        ([4.0, 6.0], [2.0, 3.0], [], 0.0, 1, 2.0, "measured"),
        ([4.0, 6.0, 5.0], [2.0, 3.0], [], 0.0, 1, 2.0, "measured"),  # interrupted
        ([9.0] * 3, [1.0] * 3, [(1, 1)], 0.0, 1, 6.0, "measured"),  # a miss is charged
        ([9.0] * 3, [1.0] * 3, [(1, 1)], 0.9, 0, 6.0, "measured"),  # or forbidden
        ([1.0] * 4, [3.0] * 4, [], 0.0, 0, 1 / 3, "measured"),
        ([1.0], [2.0], [(0, 0), (1, 0)], 0.0, None, None, None),
        ([8.0, 8.0], [2.0, 2.0], [(0, 0), (0, 1)], 0.0, 1, 4.0, "at least"),
        # a crash is a miss, and never left out
        ([None, 3.0], [2.0, 2.0], [], 0.0, 1, 3.0, "measured"),
        ([None, None], [2.0, 2.0], [], 0.0, 1, None, None),
    ],
)
def test_what_is_exported_and_claimed(
    baseline: Sequence[float | None],
    winner: Sequence[float | None],
    missed: Sequence[tuple[int, int]],
    min_reach_rate: float,
    best: int | None,
    ratio: float | None,
    claim: str | None,
) -> None:
    confirmed = concluded(baseline, winner, missed=missed, min_reach_rate=min_reach_rate)
    assert confirmed.chosen is confirmed.configurations[1]
    assert (None if confirmed.best is None else confirmed.best.trial) == best
    assert confirmed.is_baseline_best is (best == 0)
    assert (confirmed.speed_up and confirmed.speed_up.claim) == claim
    assert (confirmed.speed_up and confirmed.speed_up.ratio) == (ratio and pytest.approx(ratio))
    assert ("confirm.min_reach_rate is 0.9" in confirmed.reasons.get(1, "")) is (min_reach_rate > 0)


def test_an_objective_without_a_bound_gives_no_score_to_what_fell_short() -> None:
    class Only:
        def score(self, result: TrialResult) -> float:
            return OBJECTIVE.score(result)

    assert run_score(made(0, 8.0, reached=False), Only()) == RunScore(None, reached=False)
    assert concluded([8.0], [2.0], missed=[(0, 0)], objective=Only()).speed_up is None
