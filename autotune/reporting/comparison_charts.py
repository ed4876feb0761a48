"""The charts of a comparison, as Plotly's figures."""

from html import escape

import plotly.graph_objects as go

from autotune.reporting.compared import Comparison, verdict
from autotune.reporting.drawing import (
    Chart,
    add_line,
    arms_figure,
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
    """The charts of a comparison: the scores of all runs, and their learning curves."""
    sides = comparison.sides
    verdicts = "; ".join(verdict(comparison, side) for side in sides[1:])
    words = "; ".join(f"{side.label}: {describe_arm(side.arm)}" for side in sides)
    target = target_label(comparison.target)
    runs = Chart(
        name="comparison",
        description=f"{verdicts}. {comparison.experiment} to {target}: {words}.",
        figure=arms_figure([side.arm for side in sides], _COLOURS),
        height=150 + 56 * len(sides),
    )
    return [runs, _curves_chart(comparison)]


def _curves_chart(comparison: Comparison) -> Chart:
    """The validation metric of every run of all sides over its seconds of prepare and train."""
    figure, target, points = go.Figure(), comparison.target, []
    for side, colour in zip(comparison.sides, _COLOURS, strict=False):
        curves = [curve for run in side.runs.values() if (curve := curve_of(run))]
        spots = [spot for curve in curves for spot in (*curve, (None, None))]
        points += [point for curve in curves for point in curve]
        name = f"{escape(shorten(side.label, 90))} ({counted(len(curves), 'run')})"
        figure.add_scatter(
            x=[x for x, _ in spots],
            y=[y for _, y in spots],
            mode="lines+markers",
            opacity=0.7,
            marker={"size": 4},
            line={"color": colour, "width": 1.3},
            name=name,
        )
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
    description = (
        f"{comparison.experiment} to {target_label(target)}: {target.metric} over training time, a"
        " line for each run."
    )
    return Chart(name="curves", description=description, figure=figure, height=460)
