"""Charts of the search benchmark: what each policy costs, and how far from the best it still is
after a budget.
"""

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autotune.reporting.drawing import Chart, axis_scale, shorten, write_charts
from autotune.reporting.scores import counted
from benchmarks.search_peers.scores import BUDGETS, PolicySummary

_OWN = "freeze_thaw"
_OWN_COLOUR = "#D55E00"
_OTHER_COLOUR = "#0072B2"
_MIN_REGRET = 0.01
"""Regret below which the curve is drawn at this: a search ends at 10% and says nothing of less."""


def write_figures(folder: Path, date: str, summaries: Sequence[PolicySummary]) -> list[Path]:
    """Two charts for each number of workers, as pages in ``folder``; their paths."""
    charts = []
    for num_workers in sorted({each.num_workers for each in summaries}):
        own = sorted(
            (each for each in summaries if each.num_workers == num_workers),
            key=lambda each: each.geometric_mean,
        )
        name = f"search-{date}-workers-{num_workers}"
        charts += [cost_chart(own, name), regret_chart(own, f"{name}-regret")]
    return write_charts(folder, charts)


def cost_chart(summaries: Sequence[PolicySummary], name: str) -> Chart:
    """Left, the cost multiples' geometric mean and 90th percentile.

    Right, the worst recording relative to random with cap.
    """
    figure = make_subplots(rows=1, cols=2, column_widths=[0.6, 0.4], shared_yaxes=True)
    policies = [each.policy for each in summaries]
    colours = [_OWN_COLOUR if policy == _OWN else _OTHER_COLOUR for policy in policies]
    means = [each.geometric_mean for each in summaries]
    error = {
        "type": "data",
        "array": [each.high - each.geometric_mean for each in summaries],
        "arrayminus": [each.geometric_mean - each.low for each in summaries],
    }
    marker = {"color": colours, "size": 9}
    figure.add_scatter(
        x=means,
        y=policies,
        error_x=error,
        mode="markers",
        marker=marker,
        name="geometric mean",
        row=1,
        col=1,
    )
    percentiles = [each.ninetieth_percentile for each in summaries]
    marker = {"color": colours, "size": 8, "symbol": "diamond-open"}
    figure.add_scatter(
        x=percentiles,
        y=policies,
        mode="markers",
        marker=marker,
        name="90th percentile",
        row=1,
        col=1,
    )
    worst = [each.worst_relative for each in summaries]
    names = [f"{each.worst_relative:.2g} {shorten(each.worst_recording, 26)}" for each in summaries]
    figure.add_bar(
        x=worst,
        y=policies,
        orientation="h",
        marker={"color": colours},
        text=names,
        showlegend=False,
        row=1,
        col=2,
    )
    figure.update_xaxes(title="Cost multiple", **axis_scale([*means, *percentiles]), row=1, col=1)
    figure.update_xaxes(title="Worst recording, over random with cap", row=1, col=2)
    figure.update_yaxes(autorange="reversed")
    first, counts = summaries[0], [each.num_searches for each in summaries]
    numbers = " to ".join(str(each) for each in sorted({min(counts), max(counts)}))
    description = (
        f"{first.policy} costs {first.geometric_mean:.3g} best trainings, the least of those"
        f" compared. {counted(first.num_recordings, 'recording')}, searches a policy: {numbers},"
        f" {counted(first.num_workers, 'worker')}. Left: device seconds until a trial within 10% of"
        " the best recorded time to target has reached it, over that time. Right: the recording"
        " where the geometric mean is worst relative to random search with cap."
    )
    return Chart(
        name=name, description=description, figure=figure, height=160 + 40 * len(summaries)
    )


def regret_chart(summaries: Sequence[PolicySummary], name: str) -> Chart:
    """How far the best trial so far is from the best recorded one, over what has been spent."""
    figure = go.Figure()
    for each in summaries:
        regrets = [max(regret, _MIN_REGRET) for regret in each.regrets]
        figure.add_scatter(x=BUDGETS, y=regrets, name=each.policy, mode="lines")
    figure.update_xaxes(
        title="Device seconds spent, in best recorded times to target", **axis_scale(list(BUDGETS))
    )
    all_regrets = [max(regret, _MIN_REGRET) for each in summaries for regret in each.regrets]
    figure.update_yaxes(title="Regret of the best time so far", **axis_scale(all_regrets))
    description = (
        "Regret over budget: geometric mean over recordings and seeds of the best time to target so"
        " far over the best recorded one, less 1; before any trial has reached the target its time"
        " limit counts. A search ends within 10%, and the curve then stays."
    )
    return Chart(name=name, description=description, figure=figure, height=460)
