"""Confirming: which configurations run again, in which order, and which of them wins by how much."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.comparison import Claim, RunTime
from autotune.execution.confirmation import Arm, choose_arms, conclude, confirmation_order, confirmation_seed, missing_runs
from autotune.measurement import Evaluation, Outcome, TrialResult
from autotune.objective import AmortisedTime
from autotune.space import Suggestion

OBJECTIVE = AmortisedTime(num_trainings=1)
BASELINE = Suggestion({"lr": 0.1})


def make_result(trial: int, seconds: float | None, *, reached: bool = True, lr: float = 0.1) -> TrialResult:
    evaluation = Evaluation(
        step=1, epoch=1.0, samples=1, build_seconds=0.0, prepare_seconds=0.0, train_seconds=seconds or 0.0, evaluate_seconds=0.0,
        metric=1.0, loss=0.0, samples_per_second=1.0, peak_memory_bytes=None, energy_joules=None,
    )  # fmt: skip
    return TrialResult(
        trial=trial,
        values={"lr": lr},
        overrides=(f"lr={lr}",),
        seed=0,
        outcome=Outcome.REACHED if reached else Outcome.MISSED if seconds else Outcome.ERRORED,
        evaluations=(evaluation,) if seconds else (),
        started_at=0.0,
        stopped_at=0.0,
        fingerprint={},
    )


def make_arms(number: int) -> tuple[Arm, ...]:
    return tuple(Arm(trial=trial, label=f"trial {trial}" if trial else "baseline", suggestion=BASELINE) for trial in range(number))


def runs_of(times: Mapping[int, Sequence[float | None]], missed: Sequence[tuple[int, int]] = ()) -> dict[tuple[int, int], TrialResult]:
    """Runs by arm and index: seconds, None for one that crashed; those in ``missed`` fell short of the target."""
    return {
        (trial, index): make_result(trial, each, reached=each is not None and (trial, index) not in missed)
        for trial, row in times.items()
        for index, each in enumerate(row)
    }


def test_the_baseline_comes_first_and_each_configuration_once() -> None:
    rates = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.2, 4: 0.4}
    results = {number: make_result(number, 1.0, lr=rate) for number, rate in rates.items()}
    arms = choose_arms(0, BASELINE, results, {0: 5.0, 1: 2.0, 2: 3.0, 3: 1.0, 4: 4.0}, num_candidates=2)
    assert [(arm.trial, arm.label) for arm in arms] == [(0, "baseline"), (3, "trial 3"), (2, "trial 2")]


def test_a_trial_of_the_baselines_configuration_is_no_candidate() -> None:
    results = {0: make_result(0, 2.0), 1: make_result(1, 1.0)}
    assert [arm.trial for arm in choose_arms(0, BASELINE, results, {0: 2.0, 1: 1.0}, num_candidates=3)] == [0]


@given(num_arms=st.integers(1, 5), num_seeds=st.integers(1, 6))
def test_arms_take_turns_and_each_round_begins_with_another(num_arms: int, num_seeds: int) -> None:
    arms = make_arms(num_arms)
    order = confirmation_order(arms, num_seeds)
    rounds = [order[start : start + num_arms] for start in range(0, len(order), num_arms)]
    for index, each in enumerate(rounds):
        assert [seed for _, seed in each] == [index] * num_arms
        assert {arm.trial for arm, _ in each} == set(range(num_arms))
        assert each[0][0].trial == index % num_arms


def test_only_runs_that_are_not_known_are_made() -> None:
    arms = make_arms(2)
    assert [(arm.trial, index) for arm, index in missing_runs(arms, 2, runs_of({0: [1.0], 1: [1.0, 1.0]}))] == [(0, 1)]


def test_all_arms_of_a_round_share_a_seed_of_their_own() -> None:
    assert len({confirmation_seed(0, index) for index in range(20)} | {confirmation_seed(1, index) for index in range(20)}) == 40


def test_the_fastest_mean_wins() -> None:
    confirmed = conclude(make_arms(3), runs_of({0: [4.0, 6.0], 1: [2.0, 3.0], 2: [1.0, 5.0]}), OBJECTIVE)
    assert confirmed.best is not None
    assert confirmed.best.trial == 1
    assert confirmed.speed_up is not None
    assert confirmed.speed_up.ratio == pytest.approx(2.0)


def test_reaching_the_target_more_often_comes_before_speed() -> None:
    confirmed = conclude(make_arms(2), runs_of({0: [9.0, 9.0], 1: [1.0, 1.0]}, missed=[(1, 1)]), OBJECTIVE)
    assert confirmed.best is not None
    assert confirmed.best.trial == 0


def test_the_baseline_can_win() -> None:
    confirmed = conclude(make_arms(2), runs_of({0: [1.0, 2.0], 1: [3.0, 3.0]}), OBJECTIVE)
    assert confirmed.best is not None
    assert confirmed.best.label == "baseline"
    assert confirmed.speed_up is not None
    assert confirmed.speed_up.ratio == 1.0


def test_nothing_is_best_where_nothing_reached() -> None:
    confirmed = conclude(make_arms(2), runs_of({0: [1.0], 1: [2.0]}, missed=[(0, 0), (1, 0)]), OBJECTIVE)
    assert (confirmed.best, confirmed.speed_up) == (None, None)


def test_a_baseline_that_fell_short_gives_a_lower_bound() -> None:
    confirmed = conclude(make_arms(2), runs_of({0: [8.0, 8.0], 1: [2.0, 2.0]}, missed=[(0, 0), (0, 1)]), OBJECTIVE)
    assert confirmed.speed_up is not None
    assert (confirmed.speed_up.ratio, confirmed.speed_up.claim, confirmed.speed_up.high) == (4.0, Claim.AT_LEAST, math.inf)
    assert not confirmed.times[0].all_reached


def test_nothing_is_claimed_for_a_best_that_fell_short_once() -> None:
    confirmed = conclude(make_arms(2), runs_of({0: [8.0, 8.0], 1: [2.0, 2.0]}, missed=[(0, 0), (0, 1), (1, 1)]), OBJECTIVE)
    assert confirmed.best is not None
    assert confirmed.best.trial == 1
    assert confirmed.speed_up is None


@pytest.mark.parametrize("crashed", [[None, None], [None, 3.0]])
def test_a_run_that_crashed_counts_as_a_run_without_a_time(crashed: list[float | None]) -> None:
    confirmed = conclude(make_arms(2), runs_of({0: crashed, 1: [2.0, 2.0]}), OBJECTIVE)
    assert confirmed.best is not None
    assert confirmed.best.trial == 1
    assert confirmed.times[0].num_runs == 2
    assert not confirmed.times[0].all_reached
    assert (confirmed.speed_up is None) == (crashed == [None, None])
    assert confirmed.speed_up is None or confirmed.speed_up.claim is Claim.WHERE_BOTH_REACHED


def test_an_objective_without_a_bound_gives_no_time_to_what_fell_short() -> None:
    class Only:
        def score(self, result: TrialResult) -> float:
            return OBJECTIVE.score(result)

    confirmed = conclude(make_arms(2), runs_of({0: [8.0], 1: [2.0]}, missed=[(0, 0)]), Only())
    assert confirmed.times[0].runs == [RunTime(None, reached=False)]
    assert confirmed.times[0].mean_seconds is None
    assert confirmed.speed_up is None


def test_arms_are_compared_round_by_round() -> None:
    drifting = {0: [2.0, 20.0, 200.0], 1: [1.0, 10.0, 100.0]}
    confirmed = conclude(make_arms(2), runs_of(drifting), OBJECTIVE)
    assert confirmed.speed_up is not None
    assert (confirmed.speed_up.low, confirmed.speed_up.high) == (pytest.approx(2.0), pytest.approx(2.0)), "a machine's drift is in both"


def test_a_round_that_an_arm_lacks_is_left_out() -> None:
    runs = runs_of({0: [4.0, 6.0, 5.0], 1: [2.0, 3.0, 1.0]})
    del runs[0, 2]
    confirmed = conclude(make_arms(2), runs, OBJECTIVE)
    assert confirmed.speed_up is not None
    assert (confirmed.speed_up.ratio, confirmed.speed_up.num_pairs) == (2.0, 2)


def test_confirmation_leaves_its_runs_as_they_are() -> None:
    runs = runs_of({0: [1.0], 1: [2.0]})
    before = {key: replace(run) for key, run in runs.items()}
    conclude(make_arms(2), runs, OBJECTIVE)
    assert runs == before
