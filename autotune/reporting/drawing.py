"""What all charts share: Plotly's figures and the files they are written to, colours, scales of
axes, and names in few characters.

Plotly reads texts as HTML, so texts of others are escaped where a chart is made.
"""

import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from autotune.files import make_folder, replace_file
from autotune.measurement import Target
from autotune.reporting.scores import ArmScores

LOG_SPAN = 30
MAX_LABEL = 56
BASELINE_COLOUR = "#666666"
PART_COLOURS = ("#009E73", "#0072B2", "#E69F00")
"""Colours of the time to target, the steps to target and the seconds a step."""
_TITLE_CHARACTERS, _TITLE_LINES = 120, 2


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart: ``description`` says in words what it shows, for those who do not see it."""

    name: str
    description: str
    figure: go.Figure
    height: int = 400
    """Height in CSS pixels."""
    min_width: int = 0
    """Width in CSS pixels below which the chart scrolls instead."""


def write_charts(folder: Path, charts: Iterable[Chart]) -> list[Path]:
    """Write each chart to ``NAME.html`` in ``folder``, made if missing, and return the paths.

    The pages load Plotly's library from its server, as those of ``mlflow.log_figure`` do.
    """
    make_folder(folder)
    paths = []
    for chart in charts:
        lines = textwrap.wrap(
            chart.description, _TITLE_CHARACTERS, max_lines=_TITLE_LINES, placeholder=" …"
        )
        place = {
            "x": 0.02,
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "pad": {"t": 12 + 12 * len(lines)},
        }
        title = {"text": "<br>".join(map(escape, lines)), "font": {"size": 14}, **place}
        margin, height = {"t": 48 + 24 * len(lines)}, chart.height + 48 + 24 * len(lines)
        figure = go.Figure(chart.figure).update_layout(
            template="plotly_white", colorway=["#333333"], title=title, margin=margin, height=height
        )
        path = folder / f"{chart.name}.html"
        replace_file(
            path,
            figure.to_html(include_plotlyjs="cdn", config={"displayModeBar": False}).encode(
                errors="replace"
            ),
        )
        paths.append(path)
    return paths


def runs_chart(
    name: str, arms: Sequence[ArmScores], colours: Sequence[str], description: str
) -> Chart:
    """A row for each configuration: its runs, and a bar up to what a success costs."""
    figure, rows, scale = go.Figure(), range(len(arms), 0, -1), arms[0].scale
    spent = [arm.mean_spent or 0.0 for arm in arms]
    costs = [
        finite(arm.expected_score or 0.0) or mean for arm, mean in zip(arms, spent, strict=True)
    ]
    figure.add_bar(
        x=costs,
        y=[*rows],
        orientation="h",
        marker={"color": [*colours], "opacity": 0.55},
        name="what one success costs",
        hoverinfo="skip",
    )
    names = {"circle": "a run that reached the target", "arrow-right-open": "a run that fell short"}
    for symbol, meaning in names.items():
        runs = [
            (
                finite(score),
                row + (index % 5 - 2) * 0.11,
                escape(f"{arm.label}: {scale.format(score)}"),
            )
            for row, arm in zip(rows, arms, strict=True)
            for index, (score, reached) in enumerate(arm.scored_runs)
            if reached is (symbol == "circle")
        ]
        if runs:
            add_points(
                figure,
                runs,
                name=meaning,
                marker={"symbol": symbol, "size": 9, "line": {"width": 1}},
            )
    figure.update_xaxes(title=escape(scale.axis_label), rangemode="tozero")
    labels = [escape(shorten(arm.label, 24)) for arm in arms]
    figure.update_yaxes(tickvals=[*rows], ticktext=labels, showgrid=False)
    return Chart(name=name, description=description, figure=figure, height=150 + 56 * len(arms))


def metric_range(
    metrics: Sequence[float], target: Target, best: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """The range of the metric to show: all values, unless a few diverging trials would flatten
    the curves of all others.
    """
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


def add_points(
    figure: go.Figure,
    points: Sequence[tuple[float | None, float | None, str]],
    *,
    name: str,
    trials: Sequence[int] = (),
    **style: Any,
) -> None:
    """Marks at points of x, y and the text that they show when pointed at."""
    figure.add_scatter(
        x=[x for x, _, _ in points],
        y=[y for _, y, _ in points],
        hovertext=[text for _, _, text in points],
        hoverinfo="text",
        customdata=[*trials] or None,
        mode="markers",
        name=name,
        **style,
    )


def add_line(figure: go.Figure, x: Sequence[float], y: Sequence[float], **style: Any) -> None:
    """A line through points, without a word for whoever points at it."""
    figure.add_scatter(
        x=list(map(finite, x)), y=list(map(finite, y)), mode="lines", hoverinfo="skip", **style
    )


def is_log(values: Iterable[float]) -> bool:
    """Whether values are shown on a logarithmic axis: all are positive, and the largest is over
    ``LOG_SPAN`` times the smallest.
    """
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) > LOG_SPAN


def axis_scale(values: Sequence[float]) -> dict[str, Any]:
    """The properties of an axis for values, logarithmic or not."""
    return log_axis(values) if is_log(values) else {"type": "linear"}


def log_axis(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis with plain numbers: the values themselves if these are a few whole
    ones, else round numbers between their ends.
    """
    low, high = min(values), max(values)
    subs = (1, 2, 5) if high / low < 300 else (1,)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    rounded = [
        tick
        for power in powers
        for sub in subs
        if 0.7 * low <= (tick := sub * 10.0**power) <= 1.4 * high
    ]
    ticks = (
        list(values)
        if len(values) > 2 and all(isinstance(value, int) for value in values)
        else rounded
    )
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:.4g}" for tick in ticks]}


def finite(value: float) -> float | None:
    """A number with five digits, which keeps the page small; None for one that is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def target_label(target: Target) -> str:
    """A target as figures show it, such as ``accuracy ≥ 0.94``."""
    return f"{shorten(target.metric)} {'≥' if target.mode == 'max' else '≤'} {target.value:g}"


def counted(number: int, noun: str) -> str:
    """A count with its noun in singular or plural, such as ``1 trial`` or ``2 trials``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shorten(name: str, max_characters: int = MAX_LABEL) -> str:
    """A name on one line, with an ellipsis for the middle if it is longer than
    ``max_characters``.
    """
    line = " ".join(name.split())
    if len(line) <= max_characters:
        return line
    return f"{line[: max_characters // 2 - 1]}…{line[-max_characters // 2 :]}"
