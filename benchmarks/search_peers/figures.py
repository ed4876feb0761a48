"""Figures of the search benchmark: what each policy costs, and how far from the best it still is after a budget."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from autotune.reporting.drawing import INK, add_legend, add_title, counted, set_scale, shorten, write_png
from benchmarks.search_peers.scores import BUDGETS, PolicySummary

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
_OWN = "freeze_thaw"
_OWN_COLOUR = "#D55E00"
_OTHER_COLOUR = "#0072B2"
_MIN_REGRET = 0.01
"""Regret below which the curve is drawn at this: a search ends at 10% and says nothing of less."""


def write_figures(folder: Path, date: str, summaries: Sequence[PolicySummary]) -> list[Path]:
    """Two figures for each number of workers, as PNG files in ``folder``; their paths."""
    figures = {}
    for num_workers in sorted({each.num_workers for each in summaries}):
        own = sorted((each for each in summaries if each.num_workers == num_workers), key=lambda each: each.geometric_mean)
        figures[f"search-{date}-workers-{num_workers}"] = lambda own=own: draw_costs(own)
        figures[f"search-{date}-workers-{num_workers}-regret"] = lambda own=own: draw_regrets(own)
    return write_png(figures, folder)


def draw_costs(summaries: Sequence[PolicySummary]) -> Figure:
    """Left, the cost multiples' geometric mean and 90th percentile; right, the worst recording relative to random with cap."""
    figure = Figure(figsize=(10, 1.9 + 0.38 * len(summaries)), layout="constrained")
    grid = figure.add_gridspec(1, 2, width_ratios=[1.5, 1])
    left, right = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    rows = range(len(summaries) - 1, -1, -1)
    for row, each in zip(rows, summaries, strict=True):
        colour = _OWN_COLOUR if each.policy == _OWN else _OTHER_COLOUR
        left.plot([each.low, min(each.high, each.ninetieth_percentile * 2)], [row, row], color=colour, linewidth=2)
        left.plot([each.geometric_mean], [row], "o", color=colour, markersize=7)
        left.plot([each.ninetieth_percentile], [row], "D", markerfacecolor="none", markeredgecolor=colour, markersize=6)
        right.plot([1, each.worst_relative], [row, row], color=colour, linewidth=1.2)
        right.plot([each.worst_relative], [row], "o", color=colour, markersize=7)
        right.annotate(
            f"{each.worst_relative:.2g}  {shorten(each.worst_recording, 26)}",
            (each.worst_relative, row),
            xytext=(-3, 6),
            textcoords="offset points",
            ha="left",
            fontsize=7.5,
            color=INK,
        )
    left.set_yticks(list(rows), [each.policy for each in summaries])
    right.set_yticks(list(rows), [""] * len(summaries))
    for axes in (left, right):
        axes.set_ylim(-0.6, len(summaries) - 0.3)
    set_scale(left, "x", [value for each in summaries for value in (each.low, each.ninetieth_percentile)])
    left.set_xlabel("Cost multiple")
    right.axvline(1, color="#888888", linewidth=0.8)
    worst = [each.worst_relative for each in summaries]
    set_scale(right, "x", worst)
    right.set_xlim(right=1.9 * max(1, *worst))  # room for the name
    right.set_xlabel("Worst recording, over random with cap")
    first = summaries[0]
    counts = [each.num_searches for each in summaries]
    numbers = " to ".join(str(each) for each in sorted({min(counts), max(counts)}))
    detail = (
        f"{counted(first.num_recordings, 'recording')}, searches a policy: {numbers}, "
        f"{counted(first.num_workers, 'worker')}. Left: device seconds until a trial within 10% of the best recorded time to target has "
        f"reached it, over that time: geometric mean with its 95% interval, diamond 90th percentile. Right: the recording where the "
        f"geometric mean is worst relative to random search with cap."
    )
    return add_title(figure, f"{first.policy} costs {first.geometric_mean:.3g} best trainings, the least of those compared", detail)


def draw_regrets(summaries: Sequence[PolicySummary]) -> Figure:
    """How far the best trial so far is from the best recorded one, over what has been spent."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.add_subplot()
    lines = []
    for place, each in enumerate(summaries):
        style = "-" if place < len(_COLOURS) else "--"
        regrets = [max(regret, _MIN_REGRET) for regret in each.regrets]
        lines += axes.plot(BUDGETS, regrets, style, color=_COLOURS[place % len(_COLOURS)], linewidth=1.6, label=each.policy)
    set_scale(axes, "x", BUDGETS)
    set_scale(axes, "y", [max(regret, _MIN_REGRET) for each in summaries for regret in each.regrets])
    axes.set_xlabel("Device seconds spent, in best recorded times to target")
    axes.set_ylabel("Regret of the best time so far")
    add_legend(axes, lines, title="policy")
    detail = (
        "Geometric mean over recordings and seeds of the best time to target so far over the best recorded one, less 1; before any "
        "trial has reached the target its time limit counts. A search ends within 10%, and the curve then stays."
    )
    return add_title(figure, "Regret over budget", detail)
