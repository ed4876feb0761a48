"""The table of outcomes: each row holds words that Optuna, MLflow, rich and matplotlib know."""

import pickle

import pytest
from matplotlib.colors import is_color_like
from matplotlib.lines import Line2D
from mlflow.entities import RunStatus
from optuna.trial import TrialState
from rich.style import Style

from autotune.outcome import Outcome
from autotune.reporting.drawing import MARKS


@pytest.mark.parametrize("outcome", Outcome)
def test_each_row_holds_words_that_are_known(outcome: Outcome) -> None:
    traits = outcome.traits
    assert TrialState[traits.optuna_state].is_finished()
    assert RunStatus.is_terminated(RunStatus.from_string(traits.mlflow_status))
    assert Style.parse(traits.terminal_style).color is not None
    assert is_color_like(traits.colour)
    assert MARKS[outcome].hollow == outcome.is_censored
    assert outcome.is_censored or traits.marker in Line2D.markers


def test_only_a_time_to_target_is_told_as_a_result() -> None:
    assert [each for each in Outcome if each.traits.optuna_state == "COMPLETE"] == [Outcome.REACHED]


def test_a_trial_that_was_timed_is_no_failure_in_mlflow() -> None:
    assert {each for each in Outcome if each.traits.mlflow_status == "FINISHED"} == {
        each for each in Outcome if each.is_timed or each is Outcome.CONTENDED
    }


def test_two_outcomes_never_look_the_same() -> None:
    assert len({(each.traits.colour, each.traits.marker) for each in Outcome}) == len(Outcome)


@pytest.mark.parametrize("outcome", Outcome)
def test_an_outcome_is_its_own_name_wherever_it_is_kept(outcome: Outcome) -> None:
    assert (outcome == outcome.name, str(outcome), Outcome(outcome.name)) == (True, outcome.name, outcome)
    assert pickle.loads(pickle.dumps(outcome)) is outcome
