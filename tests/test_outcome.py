"""The table of outcomes: each row holds words that Optuna, MLflow, rich and Plotly know."""

import pickle

import pytest
from mlflow.entities import RunStatus
from optuna.trial import TrialState
from plotly import graph_objects as go
from rich.style import Style

from autotune.outcome import Outcome


@pytest.mark.parametrize("outcome", Outcome)
def test_each_row_holds_words_that_are_known(outcome: Outcome) -> None:
    traits = outcome.traits
    assert TrialState[traits.optuna_state].is_finished()
    assert RunStatus.is_terminated(RunStatus.from_string(traits.mlflow_status))
    assert Style.parse(traits.terminal_style).color is not None
    assert go.scatter.Marker(color=traits.colour, symbol=traits.symbol).symbol == traits.symbol
    assert traits.symbol.endswith("-open") or not outcome.is_censored


def test_only_a_time_to_target_is_told_as_a_result() -> None:
    assert [each for each in Outcome if each.traits.optuna_state == "COMPLETE"] == [Outcome.REACHED]


def test_a_trial_that_was_timed_is_no_failure_in_mlflow() -> None:
    assert {each for each in Outcome if each.traits.mlflow_status == "FINISHED"} == {
        each for each in Outcome if each.is_timed or each is Outcome.CONTENDED
    }


def test_two_outcomes_never_look_the_same() -> None:
    assert len({(each.traits.colour, each.traits.symbol) for each in Outcome}) == len(Outcome)


@pytest.mark.parametrize("outcome", Outcome)
def test_an_outcome_is_its_own_name_wherever_it_is_kept(outcome: Outcome) -> None:
    assert (outcome == outcome.name, str(outcome), Outcome(outcome.name)) == (True, outcome.name, outcome)
    assert pickle.loads(pickle.dumps(outcome)) is outcome
