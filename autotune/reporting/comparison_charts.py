"""The charts of a comparison and of a scaling measurement, as Plotly's figures."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import fmean

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autotune.comparison import Ratio, RunScore, expected_score
from autotune.reporting.compared import ComparedSide, Comparison, verdict
from autotune.reporting.drawing import Chart, add_line, add_points, axis_scale, counted, curve_of, metric_range, shorten, target_label
from autotune.reporting.scaling import Mode, Scaling, ScalingPoint
from autotune.reporting.scores import describe_arm, format_ratio

SIDE_COLOURS = ("#0072B2", "#D55E00")
_PAIR_COLOUR = "#999999"
_MODE_COLOURS = {Mode.STRONG: "#0072B2", Mode.WEAK: "#D55E00"}


def comparison_charts(comparison: Comparison) -> list[Chart]:
    """The charts of a comparison: all of its runs and their ratios, and their learning curves."""
    return [_runs_chart(comparison), _curves_chart(comparison)]


def _runs_chart(comparison: Comparison) -> Chart:
    """Two rows, for score and step time: on the left each run and what a success costs, on the right the ratio of each pair."""
    figure = make_subplots(rows=2, cols=2, column_widths=[0.62, 0.38], horizontal_spacing=0.06, vertical_spacing=0.2)
    rows: tuple[tuple[str, list[Mapping[int, RunScore]], Ratio | None], ...] = (
        (comparison.scale.axis_label, [side.scores for side in comparison.sides], comparison.score_ratio),
        ("Time of a training step (ms)", [_step_milliseconds(side) for side in comparison.sides], comparison.step_ratio),
    )
    for row, (name, values, ratio) in enumerate(rows, start=1):
        _add_runs(figure, row, comparison.sides, values)
        figure.update_xaxes(title=escape(name), rangemode="tozero", row=row, col=1)
        figure.update_yaxes(tickvals=[0, 1], ticktext=["a", "b"], range=[1.6, -0.6], showgrid=False, row=row, col=1)
        _add_ratios(figure, row, values, ratio)
    figure.update_layout(legend={"orientation": "h", "y": -0.15})
    words = "; ".join(f"{side.label}: {describe_arm(side.arm)}" for side in comparison.sides)
    description = (
        f"{verdict(comparison)}. {comparison.experiment} to {target_label(comparison.target)}: {words}. Left: a mark is a run, an arrow "
        "one that ended short of the target, a bar what a success costs. Right: a dot is a pair, the diamond the ratio with its interval."
    )
    return Chart(name="comparison", description=description, figure=figure, height=520)


def _step_milliseconds(side: ComparedSide) -> Mapping[int, RunScore]:
    return {pair: RunScore(1000 * seconds, reached=True) for pair, seconds in side.step_seconds.items()}


def _add_runs(figure: go.Figure, row: int, sides: Sequence[ComparedSide], values: Sequence[Mapping[int, RunScore]]) -> None:
    for place, (side, runs, colour) in enumerate(zip(sides, values, SIDE_COLOURS, strict=True)):
        known = {pair: run for pair, run in runs.items() if run.score is not None}
        if not known:
            continue
        expected = expected_score(list(runs.values()))
        cost = expected if expected is not None and math.isfinite(expected) else fmean(run.score or 0.0 for run in known.values())
        figure.add_bar(
            x=[cost], y=[place], orientation="h", width=0.6, marker={"color": colour, "opacity": 0.3}, showlegend=False, hoverinfo="skip",
            row=row, col=1,
        )  # fmt: skip
        points = [(run.score, _height(place, pair), f"{side.name}, pair {pair}: {run.score:.4g}") for pair, run in known.items()]
        symbols = ["circle" if run.reached else "arrow-right-open" for run in known.values()]
        name = f"{escape(shorten(side.label, 90))} ({counted(len(known), 'run')})"
        marker = {"color": colour, "symbol": symbols, "size": 9}
        add_points(figure, points, name=name, marker=marker, showlegend=row == 1, row=row, col=1)
    for pair in sorted(values[0].keys() & values[1].keys()):
        ends = [values[0][pair].score, values[1][pair].score]
        if None not in ends:
            heights, line = [_height(0, pair), _height(1, pair)], {"color": _PAIR_COLOUR, "width": 0.8}
            add_line(figure, [end or 0.0 for end in ends], heights, line=line, showlegend=False, row=row, col=1)


def _add_ratios(figure: go.Figure, row: int, values: Sequence[Mapping[int, RunScore]], ratio: Ratio | None) -> None:
    figure.update_yaxes(visible=False, range=[-1, 1.2], row=row, col=2)
    title = "a / b: not measured"
    if ratio is not None:
        pairs = [
            (one.score / other.score, _height(0, pair), f"pair {pair}: {one.score / other.score:.3g}")
            for pair in sorted(values[0].keys() & values[1].keys())
            if (one := values[0][pair]).score and (other := values[1][pair]).score and (one.reached or other.reached)
        ]
        add_points(figure, pairs, name="a pair", marker={"color": _PAIR_COLOUR, "size": 7}, showlegend=False, row=row, col=2)
        shown_ratios = [1.0, ratio.ratio, *(x for x, _, _ in pairs)]
        left, right = 0.9 * min(shown_ratios), 1.1 * max(shown_ratios)  # an interval without an end would leave no room for the pairs
        left, right = max(min(left, ratio.low), left / 3), min(max(right, ratio.high), right * 3)
        figure.update_xaxes(range=[0.95 * left, 1.05 * right], row=row, col=2)
        low, high = max(ratio.low, 0.5 * left), min(ratio.high, 2 * right)
        error = {"type": "data", "symmetric": False, "array": [high - ratio.ratio], "arrayminus": [ratio.ratio - low], "thickness": 2}
        figure.add_scatter(
            x=[ratio.ratio], y=[0.7], error_x=error, mode="markers", marker={"symbol": "diamond", "size": 11, "color": "#222222"},
            showlegend=False, hoverinfo="skip", row=row, col=2,
        )  # fmt: skip
        shown = format_ratio(ratio) if ratio.is_resolved else "no difference shown"
        title = f"a / b: {shown} [{ratio.low:.3g}, {ratio.high:.3g}], n = {ratio.num_pairs}"
    figure.add_vline(x=1.0, line={"dash": "dash", "width": 1.2, "color": "#888888"}, row=row, col=2)
    figure.update_xaxes(title=title, row=row, col=2)


def _height(row: int, pair: int) -> float:
    """The y coordinate of a pair's run, shifted within its row so that runs with similar values do not hide each other."""
    return row + 0.085 * (pair % 5 - 2)


def _curves_chart(comparison: Comparison) -> Chart:
    """The validation metric of every run of both sides over its seconds of prepare and train."""
    figure, target = go.Figure(), comparison.target
    curves = [[curve for run in side.runs.values() if (curve := curve_of(run))] for side in comparison.sides]
    points = [point for side_curves in curves for curve in side_curves for point in curve]
    for side, side_curves, colour in zip(comparison.sides, curves, SIDE_COLOURS, strict=True):
        spots = [spot for curve in side_curves for spot in (*curve, (None, None))]
        name = f"{escape(shorten(side.label, 90))} ({counted(len(side_curves), 'run')})"
        figure.add_scatter(
            x=[x for x, _ in spots], y=[y for _, y in spots], mode="lines+markers", marker={"size": 4},
            line={"color": colour, "width": 1.3}, name=name, opacity=0.7,
        )  # fmt: skip
    if points:
        add_line(figure, [0.0, max(x for x, _ in points)], [target.value] * 2, name=f"target {target.value:g}", line={"dash": "dash"})
        low, high = metric_range([metric for _, metric in points], target, [])
        figure.update_yaxes(range=[low - 0.03 * (high - low), high + 0.03 * (high - low)])
        figure.update_xaxes(**axis_scale([seconds for seconds, _ in points]))
    figure.update_xaxes(title="Seconds of preparing and training")
    figure.update_yaxes(title=escape(f"{shorten(target.metric)} on the validation split"))
    figure.update_layout(legend={"orientation": "h", "y": -0.2})
    description = f"{comparison.experiment} to {target_label(target)}: {target.metric} over training time, a line for each run."
    return Chart(name="curves", description=description, figure=figure, height=460)


def scaling_chart(scaling: Scaling) -> Chart:
    """By number of workers: time to target, step time, efficiency, and the share of computation in a step; dotted what is ideal."""
    titles = ("seconds to target", "seconds a step", "samples a second a worker (fewest workers = 1)", "share of a step spent computing")
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, vertical_spacing=0.16)
    values: tuple[Callable[[ScalingPoint], float | None], ...] = (
        lambda point: point.seconds,
        lambda point: point.step_seconds,
        lambda point: None if (efficiency := scaling.step_efficiency(point)) is None else efficiency.ratio,
        lambda point: point.computation_share,
    )
    workers = sorted({point.num_workers for point in scaling.points})
    for index, value in enumerate(values):
        row, column = divmod(index, 2)
        for mode, colour in _MODE_COLOURS.items():
            known = [(point, measured) for point in scaling.of(mode) if (measured := value(point)) is not None]
            if not known:
                continue
            figure.add_scatter(
                x=[point.num_workers for point, _ in known], y=[measured for _, measured in known], mode="lines+markers", name=str(mode),
                line={"color": colour}, showlegend=index == 0, row=row + 1, col=column + 1,
            )  # fmt: skip
            base, first = known[0]
            is_known = base is scaling.of(mode)[0] and not (index == 0 and mode is Mode.WEAK)  # larger steps: how many is not known before
            if index < 2 and is_known:
                ideal = [first * point.batch_size / base.batch_size * base.num_workers / point.num_workers for point in scaling.of(mode)]
                line, at = {"color": colour, "dash": "dot", "width": 1.2}, [float(point.num_workers) for point in scaling.of(mode)]
                add_line(figure, at, ideal, line=line, showlegend=False, row=row + 1, col=column + 1)
        figure.update_yaxes(rangemode="tozero", row=row + 1, col=column + 1)
    figure.update_xaxes(type="log", tickvals=workers, ticktext=list(map(str, workers)), title="workers")
    description = (
        f"{scaling.experiment}: {scaling.strategy} on {', '.join(map(str, workers))} workers, to {target_label(scaling.target)}; "
        f"{scaling.num_seeds} seeds, in turns; dotted: what no exchange at all would give."
    )
    return Chart(name="scaling", description=description, figure=figure, height=620)
