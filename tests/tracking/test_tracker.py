"""The names by which trackers display a study's runs."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.space import Suggestion
from autotune.tracking.tracker import display_name
from tests.support.tracked import make_run

BASELINE = {"optimizer": "sgd", "optimizer.lr": 0.1, "batch_size": 64, "model.widths": [64, 64]}


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (BASELINE, "12: baseline"),
        ({**BASELINE, "optimizer.lr": 1 / 3, "model.widths": [32]}, "12: lr=0.333, widths=[32]"),
        (
            {**BASELINE, "optimizer": "adamw", "optimizer.betas": [0.9, 0.95]},
            "12: optimizer=adamw, betas=[0.9,0.95]",
        ),
        (
            {**BASELINE, "optimizer.lr": 0.2, "technique.lr": 0.3, "technique.ema.lr": 0.4},
            "12: optimizer.lr=0.2, technique.lr=0.3, ema.lr=0.4",
        ),
        (
            {**BASELINE, "batch_size": 32, "model.batch_size": None},
            "12: batch_size=32, model.batch_size=null",
        ),
        ({**BASELINE, "model": "m" * 80}, "12: model=" + "m" * 49 + "…"),
    ],
)
def test_a_run_is_named_by_what_differs_from_the_baseline(
    values: dict[str, Any], name: str
) -> None:
    assert display_name(replace(make_run(12)[0], suggestion=Suggestion(values)), BASELINE) == name
    assert len(name) <= 60


def test_a_confirmation_run_says_that_it_is_one_and_a_comparisons_run_keeps_its_name() -> None:
    trial = replace(make_run(12)[0], suggestion=Suggestion({"optimizer.lr": 0.2}))
    assert (
        display_name(replace(trial, name="confirm-12-3", phase="confirm"), BASELINE)
        == "confirm-12-3: lr=0.2"
    )
    assert display_name(replace(trial, name="a-1", phase="compare"), {}) == "a-1"
