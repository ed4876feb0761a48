"""The charts of a comparison, as Plotly's figures."""

import itertools
import math
from collections.abc import Mapping
from html import escape
from statistics import fmean

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autotune.comparison import RunScore, expected_score
from autotune.reporting.compared import ComparedSide, Comparison, verdict
from autotune.reporting.drawing import (
    Chart,
    add_line,
    add_points,
    axis_scale,
    counted,
    curve_of,
    metric_range,
    shorten,
    target_label,
)
from autotune.reporting.scores import describe_arm

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def comparison_charts(comparison: Comparison) -> list[Chart]:
    """The charts of a comparison: all of its runs, and their learning curves."""
    return [_runs_chart(comparison), _curves_chart(comparison)]


def _runs_chart(comparison: Comparison) -> Chart:
    """On the left each run's score and what a success costs, on the right the time of a step."""
    sides = comparison.sides
    figure = make_subplots(cols=2, column_widths=[0.6, 0.4], horizontal_spacing=0.08)
    for place, side in enumerate(sides):
        milliseconds = {pair: step._replace(score=1000 * (step.score or 0.0)) for pair, step in side.step_seconds.items()}
        _add_runs(figure, 1, place, side, side.scores)
        _add_runs(figure, 2, place, side, milliseconds)
    figure.update_xaxes(title=escape(comparison.scale.axis_label), rangemode="tozero", col=1)
    figure.update_xaxes(title="Time of a training step (ms)", rangemode="tozero", col=2)
    figure.update_yaxes(
        tickvals=list(range(len(sides))),
        ticktext=[side.name for side in sides],
        range=[len(sides) - 0.4, -0.6],
        showgrid=False,
    )
    figure.update_layout(legend={"orientation": "h", "y": -0.3})
    verdicts = "; ".join(verdict(comparison, side) for side in sides[1:])
    words = "; ".join(f"{side.label}: {describe_arm(side.arm)}" for side in sides)
    description = (
        f"{verdicts}. {comparison.experiment} to {target_label(comparison.target)}: {words}. A mark is a run, "
        "an arrow one that ended short of the target, a bar what a success costs."
    )
    height = 160 + 80 * len(sides)
    return Chart(name="comparison", description=description, figure=figure, height=height)


def _add_runs(figure: go.Figure, column: int, place: int, side: ComparedSide, runs: Mapping[int, RunScore]) -> None:
    known = {pair: run for pair, run in runs.items() if run.score is not None}
    if not known:
        return
    colour = _COLOURS[place % len(_COLOURS)]
    cost = expected_score(list(runs.values()))
    if cost is None or not math.isfinite(cost):
        cost = fmean(run.score or 0.0 for run in known.values())
    figure.add_bar(
        x=[cost], y=[place], orientation="h", width=0.6, marker={"color": colour, "opacity": 0.3},
        showlegend=False, hoverinfo="skip", row=1, col=column,
    )  # fmt: skip
    points = [  # shifted, so that runs with similar values do not hide each other
        (run.score, place + 0.085 * (pair % 5 - 2), f"{side.name}, pair {pair}: {run.score:.4g}") for pair, run in known.items()
    ]
    symbols = ["circle" if run.reached else "arrow-right-open" for run in known.values()]
    add_points(
        figure,
        points,
        name=_name(side, len(known)),
        marker={"color": colour, "symbol": symbols, "size": 9},
        showlegend=column == 1,
        row=1,
        col=column,
    )


def _name(side: ComparedSide, num_runs: int) -> str:
    return f"{escape(shorten(side.label, 90))} ({counted(num_runs, 'run')})"


def _curves_chart(comparison: Comparison) -> Chart:
    """The validation metric of every run of all sides over its seconds of prepare and train."""
    figure, target, points = go.Figure(), comparison.target, []
    for side, colour in zip(comparison.sides, itertools.cycle(_COLOURS), strict=False):
        curves = [curve for run in side.runs.values() if (curve := curve_of(run))]
        spots = [spot for curve in curves for spot in (*curve, (None, None))]
        points += [point for curve in curves for point in curve]
        figure.add_scatter(
            x=[x for x, _ in spots], y=[y for _, y in spots], mode="lines+markers", opacity=0.7,
            marker={"size": 4}, line={"color": colour, "width": 1.3}, name=_name(side, len(curves)),
        )  # fmt: skip
    if points:
        end, name = max(x for x, _ in points), f"target {target.value:g}"
        add_line(figure, [0.0, end], [target.value] * 2, name=name, line={"dash": "dash"})
        low, high = metric_range([metric for _, metric in points], target, [])
        margin = 0.03 * (high - low)
        figure.update_yaxes(range=[low - margin, high + margin])
        figure.update_xaxes(**axis_scale([seconds for seconds, _ in points]))
    figure.update_xaxes(title="Seconds of preparing and training")
    figure.update_yaxes(title=escape(f"{shorten(target.metric)} on the validation split"))
    figure.update_layout(legend={"orientation": "h", "y": -0.2})
    description = f"{comparison.experiment} to {target_label(target)}: {target.metric} over training time, a line for each run."
    return Chart(name="curves", description=description, figure=figure, height=460)
