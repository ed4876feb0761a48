"""What configurations are expected to need, over runs that are made up."""

import math

import numpy as np
import pytest

from autotune.outcome import Outcome
from autotune.search.expected_scores import ExpectedScores

LUCKY = ("lucky",)


def told(*runs: tuple[str, float, Outcome | None], spread: float = 1.0) -> ExpectedScores:
    """A model of runs by configuration: what each spent, REACHED where it says nothing else.

    Configurations lie far from each other.
    """
    made = ExpectedScores()
    names = sorted({name for name, *_ in runs})
    for name, spent, outcome in runs:
        features = spread * np.eye(len(names))[names.index(name)]
        made.add((name,), features, outcome or Outcome.REACHED, spent)
    return made


def reached(**scores: list[float]) -> ExpectedScores:
    return told(*((name, score, None) for name, all_of_it in scores.items() for score in all_of_it))


def test_repeats_tell_a_lucky_draw() -> None:
    before = reached(lucky=[0.288], steady=[0.6], other=[1.0])
    after = reached(lucky=[0.288, 0.85, 0.8, 0.9], steady=[0.6, 0.58], other=[1.0])
    assert min(before.estimates.by_key(), key=lambda key: before.estimates.by_key()[key]) == LUCKY
    assert min(after.estimates.by_key(), key=lambda key: after.estimates.by_key()[key]) == (
        "steady",
    )
    assert after.estimates.noise_variance > 4 * before.estimates.noise_variance


def test_runs_that_fall_short_make_a_configuration_dearer() -> None:
    sure = reached(one=[2.0, 2.0], other=[5.0])
    unsure = told(
        ("one", 2.0, None),
        ("one", 2.0, None),
        ("one", 4.0, Outcome.MISSED),
        ("one", 4.0, Outcome.MISSED),
        ("other", 5.0, None),
    )
    assert unsure.estimates.by_key()["one",] > 1.8 * sure.estimates.by_key()["one",], (
        "four seconds for nothing as often as two for something"
    )
    stopped = told(
        ("one", 2.0, None), ("one", 2.0, None), ("one", 4.0, Outcome.STOPPED), ("other", 5.0, None)
    )
    assert stopped.estimates.by_key() == sure.estimates.by_key(), "what was stopped says nothing"


def test_what_a_repeat_wins_falls_with_each_and_is_most_where_two_are_nearly_alike() -> None:
    def gain(scores: ExpectedScores, name: str) -> float:
        return (
            math.exp(dict(scores.estimates.log_gains_of_repeats())[name,])
            * scores.estimates.by_key()[name,]
        )

    near, far = reached(one=[1.0], two=[1.1]), reached(one=[1.0], two=[8.0])
    assert gain(near, "one") > 3 * gain(far, "one")
    gains = [gain(reached(one=[1.0] * number, two=[1.1] * number), "one") for number in range(1, 6)]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] < gains[0] / 10
    assert not list(reached(one=[1.0]).estimates.log_gains_of_repeats()), (
        "there is nothing else to pick"
    )


def test_a_configuration_is_the_incumbent_only_once_it_was_run_again() -> None:
    made = reached(steady=[0.6, 0.62], lucky=[0.45])
    assert made.estimates.challenger == LUCKY
    assert made.estimates.incumbent == pytest.approx(0.61, rel=0.15), (
        "a cap at a lucky draw ends what is better"
    )
    proven = reached(steady=[0.6, 0.62], lucky=[0.45, 0.46])
    assert proven.estimates.challenger is None
    assert proven.estimates.incumbent == pytest.approx(0.46, rel=0.15)


def test_one_run_is_enough_far_ahead_the_less_so_the_more_repeats_differ() -> None:
    ahead = reached(steady=[0.6, 0.62], other=[0.1])
    assert ahead.estimates.challenger is None
    assert ahead.estimates.incumbent == pytest.approx(0.1, rel=0.15)
    noisy = reached(steady=[0.3, 1.2], other=[0.1])
    assert noisy.estimates.challenger == ("other",)
    assert not reached(one=[0.6], other=[0.1]).estimates.believed.any(), (
        "there is none to be ahead of"
    )
