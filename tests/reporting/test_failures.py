"""Options that a study's failures gather on: which are told, and what is said of them."""

import itertools
from collections.abc import Sequence

import pytest

from autotune.measurement import TrialResult
from autotune.outcome import Outcome
from autotune.reporting.failures import gathered_failures
from tests.support.records import make_result

CHOICES = ["mixed", "optimizer"]
ERROR = "ValueError: AcceleratorState has already been initialized"


def trials(*groups: tuple[int, str, str, Outcome, str]) -> list[TrialResult]:
    """So many trials of each group, with its values of ``mixed`` and ``optimizer``."""
    numbers = itertools.count()
    return [
        make_result(
            next(numbers),
            outcome,
            values={"mixed": mixed, "optimizer": optimizer},
            error=error or None,
        )
        for count, mixed, optimizer, outcome, error in groups
        for _ in range(count)
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
        f"mixed=bf16: all of 3 trials failed (2 ERRORED: {ERROR}, 1 OUT_OF_MEMORY); it was not"
        " explored"
    ]


def test_two_options_that_fail_for_reasons_of_their_own_are_told_apart() -> None:
    ended = trials(
        (12, "no", "sgd", Outcome.REACHED, ""),
        (3, "bf16", "sgd", Outcome.ERRORED, "a"),
        (3, "no", "lion", Outcome.INVALID, "b"),
    )
    assert sorted(gathered_failures(ended, CHOICES)) == [
        "mixed=bf16: all of 3 trials failed (3 ERRORED: a); it was not explored",
        "optimizer=lion: all of 3 trials failed (3 INVALID: b); it was not explored",
    ]


@pytest.mark.parametrize(
    "ended",
    [
        [],
        trials((5, "no", "sgd", Outcome.ERRORED, "a")),
        trials((5, "no", "sgd", Outcome.REACHED, ""), (1, "bf16", "sgd", Outcome.ERRORED, "once")),
        trials((5, "no", "sgd", Outcome.REACHED, ""), (5, "bf16", "sgd", Outcome.DIVERGED, "")),
        trials(
            *(
                (3, mixed, optimizer, outcome, "")
                for mixed in ("no", "bf16")
                for optimizer in ("sgd", "adamw")
                for outcome in (Outcome.ERRORED, Outcome.REACHED)
            )
        ),
    ],
    ids=["no trial", "all failed", "one failure", "diverged", "scattered"],
)
def test_nothing_is_told_of_failures_that_gather_nowhere(ended: Sequence[TrialResult]) -> None:
    assert gathered_failures(ended, CHOICES) == []
