"""Options that a study's failures gather on: which are told, and what is said of them."""

import random
from collections.abc import Sequence

import pytest

from autotune.outcome import Outcome
from autotune.reporting.failures import EndedTrial, gathered_failures
from autotune.space import SearchSpace

CHOICES = ["mixed", "optimizer"]
ERROR = "ValueError: AcceleratorState has already been initialized"


def trials(*groups: tuple[int, str, str, Outcome, str]) -> list[EndedTrial]:
    """So many trials of each group, with its values of ``mixed`` and ``optimizer``, and a learning rate of their own."""
    return [
        EndedTrial({"mixed": mixed, "optimizer": optimizer, "lr": f"{group}.{number}"}, outcome, error)
        for group, (count, mixed, optimizer, outcome, error) in enumerate(groups)
        for number in range(count)
    ]


def test_an_option_of_which_every_trial_failed_is_told_with_counts_and_causes() -> None:
    ended = trials(
        (4, "no", "sgd", Outcome.REACHED, ""),
        (3, "no", "adamw", Outcome.MISSED, ""),
        (1, "bf16", "sgd", Outcome.ERRORED, ERROR),
        (1, "bf16", "adamw", Outcome.ERRORED, ERROR),
        (1, "bf16", "adamw", Outcome.OUT_OF_MEMORY, "CUDA out of memory"),
    )
    assert gathered_failures(ended, CHOICES) == [
        f"mixed=bf16: 3 of 3 trials failed (2 ERRORED: {ERROR}, 1 OUT_OF_MEMORY); it was not explored"
    ]


def test_an_option_that_has_most_of_all_failures_is_told() -> None:
    ended = trials(
        (20, "no", "sgd", Outcome.REACHED, ""),
        (1, "no", "sgd", Outcome.INVALID, "lr: too high"),
        (10, "bf16", "sgd", Outcome.REACHED, ""),
        (8, "bf16", "adamw", Outcome.ERRORED, "x" * 500),
        (2, "bf16", "adamw", Outcome.REACHED, ""),
    )
    (line,) = gathered_failures(ended, CHOICES)
    assert line == f"optimizer=adamw: 8 of 10 trials failed (8 ERRORED: {'x' * 120}...)"


def test_two_options_that_fail_for_reasons_of_their_own_are_told_apart() -> None:
    ended = trials(
        (12, "no", "sgd", Outcome.REACHED, ""), (3, "bf16", "sgd", Outcome.ERRORED, "a"), (3, "no", "lion", Outcome.INVALID, "b")
    )
    assert sorted(gathered_failures(ended, CHOICES)) == [
        "mixed=bf16: 3 of 3 trials failed (3 ERRORED: a); it was not explored",
        "optimizer=lion: 3 of 3 trials failed (3 INVALID: b); it was not explored",
    ]


@pytest.mark.parametrize(
    "ended",
    [
        [],
        trials((5, "no", "sgd", Outcome.ERRORED, "a")),
        trials((5, "no", "sgd", Outcome.REACHED, ""), (1, "bf16", "sgd", Outcome.ERRORED, "once")),
        trials((5, "no", "sgd", Outcome.REACHED, ""), (5, "bf16", "sgd", Outcome.DIVERGED, "")),
        trials(*((3, mixed, optimizer, outcome, "") for mixed in ("no", "bf16") for optimizer in ("sgd", "adamw")
                 for outcome in (Outcome.ERRORED, Outcome.REACHED))),
    ],
    ids=["no trial", "all failed", "one failure", "diverged", "scattered"],
)  # fmt: skip
def test_nothing_is_told_of_failures_that_gather_nowhere(ended: Sequence[EndedTrial]) -> None:
    assert gathered_failures(ended, CHOICES) == []


def test_failures_that_hit_at_random_are_rarely_told() -> None:
    rng = random.Random(0)

    def told() -> bool:
        outcomes = rng.choices([Outcome.REACHED, Outcome.ERRORED], weights=[4, 1], k=40)
        ended = [EndedTrial({key: str(rng.randrange(3)) for key in "abcdef"}, outcome, "") for outcome in outcomes]
        return bool(gathered_failures(ended, list("abcdef")))

    assert sum(told() for _ in range(200)) <= 20


def test_many_trials_of_many_options_take_no_time() -> None:
    ended = [EndedTrial({"a": str(number % 3000), "b": str(number % 2)}, Outcome.ERRORED if number % 3 else Outcome.REACHED, "")
             for number in range(20_000)]  # fmt: skip
    assert gathered_failures(ended, ["a", "b"]) == []


def test_choices_of_every_branch_are_looked_at_and_numbers_are_not() -> None:
    space = SearchSpace.from_mapping(
        {"optimizer": {"type": "choice", "choices": {"sgd": {"nesterov": [True, False], "lr": {"type": "float", "low": 0.1, "high": 1}}}}},
        "s",
    )
    assert space.choices == ["optimizer", "nesterov"]
    assert space.keys == ["optimizer", "nesterov", "lr"]
