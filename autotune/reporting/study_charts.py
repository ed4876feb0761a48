"""The charts of a study's report, as Plotly's figures.

Colours of text, grid and unmarked lines are the page's, which has a light and a dark theme. Plotly
reads texts as HTML, so texts of others are escaped here.
"""

import math
import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from autotune.measurement import Phase
from autotune.outcome import Outcome
from autotune.reporting.concluded_study import ConcludedStudy
from autotune.reporting.drawing import (
    BASELINE_COLOUR,
    Chart,
    axis_scale,
    log_axis,
    runs_chart,
    shorten,
    target_label,
    value_text,
)
from autotune.reporting.scores import counted, describe_scores
from autotune.search.importances import Effects

_MAX_CURVE_POINTS = 20_000
"""Points of all learning curves together, so that the page stays small."""
# Source of the colours: Okabe and Ito, "Color Universal Design" (jfly.uni-koeln.de/color). Black,
# which a dark page does not show, is replaced.
COLOURS = {
    str(outcome): "#8C6BB1" if outcome.traits.colour == "#000000" else outcome.traits.colour
    for outcome in Outcome
}
_PART_COLOURS = ["#009E73", "#0072B2", "#E69F00"]
"""Colours of the time to target, the steps to target and the seconds a step."""
_PHASE_COLOURS = {
    "prepare": "#E69F00",
    "train": "#009E73",
    "evaluate": "#56B4E9",
    "build": "#999999",
}


def study_charts(study: ConcludedStudy, effects: Effects | None) -> dict[str, Chart]:
    """The charts of a concluded study, by name; those that would be empty are left out."""
    found = (
        _confirmation_chart(study),
        _search_chart(study),
        _curves_chart(study),
        *(_effect_charts(effects) if effects is not None else ()),
        _phases_chart(study),
        _front_chart(study.front),
    )
    return {chart.name: chart for chart in found if chart is not None}


def _confirmation_chart(study: ConcludedStudy) -> Chart | None:
    """Runs on fresh seeds of each configuration, and a bar up to what a success costs."""
    arms = [scores for scores, _ in study.arms if scores.scored_runs]
    if not arms:
        return None
    colours = ["#009E73" if arm is study.best_arm else "#56B4E9" for arm in arms]
    words = "; ".join(f"{arm.label} {describe_scores(arm)}" for arm in arms)
    description = f"Runs on fresh seeds of each configuration: {words}."
    return runs_chart("confirmation", arms, [BASELINE_COLOUR, *colours[1:]], description)


def _search_chart(study: ConcludedStudy) -> Chart | None:
    """The end of each trial over the time of the search, with the best score so far."""
    trials, scale = study.trials, study.scale
    if trials.empty:
        return None
    known = trials.bound.dropna()
    axis = axis_scale(known)
    floor = 0.8 * known.min() if axis["type"] == "log" else min(0.0, *known, 0.0)
    ends = trials.stopped_at - trials.started_at.min()
    texts = [
        f"trial {trial.Index}, {trial.outcome}, {escape(_bound(study, trial))}"
        f"<br>{_wrapped(trial.overrides)}"
        for trial in trials.itertuples()
    ]
    figure = px.scatter(
        trials.reset_index().assign(
            seconds=[*ends], height=[*trials.bound.fillna(floor)], text=texts
        ),
        x="seconds",
        y="height",
        color="outcome",
        symbol="outcome",
        hover_name="text",
        custom_data="trial",
        color_discrete_map=COLOURS,
        symbol_map={str(outcome): outcome.traits.symbol for outcome in Outcome},
        category_orders={"outcome": [*COLOURS]},
        render_mode="svg",
    )
    figure.update_traces(marker={"size": 9}, hovertemplate="%{hovertext}<extra></extra>")
    scores = study.reached.sort_values("stopped_at").score
    best = scores.cummin()
    if len(best):
        figure.add_scatter(
            x=[*ends[best.index], ends.max()],
            y=[*best, best.iloc[-1]],
            name="best so far",
            mode="lines",
            line={"shape": "hv", "width": 2.5},
            hoverinfo="skip",
        )
    figure.update_xaxes(title="Seconds since the search began", rangemode="tozero")
    figure.update_yaxes(title=escape(scale.axis_label), **axis)
    gain = "No trial has a score."
    if len(best):
        first, last = scale.format(best.iloc[0]), scale.format(best.iloc[-1])
        gain = f"The best score goes from {first} to {last}."
    description = f"{counted(len(trials), 'trial')} over the search. {gain}"
    return Chart(name="search", description=description, figure=figure, height=460)


def _bound(study: ConcludedStudy, trial: Any) -> str:
    if pd.isna(trial.bound):
        return "no score"
    return f"{'at least ' if pd.isna(trial.score) else ''}{study.scale.format(trial.bound)}"


def _wrapped(text: str) -> str:
    """A text in escaped lines, at most six of them."""
    lines = textwrap.wrap(text, 60, max_lines=6, placeholder="…")
    return "<br>".join(map(escape, lines))


def _curves_chart(study: ConcludedStudy) -> Chart | None:
    """Learning curves of all trials over seconds of preparing and training."""
    target, best = study.recording.target, study.best_trial
    curves = pd.DataFrame(
        [
            (trial.number, seconds, metric)
            for trial in study.recording.trials
            for seconds, metric in zip(trial.train_seconds, trial.metrics, strict=True)
            if trial.number in study.trials.index and math.isfinite(seconds + metric)
        ],
        columns=["trial", "seconds", "metric"],
    )
    if curves.empty:
        return None
    shown = curves.metric, [target.value, *curves.metric[curves.trial == best]]
    num_curves, stride = curves.trial.nunique(), math.ceil(len(curves) / _MAX_CURVE_POINTS)
    is_kept = (curves.groupby("trial").cumcount() % stride == 0) | ~curves.trial.duplicated("last")
    curves = curves[is_kept]
    curves = curves.assign(group=curves.trial.map(study.trials.outcome))
    colours, best_name = dict(reversed(COLOURS.items())), f"trial {best}, the best"
    if best in study.trials.index:
        colours[best_name] = COLOURS[study.trials.outcome[best]]
        curves.loc[curves.trial == best, "group"] = best_name
    # the trials of one outcome are one trace, with a gap after each trial
    gaps = curves.drop_duplicates("trial", keep="last").assign(metric=math.nan)
    figure = px.line(
        pd.concat([curves, gaps]).sort_values("trial", kind="stable"),
        x="seconds",
        y="metric",
        color="group",
        custom_data="trial",
        color_discrete_map=colours,
        category_orders={"group": [*colours]},
        render_mode="svg",
    )
    figure.update_traces(
        mode="lines+markers",
        marker={"size": 3},
        line={"width": 1.4},
        opacity=0.6,
        hovertemplate="trial %{customdata}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
    )
    figure.update_traces({"line.width": 4, "opacity": 1}, selector={"name": best_name})
    figure.add_hline(
        y=target.value,
        line={"dash": "dash", "width": 1.5, "color": "#888888"},
        annotation={"text": f"target {target.value:g}", "x": 0, "xanchor": "left"},
    )
    figure.update_layout(legend_traceorder="reversed")
    figure.update_xaxes(title="Seconds of preparing and training", rangemode="tozero")
    figure.update_yaxes(title=escape(shorten(target.metric)), range=_metric_range(*shown))
    description = (
        f"Learning curves of {counted(num_curves, 'trial')}: {target.metric} over seconds of"
        f" training, target {target_label(target)}."
    )
    return Chart(name="curves", description=description, figure=figure, height=460)


def _metric_range(metrics: Sequence[float], always_shown: Sequence[float]) -> list[float]:
    """The range of the metric to show: all values, unless a few diverging trials would flatten
    the curves of all others.
    """
    metrics = [*metrics, *always_shown]
    low, high = np.quantile(metrics, (0.05, 0.95))
    low, high = min(low, *always_shown), max(high, *always_shown)
    spread = high - low
    low, high = max(low - 2 * spread, min(metrics)), min(high + 2 * spread, max(metrics))
    margin = 0.03 * (high - low) or 0.1 * abs(high) or 1.0
    return [low - margin, high + margin]


def _effect_charts(effects: Effects) -> list[Chart]:
    """The share of each parameter in the variance of time to target, steps to target and seconds a
    step; then for each of the most important parameters what its values do to the last two.
    """
    shares, factors = _labelled(effects.shares), _labelled(effects.factors)
    whole = shares[shares.quantity == shares.quantity[0]]
    names = [*whole.label[:16]]
    figure = px.bar(
        shares[shares.label.isin(names)],
        x="middle",
        y="label",
        color="quantity",
        error_x="above",
        error_x_minus="below",
        orientation="h",
        barmode="group",
        color_discrete_sequence=_PART_COLOURS,
    )
    figure.update_traces(hovertemplate="%{y}: %{x:.0%}<extra></extra>")
    figure.update_layout(bargap=0.25)
    figure.update_yaxes(autorange="reversed", showgrid=False, title="")
    figure.update_xaxes(title="Share of the variance", tickformat=".0%", rangemode="tozero")
    words = ", ".join(f"{row.parameter} {row.middle:.0%}" for row in whole.head(4).itertuples())
    description = f"Importance of each parameter; of {effects.shares.quantity[0]}: {words}."
    charts = [
        Chart(
            name="importance",
            description=description,
            figure=figure,
            height=130 + 44 * len(names),
        )
    ]
    matters = whole[whole.high >= 0.01].head(12)
    factors = factors[
        (factors.quantity != whole.quantity[0]) & factors.parameter.isin(matters.parameter)
    ]
    low, high = factors.low.min() / 1.1, factors.high.max() * 1.1
    for index, row in enumerate(matters.itertuples()):
        figure = _effect_figure(factors[factors.parameter == row.parameter])
        figure.update_yaxes(title="times the average", **log_axis(low, high))
        figure.update_yaxes(range=[math.log10(low), math.log10(high)])
        figure.update_layout(title={"text": escape(shorten(row.parameter, 38))})
        description = f"What each value of {row.parameter} does to steps and to seconds a step."
        charts.append(
            Chart(name=f"effect-{index}", description=description, figure=figure, height=260)
        )
    return charts


def _labelled(estimates: pd.DataFrame) -> pd.DataFrame:
    """Estimates with whiskers, and texts as Plotly shows them."""
    return estimates.assign(
        above=estimates.high - estimates.middle,
        below=estimates.middle - estimates.low,
        quantity=estimates.quantity.map(escape),
        label=["/<br>".join(map(escape, name.rsplit("/", 1))) for name in estimates.parameter],
    )


def _effect_figure(factors: pd.DataFrame) -> go.Figure:
    values = factors.value.drop_duplicates().tolist()
    is_number = all(type(value) in (int, float) for value in values)
    if is_number:
        factors = factors.astype({"value": float}).sort_values("value")
    else:
        factors = factors.assign(
            value=[escape(shorten(value_text(value), 16)) for value in factors.value]
        )
    figure = (px.line if is_number else px.scatter)(
        factors,
        x="value",
        y="middle",
        color="quantity",
        error_y="above",
        error_y_minus="below",
        color_discrete_sequence=_PART_COLOURS[1:],
    )
    figure.update_traces(
        showlegend=False,
        mode="lines+markers" if is_number else "markers",
        marker_size=8,
        hovertemplate="%{x}: %{y:.3g} times the average<extra></extra>",
    )
    axis = axis_scale(values) if is_number else {"type": "category"}
    if axis["type"] == "log" and all(float(value).is_integer() for value in values):
        axis |= {"tickvals": values, "ticktext": values}
    return figure.update_xaxes(title="", **axis)


def _front_chart(front: pd.DataFrame | None) -> Chart | None:
    """The Pareto front by its first two objectives, from columns of trial number, scores,
    preferences and overrides.
    """
    if front is None or len(front.columns) < 5:
        return None
    x, y = front.columns[1:3]
    front = front.sort_values(x)
    texts = [
        f"trial {trial}<br>{_wrapped(str(picked_by))}<br>{_wrapped(str(overrides))}"
        for trial, *_, picked_by, overrides in front.itertuples(index=False)
    ]
    figure = go.Figure()
    figure.add_scatter(
        x=front[x],
        y=front[y],
        mode="lines+markers" if len(front.columns) == 5 else "markers",
        line={"shape": "hv", "width": 1.5, "color": COLOURS["REACHED"]},
        marker={"size": 11, "color": COLOURS["REACHED"]},
        hovertext=texts,
        hoverinfo="text",
    )
    figure.update_xaxes(title=escape(shorten(x)), **axis_scale(front[x]))
    figure.update_yaxes(title=escape(shorten(y)), **axis_scale(front[y]))
    description = f"Pareto front of {counted(len(front), 'trial')} by {x} and {y}."
    return Chart(name="front", description=description, figure=figure)


def _phases_chart(study: ConcludedStudy) -> Chart | None:
    """Seconds of each phase, of a training of the baseline and one of the best configuration."""
    phases = (Phase.PREPARE, Phase.TRAIN, Phase.EVALUATE, Phase.BUILD)
    seconds = study.sides[[f"{phase}_seconds" for phase in phases]].set_axis(
        [*map(str, phases)], axis=1
    )
    seconds = seconds.loc[:, seconds.fillna(0.0).any()]
    if seconds.empty:
        return None
    figure = px.bar(seconds, orientation="h", color_discrete_map=_PHASE_COLOURS)
    figure.update_yaxes(autorange="reversed", showgrid=False, title="")
    figure.update_xaxes(title="Seconds", rangemode="tozero")
    description = f"Seconds in each phase of one training: {', '.join(seconds.index)}."
    return Chart(name="phases", description=description, figure=figure, height=220)
