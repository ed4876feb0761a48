"""The figures of a study, as PNG files.

They are drawn on figure objects of their own, not through pyplot, so that no window system and no state of a notebook is
touched. A study that reached nothing still gets its figures: each then says in words why it is empty.
"""

import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.path import Path as Outline
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from autotune.measurement import Outcome, Target, TrialResult
from autotune.report.arms import ArmTimes, ConfirmationFigures, describe_ratio, format_seconds

DOTS_PER_INCH = 150
LOG_SPAN = 30
MANY_TRIALS = 100
MAX_BARS = 25
MAX_LABEL = 56
INK = "#222222"
BASELINE_COLOUR = "#666666"

STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "ytick.labelsize": 9.5,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.labelspacing": 0.8,
    "legend.borderaxespad": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class _Mark:
    colour: str
    marker: str | Outline
    hollow: bool
    size: float


def _with_arrow(shape: Outline, *, angle: str = "up") -> Outline:
    """A marker shape with an arrow leaving it, for a value that is only a lower bound."""
    arrow = [(0.0, 1.0), (0.0, 3.0), (-0.7, 2.2), (0.0, 3.0), (0.7, 2.2)]
    codes = [Outline.MOVETO, Outline.LINETO, Outline.MOVETO, Outline.LINETO, Outline.LINETO]
    points = arrow if angle == "up" else [(y, x) for x, y in arrow]
    return Outline.make_compound_path(shape, Outline(points, codes))


_CIRCLE = Outline.unit_circle()
_SQUARE = Outline([(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85), (-0.85, -0.85)], closed=True)
_DIAMOND = Outline([(0, -1.15), (1.15, 0), (0, 1.15), (-1.15, 0), (0, -1.15)], closed=True)
_TRIANGLE = Outline([(-1.1, 0.9), (1.1, 0.9), (0, -1.2), (-1.1, 0.9)], closed=True)

# The eight colours stay apart under the common colour-vision deficiencies, and shapes repeat what they say.
# Source: Okabe and Ito, "Color Universal Design" (jfly.uni-koeln.de/color); a grey stands for its yellow, too faint on white.
MARKS: Mapping[Outcome, _Mark] = {
    Outcome.REACHED: _Mark(colour="#009E73", marker="o", hollow=False, size=7),
    Outcome.MISSED: _Mark(colour="#E69F00", marker=_with_arrow(_DIAMOND), hollow=True, size=20),
    Outcome.CAPPED: _Mark(colour="#0072B2", marker=_with_arrow(_CIRCLE), hollow=True, size=20),
    Outcome.STOPPED: _Mark(colour="#56B4E9", marker=_with_arrow(_SQUARE), hollow=True, size=20),
    Outcome.TIMED_OUT: _Mark(colour="#CC79A7", marker=_with_arrow(_TRIANGLE), hollow=True, size=20),
    Outcome.OUT_OF_MEMORY: _Mark(colour="#000000", marker="s", hollow=False, size=6),
    Outcome.DIVERGED: _Mark(colour="#D55E00", marker="X", hollow=False, size=7.5),
    Outcome.INVALID: _Mark(colour="#7F7F7F", marker="v", hollow=False, size=7),
    Outcome.ERRORED: _Mark(colour="#888888", marker="P", hollow=False, size=7.5),
}


def write_figures(
    folder: Path,
    *,
    results: Sequence[TrialResult],
    scores: Mapping[int, float],
    target: Target,
    importances: Mapping[str, float],
    confirmation: ConfirmationFigures | None,
    num_reached_needed: int = 10,
) -> list[Path]:
    """Write a study's figures into ``folder``, made where missing, and return their paths.

    ``scores`` are seconds to target by trial number, of trials that REACHED only. ``importances`` are shares by parameter;
    where there are none, the figure says that ``num_reached_needed`` reached trials are needed. Without a confirmation
    there is no figure of one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finite_scores = {trial: score for trial, score in scores.items() if math.isfinite(score)}
    # Text and ticks are made while drawing, so saving belongs inside the style too.
    with mpl.rc_context(STYLE):
        figures = {
            "best_over_search": draw_best_over_search(results, finite_scores, target),
            "curves": draw_curves(results, finite_scores, target),
            "importance": draw_importance(importances, num_reached=len(finite_scores), num_reached_needed=num_reached_needed),
        }
        if confirmation is not None:
            figures["baseline_vs_best"] = draw_confirmation(confirmation, target)
        paths = []
        for name, figure in figures.items():
            FigureCanvasAgg(figure)
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=DOTS_PER_INCH, format="png")
            paths.append(path)
    return paths


def draw_best_over_search(results: Sequence[TrialResult], scores: Mapping[int, float], target: Target) -> Figure:
    """The best score so far against search time, and where every trial ended.

    A trial that was stopped stands at the time it spent, with an arrow: its own time lies above. Trials that have no time
    at all stand in a strip below.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    if not results:
        return _say(figure, "Best time to target over the search", "No trial has finished yet.")
    start = min(result.started_at for result in results)
    heights = {result.trial: _height(result, scores) for result in results}
    timeless = [result for result in results if heights[result.trial] is None]
    axes, strip = _axes_with_strip(figure, has_strip=bool(timeless))
    handles: list[Artist] = []

    ordered = sorted((result for result in results if result.trial in scores), key=lambda result: result.stopped_at)
    if ordered:
        times = [result.stopped_at - start for result in ordered]
        best = list(accumulate((scores[result.trial] for result in ordered), min))
        end = max(result.stopped_at for result in results) - start
        handles += axes.step([*times, end], [*best, best[-1]], where="post", color=INK, linewidth=1.8, label="best so far")
    if 0 in scores:
        label = f"baseline {format_seconds(scores[0])}"
        handles.append(axes.axhline(scores[0], color=BASELINE_COLOUR, linestyle="--", linewidth=1.3, label=label))
    scale = 0.7 if len(results) > MANY_TRIALS else 1.0
    for result in results:
        height = heights[result.trial]
        where = (axes, height) if height is not None else (strip, 0.0)
        _draw_mark(where[0], result.stopped_at - start, where[1], MARKS[result.outcome], scale=scale)

    _set_scale(axes, "y", [height for height in heights.values() if height is not None] + list(scores.values()))
    if len(timeless) == len(results):
        axes.set_yticks([])
        axes.text(0.5, 0.5, "No trial has a time yet.", ha="center", va="center", fontsize=12, transform=axes.transAxes)
    axes.margins(x=0.03, y=0.12)
    axes.update_datalim([(0.0, axes.dataLim.y0)], updatey=False)
    axes.set_ylabel("Time to target (s)")
    strip.set_xlabel("Search time since the first trial started (s)")
    handles += _outcome_handles(result.outcome for result in results)
    _legend(axes, handles, title=_count(len(results), "trial"))
    if scores:
        winner = min(scores, key=lambda trial: scores[trial])
        headline = f"Best time to target over the search: {format_seconds(scores[winner])}, trial {winner}"
    else:
        headline = "Best time to target over the search: none yet"
    reached = f"{len(scores)} of {_count(len(results), 'trial')} reached {_describe_target(target)}"
    has_bound = any(result.outcome.is_censored for result in results)
    note = "; an arrow marks a trial that ended short of it, at a lower bound of its time" if has_bound else ""
    return _title(figure, headline, reached + note)


def draw_curves(results: Sequence[TrialResult], scores: Mapping[int, float], target: Target) -> Figure:
    """The validation metric of every trial over the seconds it prepared and trained for."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    curves = {result.trial: _curve(result) for result in results}
    drawn = [result for result in results if curves[result.trial]]
    headline = f"{_shorten(target.metric)} while training"
    if not drawn:
        return _say(figure, headline, "No trial has an evaluation with a finite metric yet.")
    axes = figure.add_subplot()
    winner = min(scores, key=lambda trial: scores[trial]) if scores else None
    best_curve = [] if winner is None else curves.get(winner, [])
    low, high = _metric_range([metric for curve in curves.values() for _, metric in curve], target, best_curve)
    room = high - low
    faint = 0.35 if len(drawn) > MANY_TRIALS else 0.65
    for result in drawn:
        mark, is_best = MARKS[result.outcome], result.trial == winner
        # A diverging metric may be too large to draw: beyond the axes any value will do.
        metrics = [min(max(metric, low - room), high + room) for _, metric in curves[result.trial]]
        seconds = [second for second, _ in curves[result.trial]]
        zorder = 5.0 if is_best else 3.0 if result.outcome is Outcome.REACHED else 2.0
        width, alpha = (3.2, 1.0) if is_best else (1.1, faint)
        axes.plot(seconds, metrics, color=mark.colour, linewidth=width, alpha=alpha, zorder=zorder)
        axes.plot(seconds[-1:], metrics[-1:], ".", color=mark.colour, markersize=10 if is_best else 5, alpha=alpha, zorder=zorder)
    line = axes.axhline(target.value, color=INK, linestyle="--", linewidth=1.3, zorder=4, label=f"target {target.value:g}")
    axes.set_ylim(low - 0.05 * room, high + 0.05 * room)
    _set_scale(axes, "x", [second for curve in curves.values() for second, _ in curve])
    axes.set_xlabel("Prepare and train time (s)")
    axes.set_ylabel(textwrap.fill(f"{_shorten(target.metric)} on the validation split", 48))

    handles: list[Artist] = [line]
    if best_curve:
        handles.append(Line2D([], [], color=MARKS[Outcome.REACHED].colour, linewidth=3.2, label=f"best, trial {winner}"))
    for outcome, count in _outcome_counts(result.outcome for result in drawn):
        handles.append(Line2D([], [], color=MARKS[outcome].colour, linewidth=1.8, label=f"{outcome} ({count})"))
    _legend(axes, handles, title=_count(len(drawn), "trial"))
    without = len(results) - len(drawn)
    detail = f"Each line is a trial up to where it ended; target {_describe_target(target)}"
    return _title(figure, headline, detail + (f"; {_count(without, 'trial')} without a curve" if without else ""))


def draw_importance(importances: Mapping[str, float], *, num_reached: int, num_reached_needed: int) -> Figure:
    """How much each parameter matters to the score, the most important one on top."""
    headline = "Which parameters matter for the time to target"
    finite = sorted(((share, name) for name, share in importances.items() if math.isfinite(share)), reverse=True)
    if not finite:
        figure = Figure(figsize=(9, 3), layout="constrained")
        if num_reached < num_reached_needed:
            return _say(
                figure,
                headline,
                f"Needs at least {num_reached_needed} trials that reached the target; there are {num_reached}.",
            )
        return _say(figure, headline, f"The {num_reached} trials that reached the target do not tell the parameters apart.")
    shown = finite[:MAX_BARS]
    figure = Figure(figsize=(9, 1.6 + 0.32 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    rows = range(len(shown))
    bars = axes.barh(rows, [share for share, _ in shown], color=MARKS[Outcome.CAPPED].colour, height=0.7)
    axes.bar_label(bars, labels=[f"{share:.2f}" for share, _ in shown], padding=4, fontsize=9)
    axes.set_yticks(rows, [_shorten(name) for _, name in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(min(0.0, *(share for share, _ in shown)), 1.12 * max(shown[0][0], 1e-3))
    axes.set_xlabel("Importance (share, all parameters sum to 1)")
    detail = f"Estimated from {_count(num_reached, 'trial')} that reached the target"
    return _title(figure, headline, detail + (f"; the first {MAX_BARS} of {len(finite)}" if len(finite) > MAX_BARS else ""))


def draw_confirmation(confirmation: ConfirmationFigures, target: Target) -> Figure:
    """Each arm's times to target on fresh seeds: a dot a run, a bar to their mean."""
    arms = confirmation.arms
    figure = Figure(figsize=(9, 2.0 + 0.85 * max(len(arms), 1)), layout="constrained")
    headline = "Confirmation on fresh seeds"
    if not any(arm.runs for arm in arms):
        return _say(figure, headline, "No confirmation run has a time.")
    if len(arms) > 1 and confirmation.ratio is not None:
        described = describe_ratio(arms[0], arms[1], confirmation.ratio, confirmation.low, confirmation.high)
        headline = f"Speed-up on fresh seeds: {described}"
    axes = figure.add_subplot()
    reached_mark = _Mark(colour=INK, marker="o", hollow=False, size=5)
    bound_mark = _Mark(colour=INK, marker=_with_arrow(_CIRCLE, angle="right"), hollow=True, size=16)
    for row, arm in enumerate(arms):
        _draw_arm_bar(axes, row, arm)
        for index, (seconds, reached) in enumerate(arm.runs):
            offset = 0.11 * (index % 5 - 2) if len(arm.runs) > 1 else 0.0
            _draw_mark(axes, seconds, row + offset, reached_mark if reached else bound_mark)
    axes.set_yticks(range(len(arms)), [_arm_label(arm) for arm in arms])
    axes.set_ylim(len(arms) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    longest = max(seconds for arm in arms for seconds, _ in arm.runs)
    axes.set_xlim(0, 1.1 * longest if longest > 0 else 1)
    axes.set_xlabel("Time to target (s)")
    has_bound = any(not reached for arm in arms for _, reached in arm.runs)
    note = "; an arrow marks a run that ended short of it" if has_bound else ""
    return _title(figure, headline, f"Each dot is a run to {_describe_target(target)}, bars are means{note}")


def _draw_arm_bar(axes: Axes, row: int, arm: ArmTimes) -> None:
    mean = arm.mean_seconds
    if mean is None:
        return
    colour = BASELINE_COLOUR if row == 0 else MARKS[Outcome.REACHED].colour if row == 1 else MARKS[Outcome.STOPPED].colour
    axes.barh(row, mean, height=0.66, color=colour, alpha=0.35, linewidth=0)
    axes.plot([mean, mean], [row - 0.33, row + 0.33], color=colour, linewidth=2.2, solid_capstyle="butt")


def _arm_label(arm: ArmTimes) -> str:
    mean, num_runs = arm.mean_seconds, len(arm.reached)
    if mean is None:
        return f"{_shorten(arm.label)}\nno runs"
    if arm.all_reached:
        return f"{_shorten(arm.label)}\n{format_seconds(mean)}, n = {num_runs}"
    return f"{_shorten(arm.label)}\nat least {format_seconds(mean)}\n{arm.num_reached} of {num_runs} reached"


def _height(result: TrialResult, scores: Mapping[int, float]) -> float | None:
    """The score, or for a stopped trial the seconds that bound it from below; None where there is neither."""
    if result.trial in scores:
        return scores[result.trial]
    if not result.outcome.is_censored or result.last is None or not math.isfinite(result.last.warm_seconds):
        return None
    return result.last.warm_seconds


def _curve(result: TrialResult) -> list[tuple[float, float]]:
    points = [(evaluation.warm_seconds, evaluation.metric) for evaluation in result.evaluations]
    return [(seconds, metric) for seconds, metric in points if math.isfinite(seconds) and math.isfinite(metric)]


def _metric_range(metrics: Sequence[float], target: Target, best: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The range of the metric to show: all of it, unless a few diverging trials would flatten everyone else."""
    kept = [target.value, *(metric for _, metric in best)]
    low, high = min(*kept, *metrics), max(*kept, *metrics)
    if len(metrics) > 1:
        cuts = statistics.quantiles(metrics, n=20, method="inclusive")
        core_low, core_high = min(*kept, cuts[0]), max(*kept, cuts[-1])
        if not high - low < 5 * (core_high - core_low):  # also where the difference overflows
            low, high = core_low, core_high
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    return low - max(abs(low) * 0.1, 1e-3), high + max(abs(high) * 0.1, 1e-3)


def _axes_with_strip(figure: Figure, *, has_strip: bool) -> tuple[Axes, Axes]:
    """The main axes and a strip below it for trials without a time; the same axes twice where none is needed."""
    if not has_strip:
        axes = figure.add_subplot()
        return axes, axes
    grid = figure.add_gridspec(2, 1, height_ratios=[11, 1])
    axes = figure.add_subplot(grid[0])
    strip = figure.add_subplot(grid[1], sharex=axes)
    axes.tick_params(axis="x", labelbottom=False)
    strip.set_yticks([0], ["no time"])
    strip.set_ylim(-1, 1)
    strip.tick_params(axis="y", length=0)
    return axes, strip


def _draw_mark(axes: Axes, x: float, y: float, mark: _Mark, *, scale: float = 1.0) -> None:
    axes.plot([x], [y], linestyle="", zorder=4, **_mark_properties(mark, scale))


def _mark_properties(mark: _Mark, scale: float = 1.0) -> dict[str, Any]:
    return {
        "marker": MarkerStyle(mark.marker),
        "markersize": mark.size * scale,
        "markerfacecolor": "none" if mark.hollow else mark.colour,
        "markeredgecolor": mark.colour if mark.hollow else "white",
        "markeredgewidth": 1.2 if mark.hollow else 0.6,
    }


def _outcome_counts(outcomes: Iterable[Outcome]) -> list[tuple[Outcome, int]]:
    counts = Counter(outcomes)
    return [(outcome, counts[outcome]) for outcome in MARKS if counts[outcome]]


def _outcome_handles(outcomes: Iterable[Outcome]) -> list[Line2D]:
    return [
        Line2D([], [], linestyle="", label=f"{outcome} ({count})", **_mark_properties(MARKS[outcome]))
        for outcome, count in _outcome_counts(outcomes)
    ]


def _set_scale(axes: Axes, axis: str, values: Iterable[float]) -> None:
    """A logarithmic axis with plain numbers where the positive values span far, and a linear one elsewhere."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0 or max(finite) / min(finite) <= LOG_SPAN:
        return
    if axis == "x":
        axes.set_xscale("log")
    else:
        axes.set_yscale("log")
    scaled = axes.xaxis if axis == "x" else axes.yaxis
    subs = (1.0, 2.0, 5.0) if max(finite) / min(finite) < 1e4 else (1.0,)
    scaled.set_major_locator(LogLocator(subs=subs))
    scaled.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    scaled.set_minor_formatter(NullFormatter())


def _legend(axes: Axes, handles: Sequence[Artist], *, title: str) -> None:
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), title=title, alignment="left")


def _title(figure: Figure, headline: str, detail: str) -> Figure:
    """A headline and a line of detail across the figure's width, with the axes moved down to make room."""
    height = figure.get_figheight()
    below = 0.1
    for text, size, colour, weight, columns in ((headline, 12.5, INK, "bold", 76), (detail, 9.5, "#555555", "normal", 120)):
        lines = textwrap.wrap(text, columns)
        text_block = figure.text(0.012, 1 - below / height, "\n".join(lines), va="top", linespacing=1.25)
        text_block.set(fontsize=size, color=colour, fontweight=weight)
        below += len(lines) * size * 1.5 / 72 + 0.03
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - below / height), w_pad=0.1, h_pad=0.08)
    return figure


def _say(figure: Figure, headline: str, sentence: str) -> Figure:
    """A figure that says why there is nothing to see."""
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.text(0.5, 0.5, sentence, ha="center", va="center", fontsize=12, color="#555555", transform=axes.transAxes)
    return _title(figure, headline, "")


def _describe_target(target: Target) -> str:
    return f"{_shorten(target.metric)} {'≥' if target.mode == 'max' else '≤'} {target.value:g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _shorten(name: str) -> str:
    """A name that fits beside an axis, its middle left out where it is long."""
    line = " ".join(name.split())
    if len(line) <= MAX_LABEL:
        return line
    return f"{line[: MAX_LABEL // 2 - 1]}…{line[-MAX_LABEL // 2 :]}"
