"""Drawing helpers that all figures share: one style, a mark for each outcome, titles, legends and axis scales.

Figures are created as ``Figure`` objects, not through pyplot, so that neither a window system nor a notebook's state is touched.
"""

import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.markers import MarkerStyle
from matplotlib.path import Path as Outline
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from autotune.files import make_folder, replacing
from autotune.measurement import Target, TrialResult
from autotune.outcome import Outcome

DOTS_PER_INCH = 150
LOG_SPAN = 30
MAX_LABEL = 56
INK = "#222222"
BASELINE_COLOUR = "#666666"
PART_COLOURS = ("#009E73", "#0072B2", "#E69F00")
"""Colours of the time to target, the steps to target and the seconds a step."""

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
class Mark:
    """The appearance of a point in a figure; ``size`` is in points."""

    colour: str
    marker: str | Outline
    hollow: bool
    size: float


def with_arrow(shape: Outline, *, angle: str = "up") -> Outline:
    """A marker shape with an arrow (``up`` or else to the right) that marks the value as a lower bound."""
    arrow = [(0.0, 1.0), (0.0, 3.0), (-0.7, 2.2), (0.0, 3.0), (0.7, 2.2)]
    codes = [Outline.MOVETO, Outline.LINETO, Outline.MOVETO, Outline.LINETO, Outline.LINETO]
    points = arrow if angle == "up" else [(y, x) for x, y in arrow]
    return Outline.make_compound_path(shape, Outline(points, codes))


CIRCLE = Outline.unit_circle()
SQUARE = Outline([(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85), (-0.85, -0.85)], closed=True)
DIAMOND = Outline([(0, -1.15), (1.15, 0), (0, 1.15), (-1.15, 0), (0, -1.15)], closed=True)
TRIANGLE = Outline([(-1.1, 0.9), (1.1, 0.9), (0, -1.2), (-1.1, 0.9)], closed=True)

_SHAPES = {"diamond": DIAMOND, "circle": CIRCLE, "square": SQUARE, "triangle": TRIANGLE}
MARKS: Mapping[Outcome, Mark] = {
    outcome: Mark(
        colour=outcome.traits.colour,
        marker=with_arrow(_SHAPES[outcome.traits.marker]) if outcome.is_censored else outcome.traits.marker,
        hollow=outcome.is_censored,
        size=outcome.traits.size,
    )
    for outcome in Outcome
}
"""The mark of each outcome; shape and colour each tell outcomes apart."""


def curve_of(result: TrialResult) -> list[tuple[float, float]]:
    """A trial's learning curve: warm seconds and metric of each evaluation, without values that are not finite."""
    points = [(evaluation.warm_seconds, evaluation.metric) for evaluation in result.evaluations]
    return [(seconds, metric) for seconds, metric in points if math.isfinite(seconds) and math.isfinite(metric)]


def metric_range(metrics: Sequence[float], target: Target, best: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The range of the metric to show: all values, unless a few diverging trials would flatten the curves of all others."""
    always_shown = [target.value, *(metric for _, metric in best)]
    low, high = min(*always_shown, *metrics), max(*always_shown, *metrics)
    if len(metrics) > 1:
        cuts = statistics.quantiles(metrics, n=20, method="inclusive")
        core_low, core_high = min(*always_shown, cuts[0]), max(*always_shown, cuts[-1])
        if not high - low < 5 * (core_high - core_low):  # also where the difference overflows
            low, high = core_low, core_high
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    return low - max(abs(low) * 0.1, 1e-3), high + max(abs(high) * 0.1, 1e-3)


def draw_mark(axes: Axes, x: float, y: float, mark: Mark, *, scale: float = 1.0) -> None:
    """Draw one point with a mark, whose size is multiplied by ``scale``."""
    draw_marks(axes, [x], [y], mark, scale=scale)


def draw_marks(axes: Axes, x: Sequence[float], y: Sequence[float], mark: Mark, *, scale: float = 1.0) -> None:
    """Draw points with the same mark, whose size is multiplied by ``scale``: thousands of them in the time of one."""
    if x:
        axes.plot(x, y, linestyle="", zorder=4, **mark_properties(mark, scale))


def mark_properties(mark: Mark, scale: float = 1.0) -> dict[str, Any]:
    """A mark as keyword arguments of matplotlib's lines; ``scale`` multiplies its size."""
    return {
        "marker": MarkerStyle(mark.marker),
        "markersize": mark.size * scale,
        "markerfacecolor": "none" if mark.hollow else mark.colour,
        "markeredgecolor": mark.colour if mark.hollow else "white",
        "markeredgewidth": 1.2 if mark.hollow else 0.6,
    }


def set_scale(axes: Axes, axis: str, values: Iterable[float]) -> None:
    """Make an axis logarithmic, with plain numbers, if all values are positive and the largest is over ``LOG_SPAN`` times the smallest."""
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


def set_rows(axes: Axes, labels: Sequence[str], *, room: float) -> None:
    """Label the rows of a bar chart, the first on top, with ``room`` rows free above the first and below the last."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 1 + room, -room)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def add_legend(axes: Axes, handles: Sequence[Artist], *, title: str) -> None:
    """Add a legend to the right of the axes."""
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), title=title, alignment="left")


def write_png(figures: Mapping[str, Callable[[], Figure]], folder: Path) -> list[Path]:
    """Draw each figure to ``NAME.png`` in ``folder``, made if missing, and return the paths."""
    make_folder(folder)
    paths = []
    with mpl.rc_context(STYLE):  # text and ticks are made while drawing, so saving belongs inside the style too
        for name, draw in figures.items():
            figure = draw()
            FigureCanvasAgg(figure)
            path = folder / f"{name}.png"
            with replacing(path) as part:
                figure.savefig(part, dpi=DOTS_PER_INCH, format="png")
            paths.append(path)
    return paths


def add_title(figure: Figure, headline: str, detail: str) -> Figure:
    """Add a headline and a detail text across the figure's width, and move the axes down to make room."""
    height = figure.get_figheight()
    below = 0.1
    for text, size, colour, weight, columns in ((headline, 12.5, INK, "bold", 80), (detail, 9.5, "#555555", "normal", 120)):
        lines = textwrap.wrap(text, columns)
        text_block = figure.text(0.012, 1 - below / height, "\n".join(lines), va="top", linespacing=1.25)
        text_block.set(fontsize=size, color=colour, fontweight=weight)
        below += len(lines) * size * 1.5 / 72 + 0.03
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - below / height), w_pad=0.1, h_pad=0.08)
    return figure


def say(figure: Figure, headline: str, sentence: str) -> Figure:
    """Fill a figure that has nothing to plot with a sentence that says why."""
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.text(0.5, 0.5, sentence, ha="center", va="center", fontsize=12, color="#555555", transform=axes.transAxes)
    return add_title(figure, headline, "")


def target_label(target: Target) -> str:
    """A target as figures show it, such as ``accuracy ≥ 0.94``."""
    return f"{shorten(target.metric)} {'≥' if target.mode == 'max' else '≤'} {target.value:g}"


def counted(number: int, noun: str) -> str:
    """A count with its noun in singular or plural, such as ``1 trial`` or ``2 trials``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shorten(name: str, max_characters: int = MAX_LABEL) -> str:
    """A name on one line, with an ellipsis for the middle if it is longer than ``max_characters``."""
    line = " ".join(name.split())
    if len(line) <= max_characters:
        return line
    return f"{line[: max_characters // 2 - 1]}…{line[-max_characters // 2 :]}"
