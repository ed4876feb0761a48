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
    runs_chart,
    shorten,
    target_label,
)
from autotune.reporting.scores import counted, describe_scores
from autotune.search.importances import Importances

_MAX_CURVE_POINTS = 20_000
"""Points of all learning curves together, so that the page stays small."""
COLOURS = {str(outcome): outcome.traits.colour for outcome in Outcome}
_QUANTITY_COLOURS = ["#009E73", "#0072B2", "#E69F00"]
"""Colours of the time to target, the steps to target and the seconds a step."""
_PHASE_COLOURS = {
    "prepare": "#E69F00",
    "train": "#009E73",
    "evaluate": "#56B4E9",
    "build": "#999999",
}


def study_charts(study: ConcludedStudy, importances: Importances | None) -> dict[str, Chart]:
    """The charts of a concluded study, by name; those that would be empty are left out."""
    found = (
        _confirmation_chart(study),
        _search_chart(study),
        _curves_chart(study),
        None if importances is None else _importance_chart(importances),
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
    usual = [*always_shown, *np.quantile(metrics, (0.05, 0.95))]
    spread = max(usual) - min(usual)
    shown = np.clip(metrics, min(usual) - 2 * spread, max(usual) + 2 * spread)
    low, high = shown.min(), shown.max()
    margin = 0.03 * (high - low) or 0.1 * abs(high) or 1.0
    return [low - margin, high + margin]


def _importance_chart(importances: Importances) -> Chart:
    """The share of each parameter in the variance of time to target, steps to target and seconds a
    step.
    """
    shares = importances.shares.head(16)
    words = ", ".join(f"{name} {share:.0%}" for name, share in shares.iloc[:4, 0].items())
    description = f"Importance of each parameter; of {shares.columns[0]}: {words}."
    figure = px.bar(
        shares.rename(
            index=lambda name: "/<br>".join(map(escape, name.rsplit("/", 1))), columns=escape
        ),
        orientation="h",
        barmode="group",
        color_discrete_sequence=_QUANTITY_COLOURS,
    )
    figure.update_traces(hovertemplate="%{y}: %{x:.0%}<extra></extra>")
    figure.update_layout(bargap=0.25)
    figure.update_yaxes(autorange="reversed", showgrid=False, title="")
    figure.update_xaxes(title="Share of the variance", tickformat=".0%", rangemode="tozero")
    height = 130 + 44 * len(shares)
    return Chart(name="importance", description=description, figure=figure, height=height)


def _front_chart(front: pd.DataFrame | None) -> Chart | None:
    """The Pareto front by its first two objectives, from columns of trial number, scores,
    preferences and overrides.
    """
    if front is None:
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
