"""How long a study still takes."""

import random

import pytest

from autotune.reporting.time_left import TimeLeft


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def left(clock: Clock, *, num_trials: int | None = 100, seconds: float | None = None, confirm: float | None = None) -> TimeLeft:
    """A study of a hundred trials."""
    return TimeLeft(num_trials_left=num_trials, seconds_left=seconds, confirm_fraction=confirm, clock=clock)


def test_nothing_is_told_before_some_trials_have_started() -> None:
    clock = Clock()
    time_left = left(clock)
    for _ in range(4):
        time_left.started()
        clock.now += 2
    assert time_left.interval is None


def test_a_trial_that_is_tried_again_is_still_to_come() -> None:
    clock = Clock()
    time_left = left(clock, num_trials=6)
    for _ in range(6):
        time_left.started()
        clock.now += 2
    assert time_left.searching == (0.0, 0.0)
    for _ in range(2):
        time_left.withdrawn()
    assert time_left.searching == pytest.approx((3.4, 4.6))


def test_most_intervals_hold_the_seconds_that_a_search_of_even_pace_takes() -> None:
    rng, num_held = random.Random(0), 0
    for _ in range(200):
        clock, gaps = Clock(), [rng.expovariate(1.0) for _ in range(100)]
        time_left = left(clock)
        for gap in gaps[:30]:
            time_left.started()
            clock.now += gap
        interval = time_left.interval
        assert interval is not None
        num_held += interval[0] <= sum(gaps[30:]) <= interval[1]
    assert 170 <= num_held <= 195


@pytest.mark.parametrize(("num_trials", "at_most"), [(None, 20.0), (1000, 20.0)])
def test_the_time_budget_ends_a_search_that_is_slower(num_trials: int | None, at_most: float) -> None:
    clock = Clock()
    time_left = left(clock, num_trials=num_trials, seconds=30)
    for _ in range(10):
        time_left.started()
        clock.now += 1
    assert time_left.interval == (at_most, at_most)


def test_a_confirmation_comes_on_top_and_then_tells_by_its_own_runs() -> None:
    clock = Clock()
    time_left = left(clock, num_trials=20, confirm=0.5)
    for _ in range(10):
        time_left.started()
        time_left.trained(8.0)
        clock.now += 10
    search, whole = time_left.searching, time_left.interval
    assert search is not None
    assert whole is not None
    assert search == pytest.approx((85, 115))
    assert search[0] + 0.25 * 80 < whole[0] < whole[1] < search[1] + 2 * 80 * 2.5
    time_left.confirming(1, 20)
    assert time_left.interval is None
    clock.now += 15
    time_left.confirming(4, 20)
    assert time_left.interval == pytest.approx((0.6 * 17 * 5, 1.4 * 17 * 5))
