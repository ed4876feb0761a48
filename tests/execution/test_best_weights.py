"""The weights of what a study exports: which run's are kept, and which arm's."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from autotune.execution.best_weights import BEST_WEIGHTS, keep_best, keep_first, run_path
from autotune.measurement import TrialResult
from autotune.outcome import Outcome
from tests.support.records import make_result


def ended(trial: int, outcome: Outcome) -> TrialResult:
    return make_result(trial, outcome)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study whose arms 3 and 7 ran on two seeds each.

    Arm 3 reached the target on the second one only.
    """
    run_path(tmp_path, "").parent.mkdir()
    leave(tmp_path, 3, Outcome.MISSED, Outcome.REACHED)
    leave(tmp_path, 7, Outcome.REACHED, Outcome.REACHED)
    return tmp_path


def leave(folder: Path, trial: int, *outcomes: Outcome, order: Sequence[int] = (0, 1)) -> None:
    """Leave the weights of an arm's runs with the given outcomes, which end in the given order."""
    results = {number: ended(trial, outcomes[number]) for number in order}
    for index, number in enumerate(order):
        run = f"confirm-{trial}-{number}"
        run_path(folder, run).write_text(f"weights of {run}")
        earlier = [results[other] for other in order[:index] if other < number]
        keep_first(folder, run, results[number], earlier=earlier)


@pytest.mark.parametrize(("outcome", "kept"), [(Outcome.REACHED, 0), (Outcome.MISSED, 1)])
def test_a_run_of_an_earlier_round_that_ends_later_counts_as_the_first(
    tmp_path: Path, outcome: Outcome, kept: int
) -> None:
    run_path(tmp_path, "").parent.mkdir()
    leave(tmp_path, 5, outcome, Outcome.REACHED, order=(1, 0))
    keep_best(tmp_path, 5)
    assert (tmp_path / BEST_WEIGHTS).read_text() == f"weights of confirm-5-{kept}"


@pytest.mark.parametrize(("best", "run"), [(3, "confirm-3-1"), (7, "confirm-7-0")])
def test_the_best_arms_first_run_that_reached_is_kept_and_nothing_else(
    folder: Path, best: int, run: str
) -> None:
    keep_best(folder, best)
    assert (folder / BEST_WEIGHTS).read_text() == f"weights of {run}"
    assert [path.name for path in run_path(folder, "").parent.iterdir()] == [
        f"trial-{best}.safetensors"
    ]


def test_weights_of_an_earlier_winner_do_not_pass_for_the_new_ones(folder: Path) -> None:
    keep_best(folder, 7)
    # on a machine that has not this folder
    keep_first(folder, "confirm-9-0", ended(9, Outcome.REACHED), earlier=[])
    keep_best(folder, 9)
    assert not (folder / BEST_WEIGHTS).exists()
