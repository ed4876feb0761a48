"""The figure of a Pareto front, with one panel for each pair of objectives."""

import itertools
import math
import statistics

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from autotune.measurement import Target
from autotune.outcome import Outcome
from autotune.report.drawing import INK, MARKS, Mark, add_legend, add_title, counted, draw_mark, mark_properties, set_scale, target_label
from autotune.report.front import Front

_BEATEN = Mark(colour="#BBBBBB", marker="o", hollow=False, size=5)
_MEMBER = MARKS[Outcome.REACHED]
_PICKED = Mark(colour=INK, marker="o", hollow=True, size=13)
_MAX_COLUMNS = 3


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
