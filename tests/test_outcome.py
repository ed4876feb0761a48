"""The table of outcomes: each row holds words that Optuna, MLflow, rich and Plotly know."""

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


def test_two_outcomes_never_look_the_same() -> None:
    assert len({(each.traits.colour, each.traits.symbol) for each in Outcome}) == len(Outcome)
