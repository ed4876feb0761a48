"""Confirming: which configurations race, how a race is kept, and what its runs say of baseline
and winner.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.confirm.confirmation import (
    Confirmation,
    PlannedRace,
    conclude,
    plan_race,
)
from autotune.confirm.race import MIN_PAIRS, RaceLimits, RaceState
from autotune.confirm.statistics import Claim, RunScore
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
    race = replace(planned({0: 5.0, 1: 2.0, 2: 3.0}), first_round=7, max_train_seconds=60.0)
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
    race = replace(planned({0: 5.0, 1: 1.0}), first_round=4)
    old = {(trial, number): made(trial, 1.0) for trial in (0, 1) for number in range(4)}
    limits = RaceLimits(max_runs=40, num_pairs=2)
    assert race.state(old, limits, OBJECTIVE).pending == race.state({}, limits, OBJECTIVE).pending
    new = {(trial, number): made(trial, [4.0, 2.0][trial]) for trial in (0, 1) for number in (4, 5)}
    confirmed = conclude(race, {**old, **new}, limits, OBJECTIVE)
    assert confirmed.speed_up is not None
    assert (confirmed.speed_up.ratio, len(confirmed.runs)) == (pytest.approx(2.0), 4)


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


Made = dict[tuple[int, int], TrialResult]


def run_out(
    race: PlannedRace,
    limits: RaceLimits,
    seconds: Callable[[int], float | None],
    runs: Made | None = None,
    *,
    most: int = 1000,
) -> tuple[Made, RaceState]:
    """All runs of the study and the state of a race after at most so many further ones.

    A run takes what ``seconds`` says of its trial; None if it timed out, after a minute.
    """
    runs, state = dict(runs or {}), race.state(runs or {}, limits, OBJECTIVE)
    while state.pending and most:
        trial, number = state.pending[0]
        taken = seconds(trial)
        result = made(trial, taken or 60.0, lr=0.1 * (trial + 1))
        if taken is None:
            result = replace(result, outcome=Outcome.TIMED_OUT)
        runs[trial, number + race.first_round] = result
        most, state = most - 1, race.state(runs, limits, OBJECTIVE)
    return runs, state


LIMITS = RaceLimits(max_runs=40)


def test_a_better_candidate_joins_a_race_whose_runs_are_kept() -> None:
    seconds = {0: 4.0, 1: 2.0, 2: 2.1, 3: 1.0}
    first = planned({0: 4.0, 1: 2.0, 2: 2.1})
    runs, ended = run_out(first, LIMITS, seconds.__getitem__)
    assert ended.winner == 1
    race = planned(seconds).joining(first, runs, LIMITS, OBJECTIVE)
    more, now = run_out(race, LIMITS, seconds.__getitem__, runs)
    assert runs.items() <= more.items()
    new = sorted(more.keys() - runs.keys())
    of_claim = [(trial, number) for number in now.claim_rounds for trial in (0, 3)]
    assert (now.winner, new) == (3, sorted([(3, 0), (3, 1), *of_claim]))
    assert not {number for _, number in runs} & set(now.claim_rounds), (
        "no run of the baseline that was made at another time"
    )
    confirmed = conclude(race, more, LIMITS, OBJECTIVE)
    assert confirmed.speed_up is not None
    assert confirmed.speed_up.ratio == pytest.approx(4.0)


def test_a_claim_continues_where_who_joins_is_no_better() -> None:
    seconds = {0: 4.0, 1: 2.0, 2: 4.0, 3: 3.0}
    first = planned({0: 4.0, 1: 2.0, 2: 2.1})
    runs, ended = run_out(first, LIMITS, seconds.__getitem__, most=8)  # two pairs of the claim
    assert (ended.winner, ended.look, len(ended.pending)) == (1, 4, 6)
    race = planned(seconds | {3: 1.9}).joining(first, runs, LIMITS, OBJECTIVE)
    more, now = run_out(race, LIMITS, seconds.__getitem__, runs)
    assert (now.winner, now.claim_rounds) == (1, ended.claim_rounds[:4])
    assert [key for key in more if key not in runs and key[0] == 3] == [(3, 0), (3, 1)]
    assert len(more) == len(runs) + 2 + 4 == now.num_runs


def test_a_race_without_new_candidates_stays_as_it_was_planned() -> None:
    seconds = {0: 4.0, 1: 2.0, 2: 2.1}
    first = planned(seconds)
    runs, ended = run_out(first, LIMITS, seconds.__getitem__)
    results = {trial: made(trial, each, lr=0.1 * (trial + 1)) for trial, each in seconds.items()}
    results |= {3: made(3, 9.0, reached=False), 4: made(4, 2.0, lr=0.2)}  # trial 1 again
    again = planned({4: 2.0, **seconds}, results).joining(first, runs, LIMITS, OBJECTIVE)
    assert again == replace(first, num_trials=5)
    assert again.state(runs, LIMITS, OBJECTIVE) == ended


def test_runs_of_a_candidate_that_others_displaced_are_of_no_race() -> None:
    first = planned({0: 4.0, 1: 2.0})
    runs, _ = run_out(first, LIMITS, {0: 4.0, 1: 2.0}.__getitem__)
    race = planned({0: 4.0, 1: 2.0, 2: 1.0}, num_candidates=1)
    race = race.joining(first, runs, LIMITS, OBJECTIVE)
    more, now = run_out(race, LIMITS, {0: 4.0, 2: 1.0}.__getitem__, runs)
    assert min(now.claim_rounds) > max(number for _, number in runs)
    confirmed = conclude(race, more, LIMITS, OBJECTIVE)
    assert {trial for trial, _ in confirmed.runs} == {0, 2}


def test_runs_by_which_a_winner_was_chosen_are_none_of_its_claim_within_other_limits() -> None:
    seconds = {0: 4.0, 1: 2.0, 2: 2.1}
    race, fewer = planned(seconds), RaceLimits(max_runs=8)  # which leave none for choosing
    runs, ended = run_out(race, LIMITS, seconds.__getitem__)
    assert race.state(runs, fewer, OBJECTIVE).claim_rounds == ended.claim_rounds
    race = planned(seconds | {3: 3.0}).joining(race, runs, fewer, OBJECTIVE)
    assert race.state(runs, fewer, OBJECTIVE).claim_rounds == ended.claim_rounds


def test_a_claim_begins_anew_if_its_runs_timed_out_before_the_limit_was_raised() -> None:
    first = replace(planned({0: 90.0, 1: 2.0, 2: 2.1}), max_train_seconds=60.0)
    runs, ended = run_out(first, LIMITS, {0: None, 1: 2.0, 2: 2.1}.__getitem__)
    raised = replace(planned({0: 90.0, 1: 2.0, 2: 2.1}), max_train_seconds=120.0)
    race = raised.joining(first, runs, LIMITS, OBJECTIVE)
    more, now = run_out(race, LIMITS, {0: 90.0, 1: 2.0}.__getitem__, runs)
    assert now.winner == 1
    assert min(now.claim_rounds) > max(ended.claim_rounds)
    confirmed = conclude(race, more, LIMITS, OBJECTIVE)
    assert confirmed.speed_up is not None
    assert confirmed.speed_up.claim is Claim.MEASURED
    assert confirmed.speed_up.ratio == pytest.approx(45.0)
    runs, ended = run_out(first, LIMITS, {0: 50.0, 1: 2.0, 2: 2.1}.__getitem__)
    race = raised.joining(first, runs, LIMITS, OBJECTIVE)
    assert race.state(runs, LIMITS, OBJECTIVE) == ended, "the limit would have changed nothing"


@settings(max_examples=40, deadline=None)
@given(
    num_first=st.integers(0, 5),
    num_joining=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    num_made=st.integers(0, 40),
    max_runs=st.integers(12, 60),
    sd=st.floats(0.0, 0.6),
    seed=st.integers(0, 1000),
    num_candidates=st.integers(1, 8),
)
@example(4, [4, 1], 28, 34, 0.5625, 145, 8)  # a claim after another claim was begun
@example(4, [1, 4, 1], 19, 46, 0.546875, 1, 8)
@example(3, [1, 1], 31, 42, 0.5, 771, 8)
@example(3, [1, 1], 31, 42, 0.5, 70, 2)  # whose candidate is displaced
@example(5, [1], 21, 32, 0.5625, 957, 3)
def test_no_round_of_a_claim_is_one_of_choosing_or_of_another_claim(
    num_first: int,
    num_joining: list[int],
    num_made: int,
    max_runs: int,
    sd: float,
    seed: int,
    num_candidates: int,
) -> None:
    rng, limits = np.random.default_rng(seed), RaceLimits(max_runs=max_runs)

    def seconds(trial: int) -> float:
        return float(2.0 * np.exp(rng.normal(0, sd)))

    times = {trial: 2.0 + trial / 100 for trial in range(num_first + 1)}
    race = planned(times, num_candidates=num_candidates)
    runs, now = run_out(race, limits, seconds, most=num_made)
    for num_new in num_joining:
        # the latest ones are expected to be the best
        times |= {trial: 2.0 - trial / 100 for trial in range(len(times), len(times) + num_new)}
        earlier, race = race, planned(times, num_candidates=num_candidates)
        race = race.joining(earlier, runs, limits, OBJECTIVE)
        kept, (runs, now) = runs, run_out(race, limits, seconds, runs, most=num_made)
        assert kept.items() <= runs.items()
    runs, now = run_out(race, limits, seconds, runs)
    racing = {each.trial for each in race.configurations}
    others = {trial for trial, _ in runs} - {0, now.winner}
    assert not {number for trial, number in runs if trial in others} & set(now.claim_rounds)
    assert all((0, number) in runs for number in now.claim_rounds)
    assert set(now.reasons) | {now.winner, 0} >= racing


def test_gains_that_are_none_are_seldom_claimed_after_others_joined() -> None:
    num_studies, num_claimed, num_held = 40, 0, 0
    for seed in range(num_studies):
        rng = np.random.default_rng(seed)

        def seconds(trial: int, rng: np.random.Generator = rng) -> float:
            return float(np.exp(rng.normal(0, 0.2)))

        times = {trial: seconds(trial) for trial in range(9)}
        race = planned({trial: times[trial] for trial in range(5)})
        runs, _ = run_out(race, LIMITS, seconds)
        race = planned(times).joining(race, runs, LIMITS, OBJECTIVE)
        runs, _ = run_out(race, LIMITS, seconds, runs)
        speed_up = conclude(race, runs, LIMITS, OBJECTIVE).speed_up
        assert speed_up is not None
        num_claimed += speed_up.low > 1
        num_held += speed_up.low <= 1 <= speed_up.high
    assert num_claimed / num_studies <= 0.075
    assert num_held / num_studies >= 0.89
