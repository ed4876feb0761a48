"""The figures of a study, as PNG files.

A study without a trial that reached the target still gets its figures: a figure that would be empty says why in words.
"""

import itertools
import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from autotune.effects import MIN_TRIALS, Effects
from autotune.measurement import Target, TrialResult
from autotune.outcome import Outcome
from autotune.reporting.drawing import (
    BASELINE_COLOUR,
    CIRCLE,
    INK,
    MARKS,
    PART_COLOURS,
    Mark,
    add_legend,
    add_title,
    counted,
    curve_of,
    draw_mark,
    draw_marks,
    mark_properties,
    metric_range,
    say,
    set_rows,
    set_scale,
    shorten,
    target_label,
    with_arrow,
    write_png,
)
from autotune.reporting.scores import SECONDS, ArmScores, ConfirmationFigures, ScoreFormat, describe_ratio, format_expected
from autotune.reporting.study_files import Front

_MAX_CURVES = 500
"""Maximum number of learning curves in one figure."""
_MANY_TRIALS = 100
_MAX_BARS = 25
_BEATEN = Mark(colour="#BBBBBB", marker="o", hollow=False, size=5)
_MEMBER = MARKS[Outcome.REACHED]
_PICKED = Mark(colour=INK, marker="o", hollow=True, size=13)
_MAX_COLUMNS = 3


def write_figures(
    folder: Path,
    *,
    results: Sequence[TrialResult],
    scores: Mapping[int, float],
    target: Target,
    effects: Sequence[Effects],
    confirmation: ConfirmationFigures | None,
    scale: ScoreFormat = SECONDS,
    front: Front | None = None,
) -> list[Path]:
    """Write a study's figures into ``folder``, made if missing, and return their paths.

    Args:
        scores: by trial number, in the unit of ``scale``, of the trials that REACHED the target only.
        effects: what the parameters do to the time to target and to its parts; if empty, the figure says why.
        confirmation: drawn as a figure of its own unless None, and so is ``front``.
    """
    finite_scores = {trial: score for trial, score in scores.items() if math.isfinite(score)}
    figures = {
        "best_over_search": lambda: draw_best_over_search(results, finite_scores, target, scale),
        "curves": lambda: draw_curves(results, finite_scores, target),
        "importance": lambda: draw_importance(effects, num_trials=sum(result.last is not None for result in results)),
    }
    if front is not None:
        figures["pareto_front"] = lambda: draw_front(front, target)
    if confirmation is not None:
        figures["baseline_vs_best"] = lambda: draw_confirmation(confirmation, target)
    return write_png(figures, folder)


def draw_best_over_search(
    results: Sequence[TrialResult], scores: Mapping[int, float], target: Target, scale: ScoreFormat = SECONDS
) -> Figure:
    """The best score so far over search time, and a mark for the end of each trial.

    A stopped trial is drawn at what it spent, a lower bound on its score, with an arrow up. Trials without any score are drawn in a
    strip below.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    if not results:
        return say(figure, f"Best {scale.quantity} over the search", "No trial has finished yet.")
    start = min(result.started_at for result in results)
    heights = {result.trial: _height(result, scores, scale) for result in results}
    scoreless = [result for result in results if heights[result.trial] is None]
    axes, strip = _axes_with_strip(figure, has_strip=bool(scoreless), scale=scale)
    handles: list[Artist] = []

    ordered = sorted((result for result in results if result.trial in scores), key=lambda result: result.stopped_at)
    if ordered:
        times = [result.stopped_at - start for result in ordered]
        best = list(accumulate((scores[result.trial] for result in ordered), min))
        end = max(result.stopped_at for result in results) - start
        handles += axes.step([*times, end], [*best, best[-1]], where="post", color=INK, linewidth=1.8, label="best so far")
    if 0 in scores:
        label = f"baseline {scale.format(scores[0])}"
        handles.append(axes.axhline(scores[0], color=BASELINE_COLOUR, linestyle="--", linewidth=1.3, label=label))
    mark_scale = 0.7 if len(results) > _MANY_TRIALS else 1.0
    for outcome in dict.fromkeys(result.outcome for result in results):
        for panel, is_scoreless in ((axes, False), (strip, True)):
            marked = [result for result in results if result.outcome is outcome and (heights[result.trial] is None) == is_scoreless]
            seconds = [result.stopped_at - start for result in marked]
            draw_marks(panel, seconds, [heights[result.trial] or 0.0 for result in marked], MARKS[outcome], scale=mark_scale)

    set_scale(axes, "y", [height for height in heights.values() if height is not None] + list(scores.values()))
    if len(scoreless) == len(results):
        axes.set_yticks([])
        axes.text(0.5, 0.5, f"No trial has a {_noun(scale)} yet.", ha="center", va="center", fontsize=12, transform=axes.transAxes)
    axes.margins(x=0.03, y=0.12)
    axes.update_datalim([(0.0, axes.dataLim.y0)], updatey=False)
    axes.set_ylabel(scale.axis_label)
    strip.set_xlabel("Search time since the first trial started (s)")
    handles += _outcome_handles(result.outcome for result in results)
    add_legend(axes, handles, title=counted(len(results), "trial"))
    if scores:
        winner = min(scores, key=lambda trial: scores[trial])
        headline = f"Best {scale.quantity} over the search: {scale.format(scores[winner])}, trial {winner}"
    else:
        headline = f"Best {scale.quantity} over the search: none yet"
    reached = f"{len(scores)} of {counted(len(results), 'trial')} reached {target_label(target)}"
    has_bound = any(result.outcome.is_censored for result in results)
    note = f"; an arrow marks a trial that ended short of it, at a lower bound of its {_noun(scale)}" if has_bound else ""
    return add_title(figure, headline, reached + note)


def _some(results: Sequence[TrialResult], winner: int | None) -> list[TrialResult]:
    """All results, or where there are more than ``_MAX_CURVES``, at most as many at even distances, and the winner."""
    stride = math.ceil(len(results) / _MAX_CURVES)
    return [result for place, result in enumerate(results) if place % stride == 0 or result.trial == winner]


def draw_curves(results: Sequence[TrialResult], scores: Mapping[int, float], target: Target) -> Figure:
    """The validation metric of every trial over its seconds of prepare and train."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    curves = {result.trial: curve_of(result) for result in results}
    drawn = [result for result in results if curves[result.trial]]
    headline = f"{shorten(target.metric)} while training"
    if not drawn:
        return say(figure, headline, "No trial has an evaluation with a finite metric yet.")
    axes = figure.add_subplot()
    winner = min(scores, key=lambda trial: scores[trial]) if scores else None
    best_curve = [] if winner is None else curves.get(winner, [])
    low, high = metric_range([metric for curve in curves.values() for _, metric in curve], target, best_curve)
    span = high - low
    faint = 0.35 if len(drawn) > _MANY_TRIALS else 0.65
    for result in _some(drawn, winner):
        mark, is_best = MARKS[result.outcome], result.trial == winner
        # A diverging metric may be too large to draw, so values are clipped well outside the visible range.
        metrics = [min(max(metric, low - span), high + span) for _, metric in curves[result.trial]]
        seconds = [second for second, _ in curves[result.trial]]
        zorder = 5.0 if is_best else 3.0 if result.outcome is Outcome.REACHED else 2.0
        width, alpha = (3.2, 1.0) if is_best else (1.1, faint)
        axes.plot(seconds, metrics, color=mark.colour, linewidth=width, alpha=alpha, zorder=zorder)
        axes.plot(seconds[-1:], metrics[-1:], ".", color=mark.colour, markersize=10 if is_best else 5, alpha=alpha, zorder=zorder)
    line = axes.axhline(target.value, color=INK, linestyle="--", linewidth=1.3, zorder=4, label=f"target {target.value:g}")
    axes.set_ylim(low - 0.05 * span, high + 0.05 * span)
    set_scale(axes, "x", [second for curve in curves.values() for second, _ in curve])
    axes.set_xlabel("Prepare and train time (s)")
    axes.set_ylabel(textwrap.fill(f"{shorten(target.metric)} on the validation split", 48))

    handles: list[Artist] = [line]
    if best_curve:
        handles.append(Line2D([], [], color=MARKS[Outcome.REACHED].colour, linewidth=3.2, label=f"best, trial {winner}"))
    for outcome, count in _outcome_counts(result.outcome for result in drawn):
        handles.append(Line2D([], [], color=MARKS[outcome].colour, linewidth=1.8, label=f"{outcome} ({count})"))
    add_legend(axes, handles, title=counted(len(drawn), "trial"))
    without = len(results) - len(drawn)
    detail = f"Each line is a trial up to where it ended; target {target_label(target)}"
    return add_title(figure, headline, detail + (f"; {counted(without, 'trial')} without a curve" if without else ""))


def draw_importance(effects: Sequence[Effects], *, num_trials: int) -> Figure:
    """Bars for the importance of each parameter for the time to target and for its two parts, the most important one on top."""
    headline = "Which parameters matter for the time to target"
    if not effects or not effects[0].effects:
        figure = Figure(figsize=(9, 3), layout="constrained")
        if not effects:
            return say(figure, headline, f"Needs at least {MIN_TRIALS} trials that were evaluated; there are {num_trials}.")
        return say(figure, headline, "No parameter varied among the trials.")
    names = [effect.name for effect in effects[0].effects]
    shown = names[:_MAX_BARS]
    figure = Figure(figsize=(9, 1.8 + 0.5 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(effects)
    for index, (part, colour) in enumerate(zip(effects, PART_COLOURS, strict=False)):
        shares = {effect.name: effect.share for effect in part.effects}
        rows = [row + (index - (len(effects) - 1) / 2) * width for row in range(len(shown))]
        middles = [shares[name].middle for name in shown]
        errors = [[shares[name].middle - shares[name].low for name in shown], [shares[name].high - shares[name].middle for name in shown]]
        axes.barh(rows, middles, xerr=errors, color=colour, height=width, label=part.quantity, error_kw={"lw": 0.9, "ecolor": INK})
    set_rows(axes, [shorten(name) for name in shown], room=0.6)
    axes.set_xlim(left=0.0)
    axes.set_xlabel("Share of the variance over the search space")
    axes.legend(loc="lower right")
    detail = f"Estimated from {counted(effects[0].num_trials, 'trial')}, those that were stopped among them; lines are 90% intervals"
    return add_title(figure, headline, detail + (f"; the first {_MAX_BARS} of {len(names)}" if len(names) > _MAX_BARS else ""))


def draw_confirmation(confirmation: ConfirmationFigures, target: Target) -> Figure:
    """Each arm's scores on fresh seeds: a dot for each run, and a bar up to the expected score (what a success costs)."""
    arms = confirmation.arms
    scale = arms[0].scale if arms else SECONDS
    figure = Figure(figsize=(9, 2.0 + 0.85 * max(len(arms), 1)), layout="constrained")
    headline = "Confirmation on fresh seeds"
    if not any(arm.scored_runs for arm in arms):
        return say(figure, headline, f"No confirmation run has a {_noun(scale)}.")
    if len(arms) > 1 and confirmation.speed_up is not None:
        headline = f"{scale.gain.capitalize()} on fresh seeds: {describe_ratio(confirmation.speed_up)}"
    axes = figure.add_subplot()
    reached_mark = Mark(colour=INK, marker="o", hollow=False, size=5)
    bound_mark = Mark(colour=INK, marker=with_arrow(CIRCLE, angle="right"), hollow=True, size=16)
    for row, arm in enumerate(arms):
        _draw_arm_bar(axes, row, arm)
        for index, (score, reached) in enumerate(arm.scored_runs):
            offset = 0.11 * (index % 5 - 2) if len(arm.scored_runs) > 1 else 0.0
            draw_mark(axes, score, row + offset, reached_mark if reached else bound_mark)
    set_rows(axes, [_arm_label(arm) for arm in arms], room=0.55)
    longest = max([axes.dataLim.x1, *(score for arm in arms for score, _ in arm.scored_runs)])
    axes.set_xlim(0, 1.1 * longest if longest > 0 else 1)
    axes.set_xlabel(scale.axis_label)
    has_bound = any(not reached for arm in arms for _, reached in arm.scored_runs)
    note = "; an arrow marks a run that ended short of it" if has_bound else ""
    return add_title(figure, headline, f"Each dot is a run to {target_label(target)}, bars are what a success costs{note}")


def _draw_arm_bar(axes: Axes, row: int, arm: ArmScores) -> None:
    expected, spent = arm.expected_score, arm.mean_spent
    if expected is None or spent is None:
        return
    bar = expected if math.isfinite(expected) else spent
    colour = BASELINE_COLOUR if row == 0 else MARKS[Outcome.REACHED].colour if row == 1 else MARKS[Outcome.STOPPED].colour
    axes.barh(row, bar, height=0.66, color=colour, alpha=0.35, linewidth=0)
    axes.plot([bar, bar], [row - 0.33, row + 0.33], color=colour, linewidth=2.2, solid_capstyle="butt")


def _arm_label(arm: ArmScores) -> str:
    expected = format_expected(arm)
    if expected is None:
        return f"{shorten(arm.label)}\nno runs"
    if arm.all_reached:
        return f"{shorten(arm.label)}\n{expected}, n = {arm.num_runs}"
    return f"{shorten(arm.label)}\n{expected}\n{arm.num_reached} of {arm.num_runs} reached"


def _height(result: TrialResult, scores: Mapping[int, float], scale: ScoreFormat) -> float | None:
    """A trial's score, or the lower bound on it if the trial was stopped; None if there is neither."""
    if result.trial in scores:
        return scores[result.trial]
    return scale.spent(result) if result.outcome.is_censored else None


def _noun(scale: ScoreFormat) -> str:
    return "time" if scale.is_time else "score"


def _axes_with_strip(figure: Figure, *, has_strip: bool, scale: ScoreFormat) -> tuple[Axes, Axes]:
    """The main axes, and a strip below them for trials without a score; the main axes twice if no strip is needed."""
    if not has_strip:
        axes = figure.add_subplot()
        return axes, axes
    grid = figure.add_gridspec(2, 1, height_ratios=[11, 1])
    axes = figure.add_subplot(grid[0])
    strip = figure.add_subplot(grid[1], sharex=axes)
    axes.tick_params(axis="x", labelbottom=False)
    strip.set_yticks([0], [f"no {_noun(scale)}"])
    strip.set_ylim(-1, 1)
    strip.tick_params(axis="y", length=0)
    return axes, strip


def _outcome_counts(outcomes: Iterable[Outcome]) -> list[tuple[Outcome, int]]:
    counts = Counter(outcomes)
    return [(outcome, counts[outcome]) for outcome in MARKS if counts[outcome]]


def _outcome_handles(outcomes: Iterable[Outcome]) -> list[Line2D]:
    return [
        Line2D([], [], linestyle="", label=f"{outcome} ({count})", **mark_properties(MARKS[outcome]))
        for outcome, count in _outcome_counts(outcomes)
    ]


def draw_front(front: Front, target: Target) -> Figure:
    """Each panel shows all trials that reached the target by two objectives, and marks the front and the trial each preference picks."""
    pairs = list(itertools.combinations(range(len(front.scales)), 2))
    columns = min(_MAX_COLUMNS, len(pairs))
    num_rows = math.ceil(len(pairs) / columns)
    figure = Figure(figsize=(9 if columns == 1 else 3.2 + 4.2 * columns, 1.2 + 3.8 * num_rows), layout="constrained")
    panels = [figure.add_subplot(num_rows, columns, index + 1) for index in range(len(pairs))]
    for axes, pair in zip(panels, pairs, strict=True):
        _draw_pair(axes, front, pair)
    handles = [
        Line2D([], [], linestyle="", label=f"{label} ({count})", **mark_properties(mark))
        for label, count, mark in (
            ("on the front", len(front.members), _MEMBER),
            ("beaten by another", len(front.points) - len(front.members), _BEATEN),
        )
    ]
    handles.append(Line2D([], [], linestyle="", label="picked by a preference", **mark_properties(_PICKED)))
    add_legend(panels[columns - 1], handles, title=counted(len(front.points), "trial"))
    headline = f"Pareto front: {counted(len(front.members), 'trial')} that no other beats in all objectives"
    detail = f"Trials that reached {target_label(target)}, each at its one run of the search; lower is better"
    return add_title(figure, headline, detail)


def _draw_pair(axes: Axes, front: Front, pair: tuple[int, int]) -> None:
    spots = {trial: (point[pair[0]], point[pair[1]]) for trial, point in front.points.items()}
    if len(front.scales) == 2:  # with more objectives the front is not a line
        members = [spots[trial] for trial in front.members]
        axes.step([x for x, _ in members], [y for _, y in members], where="post", color=_MEMBER.colour, linewidth=1.6, zorder=2)
    for trial, (x, y) in spots.items():
        draw_mark(axes, x, y, _MEMBER if trial in front.members else _BEATEN)
    for trial in dict.fromkeys(front.picks.values()):
        draw_mark(axes, *spots[trial], _PICKED)
        label = f"{', '.join(front.picked_by(trial))}\ntrial {trial}"
        is_right = spots[trial][0] > statistics.median(x for x, _ in spots.values())  # room for the label on its left
        offset, side = ((-9, 7), "right") if is_right else ((9, 7), "left")
        axes.annotate(label, spots[trial], xytext=offset, textcoords="offset points", ha=side, fontsize=9, zorder=5)
    for axis, index in zip("xy", pair, strict=True):
        set_scale(axes, axis, [point[index] for point in front.points.values()])
    scales = list(front.scales.values())
    axes.set_xlabel(scales[pair[0]].axis_label)
    axes.set_ylabel(scales[pair[1]].axis_label)
    axes.margins(0.14)
