"""Figures are written, not blank and not clipped, whatever a study came to."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from autotune.comparison import Ratio, RunScore
from autotune.effects import Effect, Effects, Interval
from autotune.measurement import Evaluation, Target, TrialResult
from autotune.outcome import Outcome
from autotune.reporting.drawing import STYLE
from autotune.reporting.figures import (
    draw_best_over_search,
    draw_confirmation,
    draw_curves,
    draw_importance,
    write_figures,
)
from autotune.reporting.scores import ArmScores, ConfirmationFigures

pytestmark = pytest.mark.slow

TARGET = Target(metric="val_accuracy", value=0.9, mode="max", max_train_seconds=60)
LOSS_TARGET = Target(metric="validation/loss_of_$a_very_long_$_name_that_goes_on_and_on", value=0.5, mode="min", max_train_seconds=60)


def trial(number: int, outcome: Outcome, curve: Sequence[tuple[float, float]], started_at: float = 1000.0) -> TrialResult:
    """A trial whose curve is (train seconds, metric)."""
    evaluations = tuple(
        Evaluation(
            step=index + 1,
            epoch=float(index + 1),
            samples=100 * (index + 1),
            build_seconds=1.0,
            prepare_seconds=0.1,
            train_seconds=seconds,
            evaluate_seconds=0.1,
            metric=metric,
            loss=math.nan,
            samples_per_second=100.0,
            peak_memory_bytes=None,
            energy_joules=None,
        )
        for index, (seconds, metric) in enumerate(curve)
    )
    spent = curve[-1][0] if curve else 0.0
    return TrialResult(
        trial=number,
        values={},
        overrides=(),
        seed=0,
        outcome=outcome,
        evaluations=evaluations,
        started_at=started_at,
        stopped_at=started_at + spent,
        fingerprint={},
    )


def crowd(number: int) -> list[TrialResult]:
    """Trials of every outcome, one after another, over a wide range of times."""
    outcomes = list(Outcome)
    return [
        trial(index, outcomes[index % 8], [(0.01 * index + 0.1, 0.5), (0.3 * index + 0.2, 0.91)], started_at=10.0 * index)
        for index in range(number)
    ]


def scores_of(results: Sequence[TrialResult]) -> dict[int, float]:
    """Time to target of the trials that have one."""
    return {each.trial: each.time_to_target_seconds for each in results if each.time_to_target_seconds is not None}


STUDIES: Mapping[str, tuple[list[TrialResult], Target]] = {
    "no trial": ([], TARGET),
    "one reached": ([trial(0, Outcome.REACHED, [(1.0, 0.92)])], TARGET),
    "one capped": ([trial(0, Outcome.CAPPED, [(1.0, 0.5), (2.0, 0.5)])], TARGET),
    "none evaluated": ([trial(0, Outcome.OUT_OF_MEMORY, []), trial(1, Outcome.STOPPED, [])], TARGET),
    "diverged at once": (
        [trial(0, Outcome.DIVERGED, [(1.0, math.nan)]), trial(1, Outcome.DIVERGED, [(1.0, -math.inf)])],
        TARGET,
    ),
    "a loss that explodes": ([*crowd(24), trial(24, Outcome.DIVERGED, [(1.0, 1.0), (2.0, 1e300), (3.0, -1e300)])], LOSS_TARGET),
    "zero seconds": ([trial(0, Outcome.REACHED, [(-0.1, 0.95)])], TARGET),
    "hundreds": (crowd(64), TARGET),
}
CONFIRMATIONS = {
    "plain": ConfirmationFigures(
        arms=[
            ArmScores(label="baseline", runs=[RunScore(20.0, reached=True), RunScore(21.0, reached=True)]),
            ArmScores(label="trial 17 (exported)", runs=[RunScore(10.0, reached=True), RunScore(9.0, reached=True)]),
        ],
        speed_up=Ratio(ratio=2.1, low=1.9, high=2.3, num_pairs=2),
    ),
    "nothing reached": ConfirmationFigures(
        arms=[
            ArmScores(label="baseline", runs=[RunScore(60.0, reached=False)]),
            ArmScores(label="a trial of a very long name " * 4, runs=[RunScore(60.0, reached=False), RunScore(None, reached=False)]),
        ],
        speed_up=Ratio(ratio=1.0, low=0.0, high=math.inf, num_pairs=1),
    ),
    "only the baseline": ConfirmationFigures(arms=[ArmScores(label="baseline", runs=[RunScore(0.0, reached=True)])], speed_up=None),
    "no run": ConfirmationFigures(arms=[], speed_up=None),
}


def assert_inside(figure: Figure) -> None:
    """All that is drawn lies within the figure's edges."""
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert min(box.x0, box.y0, width - box.x1, height - box.y1) > -0.02, box


def num_dark_pixels(path: Path) -> int:
    """Pixels below the headline that are not white."""
    image = mpl.image.imread(path)
    assert image.shape[1] == 9 * 150
    return int(np.count_nonzero(image[60:, :, :3].min(axis=2) < 0.8))


@pytest.mark.parametrize("name", ["no trial", "a loss that explodes"])
def test_a_study_gets_its_figures(name: str, tmp_path: Path) -> None:
    results, target = STUDIES[name]
    paths = write_figures(
        tmp_path / "new" / "folder",
        results=results,
        scores=scores_of(results),
        target=target,
        effects=(),
        confirmation=CONFIRMATIONS["plain"],
    )
    assert [path.name for path in paths] == ["best_over_search.png", "curves.png", "importance.png", "baseline_vs_best.png"]
    for path in paths:
        assert num_dark_pixels(path) > 500, path.name


@pytest.mark.parametrize("name", STUDIES)
def test_nothing_is_clipped(name: str) -> None:
    results, target = STUDIES[name]
    with mpl.rc_context(STYLE):
        assert_inside(draw_best_over_search(results, scores_of(results), target))
        assert_inside(draw_curves(results, scores_of(results), target))


@pytest.mark.parametrize("name", CONFIRMATIONS)
def test_every_confirmation_is_drawn(name: str) -> None:
    with mpl.rc_context(STYLE):
        assert_inside(draw_confirmation(CONFIRMATIONS[name], LOSS_TARGET))


def test_no_confirmation_no_figure_of_one(tmp_path: Path) -> None:
    paths = write_figures(tmp_path, results=crowd(8), scores={}, target=TARGET, effects=(), confirmation=None)
    assert "baseline_vs_best.png" not in [path.name for path in paths]


def test_a_score_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    results = crowd(9)
    scores = {0: math.nan, 8: math.inf}
    assert len(write_figures(tmp_path, results=results, scores=scores, target=TARGET, effects=(), confirmation=None)) == 3


@pytest.mark.parametrize(
    "shares",
    [
        {"optimizer=sgd/optimizer.lr": 0.7, "batch_size": 0.3},
        {"one": 0.0},
        {"$x_{1}$=[a,b]/" + "very.long." * 20: 0.5, "one": 0.0},
        {f"parameter.{index}": 1 / 60 for index in range(60)},
    ],
)
def test_importances_of_any_number_and_name_fit(shares: Mapping[str, float]) -> None:
    effects = [
        Effect(name=name, share=Interval(middle=share, low=0.9 * share, high=1.1 * share), values=[], factors=[])
        for name, share in shares.items()
    ]
    parts = [Effects(quantity=quantity, num_trials=12, effects=effects) for quantity in ("time to target", "steps", "seconds a step")]
    with mpl.rc_context(STYLE):
        assert_inside(draw_importance(parts, num_trials=12))


def test_missing_importances_say_how_many_trials_they_need() -> None:
    figure = draw_importance([], num_trials=3)
    assert [text.get_text() for axes in figure.axes for text in axes.texts] == ["Needs at least 8 trials that were evaluated; there are 3."]


def test_the_best_trial_and_the_baseline_are_named() -> None:
    results = crowd(24)
    figure = draw_best_over_search(results, {0: 20.0, 8: 12.0, 16: 15.0}, TARGET)
    assert "Best time to target over the search: 12.0 s, trial 8" in [text.get_text() for text in figure.texts]
    legend = figure.axes[0].get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[:3] == ["best so far", "baseline 20.0 s", "REACHED (3)"]
