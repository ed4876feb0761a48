"""The race: who runs next, who leaves, which runs the claim is made of, and how often it is
right.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.confirm.race import MIN_PAIRS, Configuration, RaceLimits, RaceState, race_state
from autotune.confirm.statistics import RunScore
from autotune.space import Suggestion

Runs = dict[tuple[int, int], RunScore]
Draw = Callable[[tuple[int, int]], RunScore]


def configurations(
    *expected: float | None, seconds: float = 1.0, least: float = 0.0
) -> list[Configuration]:
    """Configurations 0, 1, ...; the first one is the baseline."""
    return [
        Configuration(
            trial=trial,
            label="",
            suggestion=Suggestion({}),
            expected_score=score,
            run_seconds=seconds,
            least_score=least,
        )
        for trial, score in enumerate(expected)
    ]


def reached(score: float, seconds: float = 1.0) -> RunScore:
    return RunScore(score, reached=True, seconds=seconds)


def missed(score: float | None) -> RunScore:
    return RunScore(score, reached=False, seconds=1.0)


def always(*scores: float) -> Draw:
    """Every run of a configuration takes the same."""
    return lambda key: reached(scores[key[0]])


def noisy(means: Sequence[float], sd: float, seed: int) -> Draw:
    rng = np.random.default_rng(seed)
    return lambda key: reached(float(means[key[0]] * np.exp(rng.normal(0, sd) - sd**2 / 2)))


def race(
    expected: Sequence[float | None], limits: RaceLimits, draw: Draw, **settings: float
) -> tuple[RaceState, Runs]:
    """The final state of a whole race, and its runs in the order they were made."""
    runs: Runs = {}
    while (now := race_state(configurations(*expected, **settings), limits, runs)).pending:
        runs[now.pending[0]] = draw(now.pending[0])
    return now, runs


def num_pairs(
    scores: Sequence[float], draw: Draw, *, max_runs: int = 40, expected: Sequence[float] = ()
) -> int:
    return len(race(expected or scores, RaceLimits(max_runs=max_runs), draw)[0].claim_rounds)


def test_the_fastest_of_eight_wins_though_the_search_expected_least_of_it() -> None:
    scores = [4.0, 2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 1.0]
    ended, runs = race(
        [4.0, *[1.0 + arm / 100 for arm in range(8)]], RaceLimits(max_runs=40), always(*scores)
    )
    assert (ended.winner, ended.pending, ended.is_baseline_better) == (8, (), False)
    assert set(ended.reasons) == {1, 2, 3, 4, 5, 6, 7}
    assert len(runs) == ended.num_runs <= 40


def test_where_the_limits_do_not_suffice_those_race_of_whom_the_search_expected_most() -> None:
    expected = [4.0, *[2.0 - number / 10 for number in range(8)]]
    ended, _ = race(expected, RaceLimits(max_runs=24), always(4.0, *[1.0] * 8))
    not_run = {trial for trial, why in ended.reasons.items() if why.startswith("not run")}
    assert not_run == {1, 2, 3, 4}


def test_the_claim_is_made_of_rounds_that_had_no_part_in_choosing() -> None:
    ended, runs = race(
        [3.0, 1.0, 1.1, 1.2], RaceLimits(max_runs=24), noisy([3.0, 1.0, 1.1, 1.2], 0.1, 0)
    )
    chosen_by = {number for _, number in runs if number not in ended.claim_rounds}
    assert chosen_by
    assert all((0, number) not in runs for number in chosen_by), (
        "choosing among candidates needs no baseline"
    )
    assert {arm for arm, number in runs if number in ended.claim_rounds} == {0, ended.winner}


def test_configurations_take_turns_and_each_round_begins_with_another() -> None:
    _, runs = race([3.0, 1.0, 1.0], RaceLimits(max_runs=16), always(1.0, 1.0, 1.0))
    rounds = {number: [arm for arm, at in runs if at == number] for _, number in runs}
    assert [number for _, number in runs] == sorted(number for _, number in runs), (
        "a round is finished before the next one"
    )
    for racing in (sorted(rounds[0]), sorted(rounds[max(rounds)])):
        assert {rounds[number][0] for number in rounds if sorted(rounds[number]) == racing} == set(
            racing
        )


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_runs_side_by_side_change_no_winner_and_no_pair(num_devices: int) -> None:
    scores, limits = (4.0, 1.0, 1.1, 9.0, 9.0, 1.3, 9.0), RaceLimits(max_runs=60)
    runs: Runs = {}
    while batch := (now := race_state(configurations(*scores), limits, runs)).batch(num_devices):
        assert not {key for unit in batch for key in unit} & runs.keys(), "nothing is made twice"
        assert {len(unit) for unit in batch} == {2 if now.claim_rounds else 1}, (
            "a pair stays on one device"
        )
        runs |= {key: reached(scores[key[0]]) for unit in batch for key in unit}
    in_turn, _ = race(scores, limits, always(*scores))
    assert (now.winner, now.reasons, now.claim_rounds) == (
        in_turn.winner,
        in_turn.reasons,
        in_turn.claim_rounds,
    )


def test_who_is_clearly_behind_leaves_at_once_and_who_is_left_alone_runs_no_more() -> None:
    ended, runs = race([9.0, 1.0, 1.0], RaceLimits(max_runs=60), always(9.0, 1.0, 30.0))
    assert ended.reasons[2] == "left after round 1: clearly behind"
    assert sum(arm == 1 for arm, _ in runs) == 1 + len(ended.claim_rounds)


def test_a_plain_gain_takes_few_pairs_and_a_small_one_more() -> None:
    assert num_pairs([9.0, 1.0], noisy([9.0, 1.0], 0.1, 0)) == MIN_PAIRS
    assert num_pairs([1.1, 1.0], noisy([1.1, 1.0], 0.1, 0)) > 2 * MIN_PAIRS


def test_where_pairs_are_dear_two_may_do() -> None:
    limits = RaceLimits(max_runs=40, max_seconds=8.0)
    searched = [
        replace(each, search_runs=(reached(score), reached(1.1 * score)))
        for each, score in zip(configurations(9.0, 1.0), [9.0, 1.0], strict=True)
    ]
    runs: Runs = {}
    assert len(race_state(searched, limits, runs).batch(1)) == 2
    while (now := race_state(searched, limits, runs)).pending:
        runs[now.pending[0]] = reached([9.0, 1.0][now.pending[0][0]])
    assert (len(now.claim_rounds), now.speed_up and now.speed_up.is_gain) == (2, True)
    limits = RaceLimits(max_runs=40, max_seconds=80.0)
    assert len(race([9.0, 1.0], limits, always(9.0, 1.0))[0].claim_rounds) == MIN_PAIRS


def test_a_claim_that_cannot_be_shown_is_given_up_and_says_what_it_lacks() -> None:
    scores, limits = [1.02, 1.0], RaceLimits(max_runs=60)
    ended = [race(scores, limits, noisy(scores, 0.3, seed))[0] for seed in range(6)]
    assert all(now.speed_up is not None for now in ended)
    undecided = [now.speed_up for now in ended if now.speed_up and not now.speed_up.is_resolved]
    assert len(undecided) >= 5
    assert any(ratio.num_pairs < 20 for ratio in undecided)
    lacking = {ratio.num_pairs_lacking for ratio in undecided}
    assert max(lacking - {None}, default=0) > 10
    assert all(number is None or 0 < number <= 200 for number in lacking)


def test_pairs_that_vary_or_may_miss_are_made_more_of() -> None:
    steady = num_pairs([2.0, 1.0], always(2.0, 1.0))
    assert steady < num_pairs([2.0, 1.0], noisy([2.0, 1.0], 0.6, 0))
    expected = [2.5, 1.0, 1.05, 1.1]  # of others that miss
    some_miss = num_pairs(
        expected,
        lambda key: (missed if key[0] == 0 and key[1] % 3 == 0 else reached)(expected[key[0]]),
        max_runs=60,
    )
    assert num_pairs(expected, always(*expected), max_runs=60) < some_miss


@pytest.mark.parametrize("wanted", [2, 7])
def test_the_user_may_name_the_pairs(wanted: int) -> None:
    ended, runs = race([9.0, 1.0], RaceLimits(max_runs=40, num_pairs=wanted), always(9.0, 1.0))
    assert (len(ended.claim_rounds), len(runs)) == (wanted, 2 * wanted)


def test_seconds_bound_the_race_but_for_the_least_that_a_claim_needs() -> None:
    expected = [10.0, *[1.0] * 8]
    limits = RaceLimits(max_runs=40, max_seconds=20.0)
    ended, runs = race(expected, limits, lambda key: reached(1.0, 10.0), seconds=10.0)
    assert (len(runs), len(ended.reasons)) == (2 * MIN_PAIRS, 7)
    assert all("limits" in why for why in ended.reasons.values())
    limits = RaceLimits(max_runs=40, max_seconds=250.0)
    _, more = race(expected, limits, lambda key: reached(1.0, 10.0), seconds=10.0)
    assert 2 * MIN_PAIRS < len(more) <= 25


def test_a_claim_whose_first_pairs_vary_takes_overtime() -> None:
    limits = RaceLimits(max_runs=40, max_seconds=9.0)
    ended, runs = race(
        [3.0, 1.0],
        limits,
        lambda key: missed(2.0) if key in {(1, 0), (1, 3)} else reached([3.0, 1.0][key[0]]),
    )
    assert MIN_PAIRS < len(ended.claim_rounds) <= 9
    assert sum(run.seconds for run in runs.values()) <= 2 * limits.max_seconds


def ends_of(ended: RaceState) -> tuple[float, float]:
    """The ends of the interval of the claim."""
    assert ended.speed_up is not None
    return ended.speed_up.low, ended.speed_up.high


@pytest.mark.parametrize(
    ("expected", "falls_short", "score"),
    [
        # a success costs one and a half times what a run does
        ([9.0, 1.0, 1.2], lambda number: number % 3 == 0, 1.0),
        ([9.0, 1.0, 1.1], lambda number: True, None),  # a crash is a miss
        # only in its claim, which begins again with the other one
        ([9.0, 1.0, 1.5], lambda number: number >= 2, 1.0),
        ([0.8, 0.19, 0.2], lambda number: number not in (0, 4), 0.2),  # a record of luck
    ],
)
def test_a_configuration_that_falls_short_is_charged_for_it(
    expected: list[float], falls_short: Callable[[int], bool], score: float | None
) -> None:
    ended, runs = race(
        expected,
        RaceLimits(max_runs=60),
        lambda key: (
            missed(score) if key[0] == 1 and falls_short(key[1]) else reached(expected[key[0]])
        ),
    )
    assert ended.winner == 2
    assert ends_of(ended)[0] > 1
    assert not {number for arm, number in runs if arm == 1} & set(ended.claim_rounds)
    assert len(runs) == ended.num_runs <= 60


@pytest.mark.parametrize(("min_reach_rate", "winner"), [(0.0, 1), (1.0, 2)])
def test_a_least_share_of_successes_comes_before_speed(min_reach_rate: float, winner: int) -> None:
    limits = RaceLimits(max_runs=40, min_reach_rate=min_reach_rate)
    ended, _ = race(
        [9.0, 1.0, 3.0],
        limits,
        lambda key: missed(1.0) if key == (1, 0) else reached([9.0, 1.0, 3.0][key[0]]),
    )
    assert ended.winner == winner


def test_a_claim_that_turns_the_order_round_is_begun_again_on_further_seeds() -> None:
    scores, limits = [4.0, 1.0, 1.1], RaceLimits(max_runs=40)
    first_of_claim = race(scores, limits, always(*scores))[0].claim_rounds[0]
    ended, runs = race(
        scores,
        limits,
        lambda key: reached(3.0 if key[0] == 1 and key[1] >= first_of_claim else scores[key[0]]),
    )
    assert ended.winner == 2
    assert (
        min(ended.claim_rounds) > max(number for arm, number in runs if arm == 1) >= first_of_claim
    )
    assert "behind another one in its claim" in ended.reasons[1]


def test_the_baseline_can_be_the_better_one_or_alone() -> None:
    ended, _ = race([1.0, 0.9, 0.95], RaceLimits(max_runs=40), always(1.0, 1.6, 1.5))
    assert ended.is_baseline_better
    alone, runs = race([1.0], RaceLimits(max_runs=40), always(1.0))
    assert (alone.winner, sorted(runs)) == (None, [(0, number) for number in range(MIN_PAIRS)])


def test_a_baseline_that_never_reached_the_target_is_judged_by_what_it_spent() -> None:
    ended, _ = race([None, 1.0], RaceLimits(max_runs=40), lambda key: reached(1.0), least=1.05)
    assert len(ended.claim_rounds) > MIN_PAIRS


@settings(max_examples=40, deadline=None)
@given(
    num_candidates=st.integers(0, 9),
    max_runs=st.integers(8, 60),
    seconds=st.floats(1, 200),
    sd=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
)
def test_a_race_ends_within_its_limits_and_goes_on_where_it_stood(
    num_candidates: int, max_runs: int, seconds: float, sd: float, seed: int
) -> None:
    expected = [2.0, *[1.0 + arm / 10 for arm in range(num_candidates)]]
    limits = RaceLimits(max_runs=max_runs, max_seconds=seconds)
    ended, runs = race(expected, limits, noisy(expected, sd, seed))
    assert len(runs) == ended.num_runs <= max_runs
    assert (ended.winner is None) == (num_candidates == 0)
    assert set(ended.reasons) | {ended.winner, 0} >= set(range(num_candidates + 1)), (
        "every candidate has its reason"
    )
    made: Runs = {}
    # in the order they were made: another process that knows the first ones asks for the next
    for key in runs:
        assert race_state(configurations(*expected), limits, made).pending[0] == key
        made[key] = runs[key]


@pytest.mark.parametrize(
    ("gain", "sd", "claims"),
    [(1.0, 0.05, (0.0, 0.07)), (1.0, 0.3, (0.0, 0.07)), (1.3, 0.15, (0.7, 1.0))],
)
def test_true_gains_are_claimed_and_others_seldom(
    gain: float, sd: float, claims: tuple[float, float]
) -> None:
    """2.5% of false claims are to be expected.

    Benchmarks.noise measures it with a thousand studies.
    """
    means, num_studies, num_claimed, num_held = [1.0, *[1.0] * 4, 1 / gain, *[1.0] * 3], 50, 0, 0
    for seed in range(num_studies):
        draw = noisy(means, sd, seed)
        ended, _ = race(
            [draw((arm, -1)).score or 0.0 for arm in range(len(means))],
            RaceLimits(max_runs=40),
            draw,
        )
        low, high = ends_of(ended)
        truth = means[0] / means[ended.winner or 0]
        num_claimed += low > 1 and truth == gain
        num_held += low <= truth <= high
    assert claims[0] <= num_claimed / num_studies <= claims[1]
    assert num_held / num_studies >= 0.89
