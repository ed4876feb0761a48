"""The figures of a comparison and of a scaling measurement, as PNG files."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from autotune.comparison import Ratio, RunScore, expected_score
from autotune.reporting.compared import ComparedSide, Comparison, format_step, verdict
from autotune.reporting.drawing import (
    CIRCLE,
    INK,
    Mark,
    add_title,
    counted,
    curve_of,
    draw_mark,
    metric_range,
    say,
    set_rows,
    set_scale,
    shorten,
    target_label,
    with_arrow,
    write_png,
)
from autotune.reporting.scaling import Mode, Scaling, ScalingPoint
from autotune.reporting.scores import format_expected, format_ratio

SIDE_COLOURS = ("#0072B2", "#D55E00")
_PAIR_COLOUR = "#999999"
_MAX_OVERRIDES = 90
_RIGHT = with_arrow(CIRCLE, angle="right")
_MODE_COLOURS = {Mode.STRONG: "#0072B2", Mode.WEAK: "#D55E00"}
_MODE_MARKERS = {Mode.STRONG: "o", Mode.WEAK: "s"}
_EXCHANGE_COLOUR = "#CCCCCC"


def write_comparison_figures(folder: Path, comparison: Comparison) -> list[Path]:
    """Write a comparison's figures into ``folder``, made if missing, and return their paths."""
    return write_png({"comparison": lambda: draw_comparison(comparison), "curves": lambda: draw_comparison_curves(comparison)}, folder)


def draw_comparison(comparison: Comparison) -> Figure:
    """Two rows of panels, for score and step time: the value of each run on the left, the ratio of each pair on the right."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    if not any(run.score is not None for side in comparison.sides for run in side.scores.values()):
        return say(figure, f"{comparison.experiment}: a against b", f"No run has a {'time' if comparison.scale.is_time else 'score'}.")
    grid = figure.add_gridspec(2, 2, width_ratios=[1.7, 1])
    times = [side.scores for side in comparison.sides]
    steps = [_in_milliseconds(side) for side in comparison.sides]
    for row, (name, values, label_of, ratio) in enumerate(
        (
            (comparison.scale.axis_label, times, _score_label, comparison.score_ratio),
            ("Time of a training step (ms)", steps, _step_label, comparison.step_ratio),
        )
    ):
        left, right = figure.add_subplot(grid[row, 0]), figure.add_subplot(grid[row, 1])
        _draw_runs(left, values)
        set_rows(left, [label_of(side) for side in comparison.sides], room=0.5)
        left.set_xlabel(name)
        _draw_ratio(right, values, ratio)
        right.set_xlabel("a / b")
    _add_sides(figure, comparison, [counted(side.arm.num_runs, "run") for side in comparison.sides])
    has_miss = any(not run.reached for run in (*times[0].values(), *times[1].values()))
    note, hollow = (", an arrow one that ended short of the target", ", hollow where a run ended short") if has_miss else ("", "")
    detail = (
        f"{comparison.experiment} to {target_label(comparison.target)}. Left: a dot is a run{note}; a line joins the runs of a pair, "
        f"bars are means. Right: a dot is a pair{hollow}; the diamond is the ratio of the means with its 95% interval."
    )
    return add_title(figure, verdict(comparison), detail)


def draw_comparison_curves(comparison: Comparison) -> Figure:
    """The validation metric of every run of both sides over its seconds of prepare and train."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    target = comparison.target
    curves = [[curve for run in side.runs.values() if (curve := curve_of(run))] for side in comparison.sides]
    points = [point for side_curves in curves for curve in side_curves for point in curve]
    headline = f"{shorten(target.metric)} over training time"
    if not points:
        return say(figure, headline, "No run has an evaluation with a finite metric yet.")
    axes = figure.add_subplot()
    low, high = metric_range([metric for _, metric in points], target, [])
    span = high - low
    for side_curves, colour in zip(curves, SIDE_COLOURS, strict=True):
        for curve in side_curves:
            metrics = [min(max(metric, low - span), high + span) for _, metric in curve]
            seconds = [second for second, _ in curve]
            axes.plot(seconds, metrics, color=colour, linewidth=1.2, alpha=0.6, zorder=2)
            axes.plot(seconds[-1:], metrics[-1:], "o", color=colour, markersize=5, markeredgecolor="white", markeredgewidth=0.6, zorder=3)
    line = axes.axhline(target.value, color=INK, linestyle="--", linewidth=1.3, zorder=4, label=f"target {target.value:g}")
    axes.set_ylim(low - 0.05 * span, high + 0.08 * span)
    set_scale(axes, "x", [second for second, _ in points])
    if axes.get_xscale() == "linear":
        axes.set_xlim(left=0)
    axes.set_xlabel("Prepare and train time (s)")
    axes.set_ylabel(f"{shorten(target.metric)} on the validation split")
    axes.legend(handles=[line], loc="lower right" if target.mode == "max" else "upper right")
    _add_sides(figure, comparison, [counted(len(side_curves), "run") for side_curves in curves])
    return add_title(figure, headline, f"{comparison.experiment} to {target_label(target)}: each line is a run up to where it ended")


def _draw_runs(axes: Axes, values: Sequence[Mapping[int, RunScore]]) -> None:
    """Draw the runs of each side as a row of dots, a line between the runs of a pair, and a bar up to each side's expected score."""
    known = [{pair: run for pair, run in runs.items() if run.score is not None} for runs in values]
    for pair in sorted(known[0].keys() & known[1].keys()):
        scores = [runs[pair].score or 0.0 for runs in known]
        axes.plot(scores, [_height(0, pair), _height(1, pair)], color=_PAIR_COLOUR, linewidth=0.7, alpha=0.7, zorder=2)
    for row, (runs, colour) in enumerate(zip(known, SIDE_COLOURS, strict=True)):
        expected = expected_score(list(runs.values()))
        if expected is not None:
            bar = expected if math.isfinite(expected) else fmean(run.score or 0.0 for run in runs.values())
            axes.barh(row, bar, height=0.62, color=colour, alpha=0.22, linewidth=0)
            axes.plot([bar, bar], [row - 0.31, row + 0.31], color=colour, linewidth=2.4, solid_capstyle="butt", zorder=3)
        for pair, run in runs.items():
            mark = Mark(colour=colour, marker="o" if run.reached else _RIGHT, hollow=not run.reached, size=5.5 if run.reached else 16)
            draw_mark(axes, run.score or 0.0, _height(row, pair), mark)
    longest = max([axes.dataLim.x1, *(run.score or 0.0 for runs in known for run in runs.values())])
    axes.set_xlim(0, 1.08 * longest if longest > 0 else 1)


def _draw_ratio(axes: Axes, values: Sequence[Mapping[int, RunScore]], ratio: Ratio | None) -> None:
    """Draw the ratio of each pair as a dot, the overall ratio with its interval above them, and a line at 1."""
    axes.axvline(1.0, color=INK, linestyle="--", linewidth=1.1, zorder=1)
    axes.set_yticks([])
    axes.set_ylim(1.2, -0.9)
    axes.grid(visible=False, axis="y")
    if ratio is None:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", color="#555555", transform=axes.transAxes)
        axes.set_xlim(0, 2)
        return
    pairs = [
        (pair, one.score / other.score, one.reached and other.reached)
        for pair in sorted(values[0].keys() & values[1].keys())
        if (one := values[0][pair]).score and (other := values[1][pair]).score and (one.reached or other.reached)
    ]
    for pair, pair_ratio, both_reached in pairs:
        mark = Mark(colour=_PAIR_COLOUR, marker="o", hollow=not both_reached, size=5)
        draw_mark(axes, pair_ratio, 0.55 + _height(0, pair), mark)
    shown = [ratio.ratio, 1.0, *(pair_ratio for _, pair_ratio, _ in pairs), *(end for end in (ratio.low, ratio.high) if 0 < end < math.inf)]
    margin = 0.12 * max(max(shown) - min(shown), 0.05)
    left, right = max(0.0, min(shown) - margin), max(shown) + margin
    ends = (ratio.low if ratio.low > 0 else left, ratio.high if math.isfinite(ratio.high) else right)
    axes.plot(ends, [-0.25, -0.25], color=INK, linewidth=2.2, zorder=3, solid_capstyle="butt")
    for end, is_open, tip in ((ends[0], ratio.low <= 0, "<"), (ends[1], math.isinf(ratio.high), ">")):
        axes.plot(
            [end], [-0.25], tip if is_open else "|", color=INK, markersize=7 if is_open else 9, markeredgewidth=2, zorder=3, clip_on=False
        )
    axes.plot([ratio.ratio], [-0.25], "D", color=INK, markersize=7, markeredgecolor="white", markeredgewidth=0.8, zorder=4)
    axes.set_xlim(left, right)
    interval = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.low > 0 and math.isfinite(ratio.high) else ""
    axes.set_title(
        f"{format_ratio(ratio) if ratio.is_resolved else 'no difference shown'}{interval}, n = {ratio.num_pairs}",
        fontsize=10,
        fontweight="bold",
    )


def _height(row: int, pair: int) -> float:
    """The y coordinate of a pair's run, shifted within its row so that runs with similar values do not hide each other."""
    return row + 0.085 * (pair % 5 - 2)


def _in_milliseconds(side: ComparedSide) -> Mapping[int, RunScore]:
    return {pair: RunScore(1000 * seconds, reached=True) for pair, seconds in side.step_seconds.items()}


def _add_sides(figure: Figure, comparison: Comparison, counts: Sequence[str]) -> None:
    """Add a legend of the sides below the axes, where long overrides have room."""
    handles = [
        Line2D([], [], color=colour, linewidth=6, alpha=0.8, label=f"{shorten(side.label, _MAX_OVERRIDES)} ({text})")
        for side, colour, text in zip(comparison.sides, SIDE_COLOURS, counts, strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=1, borderaxespad=0.8)


def _score_label(side: ComparedSide) -> str:
    arm = side.arm
    if arm.expected_score is None:
        return f"{side.name}\nno {'time' if arm.scale.is_time else 'score'}"
    if arm.all_reached:
        return f"{side.name}\n{format_expected(arm)}\nn = {arm.num_runs}"
    return f"{side.name}\n{format_expected(arm)}\n{arm.num_reached} of {arm.num_runs} reached"


def _step_label(side: ComparedSide) -> str:
    seconds = side.step_seconds.values()
    return f"{side.name}\n{format_step(fmean(seconds))}\nn = {len(seconds)}" if seconds else f"{side.name}\nno time"


def write_scaling_figure(folder: Path, scaling: Scaling) -> list[Path]:
    """Draw ``scaling.png`` into ``folder``, made if missing; returns a list with its path."""
    return write_png({"scaling": lambda: draw_scaling(scaling)}, folder)


def draw_scaling(scaling: Scaling) -> Figure:
    """Four panels by number of workers: time to target, step time, efficiency, and the share of computation in a step."""
    figure = Figure(figsize=(10.5, 7.6), layout="constrained")
    panels = [figure.add_subplot(2, 2, index) for index in (1, 2, 3, 4)]
    _draw_lines(panels[0], scaling, lambda point: point.seconds, "seconds to target", ideal=True)
    _draw_run_points(panels[0], scaling)
    _draw_lines(panels[1], scaling, lambda point: point.step_seconds, "seconds a step", ideal=True)
    _draw_lines(panels[2], scaling, scaling.efficiency, "efficiency (fewest workers = 1)", label="{}, to target")
    _draw_lines(panels[2], scaling, lambda point: _step_efficiency(scaling, point), None, label="{}, samples a second", dashed=True)
    panels[2].axhline(1, color=INK, linewidth=0.9, linestyle=":", zorder=1)
    panels[2].set_ylim(bottom=0)
    _draw_shares(panels[3], scaling)
    for axes in panels[:3]:
        _set_worker_axis(axes, scaling)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best")
    headline = f"{scaling.experiment}: {scaling.strategy} on {', '.join(map(str, _workers(scaling)))} workers"
    detail = f"To {target_label(scaling.target)}; {scaling.num_seeds} seeds, in turns; dotted: what no exchange at all would give"
    return add_title(figure, headline, detail)


def _draw_lines(
    axes: Axes,
    scaling: Scaling,
    value: Callable[[ScalingPoint], float | None],
    name: str | None,
    *,
    ideal: bool = False,
    label: str = "{}",
    dashed: bool = False,
) -> None:
    """Draw a line of ``value`` for each scaling mode; ``ideal`` adds a dotted line of what a step without exchange would give."""
    for mode, colour in _MODE_COLOURS.items():
        measured = [(point, measurement) for point in scaling.of(mode) if (measurement := value(point)) is not None]
        if not measured:
            continue
        axes.plot(
            [point.num_workers for point, _ in measured],
            [measurement for _, measurement in measured],
            color=colour,
            marker=_MODE_MARKERS[mode],
            markersize=6,
            linewidth=1.6,
            linestyle="--" if dashed else "-",
            label=label.format(mode),
            zorder=3,
        )
        if ideal and measured[0][0] is scaling.of(mode)[0]:
            base, base_value = measured[0]
            work = [point.batch_size / base.batch_size * base.num_workers / point.num_workers for point in scaling.of(mode)]
            if name == "seconds to target" and mode is Mode.WEAK:
                continue  # the number of larger steps to the target is not known beforehand
            axes.plot(
                [point.num_workers for point in scaling.of(mode)],
                [base_value * factor for factor in work],
                color=colour,
                linestyle=":",
                linewidth=1.2,
            )
    if name is not None:
        axes.set_ylabel(name)
    if ideal:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_run_points(axes: Axes, scaling: Scaling) -> None:
    """Draw each run that reached the target as a small point."""
    for mode, colour in _MODE_COLOURS.items():
        spots = [(point.num_workers, run.score) for point in scaling.of(mode) for run in point.times.values() if run.reached and run.score]
        axes.scatter([x for x, _ in spots], [y for _, y in spots], s=14, color=colour, alpha=0.45, linewidths=0, zorder=2)


def _draw_shares(axes: Axes, scaling: Scaling) -> None:
    """Draw a bar for each point: the shares of a step in computation and in exchange."""
    known = [(point, share) for point in scaling.points if (share := point.computation_share) is not None]
    for column, (point, share) in enumerate(known):
        axes.bar(column, share, color=_MODE_COLOURS[point.mode], width=0.7)
        axes.bar(column, 1 - share, bottom=share, color=_EXCHANGE_COLOUR, width=0.7)
        axes.text(column, share / 2, f"{share:.0%}", ha="center", va="center", color="white", fontsize=9)
    axes.set_xticks(range(len(known)), [f"{point.num_workers}\n{point.mode}" for point, _ in known])
    axes.set_ylabel("share of a step")
    axes.set_xlabel("computing (colour) · exchange, and waiting for others (grey)" if known else "not measured without one worker alone")
    axes.grid(visible=False, axis="x")


def _set_worker_axis(axes: Axes, scaling: Scaling) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([float(number) for number in _workers(scaling)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("workers")


def _workers(scaling: Scaling) -> list[int]:
    return sorted({point.num_workers for point in scaling.points})


def _step_efficiency(scaling: Scaling, point: ScalingPoint) -> float | None:
    efficiency = scaling.step_efficiency(point)
    return None if efficiency is None else efficiency.ratio
