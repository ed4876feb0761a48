"""The charts of a study's report, as Plotly's figures.

Colours of text, grid and unmarked lines are the page's, which has a light and a dark theme. Plotly
reads texts as HTML, so texts of others are escaped here.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from autotune.effects import Effects, Interval
from autotune.measurement import Phase
from autotune.outcome import Outcome
from autotune.reporting.concluded_study import ConcludedStudy
from autotune.reporting.drawing import (
    BASELINE_COLOUR,
    PART_COLOURS,
    Chart,
    add_line,
    add_points,
    axis_scale,
    counted,
    finite,
    is_log,
    log_axis,
    metric_range,
    runs_chart,
    shorten,
    target_label,
)
from autotune.reporting.scores import describe_arm
from autotune.space import override_text

_MAX_CURVE_POINTS = 20_000
"""Points of all learning curves together, so that the page stays small."""
_MAX_PARAMETERS = 16
_MAX_EFFECTS = 12
_PHASE_COLOURS = {
    "prepare": "#E69F00",
    "train": "#009E73",
    "evaluate": "#56B4E9",
    "build": "#999999",
}
_SHADES = ("#0072B2", "#56B4E9", "#AA9F80", "#E69F00", "#D55E00", "#9AA4AE")
"""Colours of fifths of the trials that reached the target, the best first, and of those that did
not; they show on white and on black."""


def study_charts(study: ConcludedStudy, effects: Sequence[Effects]) -> dict[str, Chart]:
    """The charts of a concluded study, by name; those that would be empty are left out."""
    found = (
        _confirmation_chart(study),
        _search_chart(study),
        _curves_chart(study),
        _parameters_chart(study),
        _importance_chart(effects),
        *_effect_charts(effects),
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
    words = "; ".join(f"{arm.label} {describe_arm(arm)}" for arm in arms)
    description = f"Runs on fresh seeds of each configuration: {words}."
    return runs_chart("confirmation", arms, [BASELINE_COLOUR, *colours[1:]], description)


def _search_chart(study: ConcludedStudy) -> Chart | None:
    """The end of each trial over the time of the search, with the best score so far."""
    trials = study.trials
    if trials.empty:
        return None
    seconds, known = trials.stopped_at - trials.started_at.min(), [*trials.bound.dropna()]
    floor = min(known) * 0.8 if is_log(known) else min(0.0, *known) if known else 0.0
    figure, ordered = go.Figure(), study.reached.sort_values("stopped_at")
    best = ordered.score.cummin()
    if len(best):
        ends, scores = [*seconds[best.index], seconds.max()], [*best, best.iloc[-1]]
        add_line(figure, ends, scores, name="best so far", line={"shape": "hv", "width": 2.5})
    if study.recording.baseline in best.index:
        score = study.reached.score[study.recording.baseline]
        add_line(
            figure,
            [0.0, seconds.max()],
            [score] * 2,
            name="baseline",
            line={"dash": "dash", "width": 1.5},
        )
    heights, texts = (
        trials.bound.fillna(floor),
        {trial.Index: _told(study, trial) for trial in trials.itertuples()},
    )
    for outcome in Outcome:
        numbers = [*trials.index[trials.outcome == outcome]]
        if numbers:
            points = [
                (finite(seconds[number]), finite(heights[number]), texts[number])
                for number in numbers
            ]
            add_points(
                figure,
                points,
                trials=numbers,
                name=f"{outcome} ({len(points)})",
                marker=_marker(outcome),
            )
    figure.update_xaxes(title="Seconds since the search began", rangemode="tozero")
    figure.update_yaxes(title=escape(study.scale.axis_label), **axis_scale([*known, floor]))
    gain = [study.scale.format(score) for score in best.iloc[[0, -1]]] if len(best) else []
    told = f"The best score goes from {gain[0]} to {gain[1]}." if gain else "No trial has a score."
    description = f"{counted(len(trials), 'trial')} over the search. {told}"
    return Chart(name="search", description=description, figure=figure, height=460)


def _told(study: ConcludedStudy, trial: Any) -> str:
    least = "" if pd.notna(trial.score) else "at least "
    score = "no score" if pd.isna(trial.bound) else f"{least}{study.scale.format(trial.bound)}"
    return "<br>".join(
        [f"trial {trial.Index}, {trial.outcome}, {escape(score)}", *_wrapped(trial.overrides)]
    )


def _wrapped(text: str) -> list[str]:
    """A text in escaped lines, at most six of them."""
    return [escape(line) for line in textwrap.wrap(text, 60, max_lines=6, placeholder="…")]


def _curves_chart(study: ConcludedStudy) -> Chart | None:
    """Learning curves of all trials over seconds of preparing and training."""
    target, best = study.recording.target, study.best_trial
    curves = {
        trial.number: [
            pair
            for pair in zip(trial.train_seconds, trial.metrics, strict=True)
            if all(map(math.isfinite, pair))
        ]
        for trial in study.recording.trials
        if trial.number in study.trials.index
    }
    curves = {number: curve for number, curve in curves.items() if curve}
    if not curves:
        return None
    figure, most = go.Figure(), max(2, _MAX_CURVE_POINTS // len(curves))
    for outcome in reversed(Outcome):
        numbers = [
            number
            for number in curves
            if study.trials.outcome[number] == outcome and number != best
        ]
        if numbers:
            opacity = 0.35 if len(numbers) > 100 else 0.65
            _add_curves(
                figure,
                {number: every(curves[number], most) for number in numbers},
                f"{outcome} ({len(numbers)})",
                outcome,
                opacity,
            )
    if best in curves:
        name, outcome = f"trial {best}, the best", study.trials.outcome[best]
        _add_curves(figure, {best: every(curves[best], most)}, name, outcome, opacity=1, width=4)
    longest = max(curve[-1][0] for curve in curves.values())
    add_line(
        figure,
        [0.0, longest],
        [target.value] * 2,
        name=f"target {target.value:g}",
        line={"dash": "dash", "width": 1.5},
    )
    figure.update_xaxes(title="Seconds of preparing and training", rangemode="tozero")
    of_best = curves.get(-1 if best is None else best, [])
    low, high = metric_range(
        [metric for curve in curves.values() for _, metric in curve], target, of_best
    )
    margin = 0.03 * (high - low)
    figure.update_yaxes(title=escape(shorten(target.metric)), range=[low - margin, high + margin])
    description = (
        f"Learning curves of {counted(len(curves), 'trial')}: {target.metric} over seconds of"
        f" training, target {target_label(target)}."
    )
    return Chart(name="curves", description=description, figure=figure, height=460)


def _add_curves(
    figure: go.Figure,
    curves: Mapping[int, Sequence[tuple[float, float]]],
    name: str,
    outcome: Outcome,
    opacity: float,
    width: float = 1.4,
) -> None:
    """Curves as one line with gaps."""
    points = [
        (number, *map(finite, pair))
        for number, curve in curves.items()
        for pair in [*curve, (math.nan, math.nan)]
    ]
    trials, x, y = zip(*points, strict=True)
    colour = marker_colour(outcome)
    figure.add_scatter(
        x=x,
        y=y,
        customdata=trials,
        name=name,
        mode="lines+markers",
        line={"color": colour, "width": width},
        marker={"size": width + 1.6, "color": colour},
        opacity=opacity,
        hovertemplate="trial %{customdata}<br>%{x:.4g} s, %{y:.4g}<extra></extra>",
    )


def _importance_chart(effects: Sequence[Effects]) -> Chart | None:
    """Share of each parameter in the variance of time to target, steps to target and seconds a
    step.
    """
    if not effects:
        return None
    names = [effect.name for effect in effects[0].effects][:_MAX_PARAMETERS]
    rows = [
        {
            "part": escape(part.quantity),
            "parameter": escape(shorten(effect.name, 30)),
            **_estimate(effect.share),
        }
        for part in effects
        for effect in sorted(
            part.effects,
            key=lambda effect: names.index(effect.name) if effect.name in names else len(names),
        )[: len(names)]
    ]
    figure = px.bar(
        pd.DataFrame(rows, columns=["part", "parameter", *_ESTIMATE]),
        x="middle",
        y="parameter",
        color="part",
        error_x="above",
        error_x_minus="below",
        orientation="h",
        barmode="group",
        color_discrete_sequence=PART_COLOURS,
    )
    figure.update_traces(hovertemplate="%{y}: %{x:.0%}<extra></extra>")
    figure.update_layout(bargap=0.25, legend_title="", margin={"t": 12})
    figure.update_yaxes(autorange="reversed", showgrid=False, title="")
    figure.update_xaxes(
        title="Share of the variance over the search space", tickformat=".0%", rangemode="tozero"
    )
    words = ", ".join(
        f"{effect.name} {effect.share.middle:.0%}" for effect in effects[0].effects[:4]
    )
    description = f"Importance of each parameter; of {effects[0].quantity}: {words}."
    return Chart(
        name="importance", description=description, figure=figure, height=130 + 44 * len(names)
    )


def _effect_charts(effects: Sequence[Effects]) -> list[Chart]:
    """A chart for each of the most important parameters: what its values do to steps to target
    and to seconds a step.
    """
    if not effects:
        return []
    names = [effect.name for effect in effects[0].effects if effect.share.high >= 0.01][
        :_MAX_EFFECTS
    ]
    of_names = {
        name: [
            (part.quantity, effect)
            for part in effects[1:]
            for effect in part.effects
            if effect.name == name
        ]
        for name in names
    }
    factors = [
        factor for found in of_names.values() for _, effect in found for factor in effect.factors
    ]
    low, high = (
        min((factor.low for factor in factors), default=1.0),
        max((factor.high for factor in factors), default=1.0),
    )
    charts = []
    for index, (name, found) in enumerate(of_names.items()):
        values = found[0][1].values
        is_number = all(type(value) in (int, float) for value in values)
        rows = [
            {
                "part": escape(quantity),
                "value": value if is_number else escape(shorten(_text(value), 16)),
                **_estimate(factor),
            }
            for quantity, effect in found
            for value, factor in zip(values, effect.factors, strict=True)
        ]
        figure = (px.line if is_number else px.scatter)(
            pd.DataFrame(rows),
            x="value",
            y="middle",
            color="part",
            error_y="above",
            error_y_minus="below",
            color_discrete_sequence=PART_COLOURS[1:],
            **({"markers": True} if is_number else {}),
        )
        figure.update_traces(
            showlegend=False,
            marker_size=8,
            hovertemplate="%{x}: %{y:.3g} times the average<extra></extra>",
        )
        figure.update_xaxes(title="", **(axis_scale(values) if is_number else {"type": "category"}))
        figure.update_yaxes(
            title="times the average",
            **log_axis([low, high]),
            range=[math.log10(low) - 0.05, math.log10(high) + 0.05],
        )
        figure.update_layout(title={"text": escape(shorten(name, 38))}, margin={"t": 34})
        description = (
            f"What each value of {name} does to"
            f" {' and to '.join(quantity for quantity, _ in found)}."
        )
        charts.append(
            Chart(name=f"effect-{index}", description=description, figure=figure, height=260)
        )
    return charts


_ESTIMATE = ("middle", "above", "below")


def _estimate(interval: Interval) -> dict[str, float | None]:
    numbers = (interval.middle, interval.high - interval.middle, interval.middle - interval.low)
    return dict(zip(_ESTIMATE, map(finite, numbers), strict=True))


def _parameters_chart(study: ConcludedStudy) -> Chart | None:
    """Parallel coordinates: an axis for each parameter that was varied, with its values in
    order, and a line for each trial.
    """
    keys = [key for key in study.parameters if study.parameters[key].nunique() > 1][
        :_MAX_PARAMETERS
    ]
    if not keys:
        return None
    heights = {}
    figure, labels = go.Figure(), []
    for column, key in enumerate(keys):
        options = sorted(
            set(study.parameters[key]), key=lambda text: (text != "", _number(text), text)
        )
        heights[key] = {text: index / (len(options) - 1) for index, text in enumerate(options)}
        ticks = [
            options[round(place)]
            for place in np.linspace(0, len(options) - 1, min(len(options), 10))
        ]
        labels += [
            (column, heights[key][text], escape(shorten(_shown(text), 14))) for text in ticks
        ]
    fifths = study.trials.score.rank(pct=True).mul(4.99).fillna(5).astype(int)
    for fifth in reversed(range(len(_SHADES))):  # the best are drawn last, on top
        of_fifth = study.trials[fifths == fifth]
        if of_fifth.empty:
            continue
        ends = dict.fromkeys(
            study.scale.format(score) for score in (of_fifth.score.min(), of_fifth.score.max())
        )
        rows = [
            (number, [heights[key][study.parameters.at[number, key]] for key in keys])
            for number in of_fifth.index
        ]
        figure.add_scatter(
            x=[*range(len(keys)), None] * len(rows),
            y=[height for _, row in rows for height in (*map(finite, row), None)],
            customdata=[number for number, _ in rows for _ in range(len(keys) + 1)],
            mode="lines",
            hovertemplate="trial %{customdata}<extra></extra>",
            name="no score" if fifth == 5 else escape(" to ".join(ends)),
            line={"color": _SHADES[fifth], "width": 1 if fifth == 5 else 2},
            opacity=0.4 if fifth == 5 else 0.85,
        )
    x, y, texts = zip(*labels, strict=True)
    figure.add_scatter(
        x=x,
        y=y,
        text=texts,
        mode="text",
        textposition="middle right",
        showlegend=False,
        hoverinfo="skip",
    )
    names = [escape(shorten(key.rsplit(".", 1)[-1], 16)) for key in keys]
    figure.update_xaxes(
        tickvals=[*range(len(keys))],
        ticktext=names,
        side="top",
        range=[-0.35, len(keys) - 0.3],
        zeroline=False,
    )
    figure.update_yaxes(visible=False, range=[-0.04, 1.04])
    description = (
        f"Values of {', '.join(keys)} in each trial; lines are coloured by {study.scale.quantity}."
    )
    return Chart(
        name="parameters",
        description=description,
        figure=figure,
        height=460,
        min_width=110 * len(keys),
    )


def _shown(text: str) -> str:
    return f"{_number(text):.4g}" if math.isfinite(_number(text)) else text or "not set"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.inf


def _front_chart(front: pd.DataFrame | None) -> Chart | None:
    """The Pareto front by its first two objectives, from columns of trial number, scores,
    preferences and overrides.
    """
    if front is None or len(front.columns) < 5:
        return None
    objectives, figure = [*front.columns[1:-2]], go.Figure()
    scores = front[objectives[:2]].astype(float).sort_values(objectives[0])
    x, y = ([*scores[name]] for name in objectives[:2])
    if len(objectives) == 2:
        add_line(figure, x, y, name="front", line={"shape": "hv", "width": 1.5})
    words = [
        "<br>".join(
            [f"trial {escape(row.iloc[0])}", *_wrapped(row.iloc[-2]), *_wrapped(row.iloc[-1])]
        )
        for _, row in front.iterrows()
    ]
    points = [(*pair, words[index]) for index, *pair in scores.itertuples()]
    add_points(
        figure,
        points,
        name="trials that no other beats",
        marker=_marker(Outcome.REACHED) | {"size": 11},
    )
    figure.update_xaxes(title=escape(shorten(objectives[0])), **axis_scale(x))
    figure.update_yaxes(title=escape(shorten(objectives[1])), **axis_scale(y))
    description = (
        f"Pareto front of {counted(len(front), 'trial')} by {' and '.join(objectives[:2])}."
    )
    return Chart(name="front", description=description, figure=figure)


def _phases_chart(study: ConcludedStudy) -> Chart | None:
    """Seconds of each phase, of a training of the baseline and one of the best configuration."""
    columns = {
        f"{phase}_seconds": str(phase)
        for phase in (Phase.PREPARE, Phase.TRAIN, Phase.EVALUATE, Phase.BUILD)
    }
    seconds = (
        study.trials.loc[[*study.sides.values()], [*columns]]
        .rename(columns=columns)
        .set_index(pd.Index(study.sides))
    )
    seconds = seconds.loc[:, seconds.fillna(0.0).any()]
    if seconds.empty:
        return None
    figure = px.bar(seconds, orientation="h", color_discrete_map=_PHASE_COLOURS)
    figure.update_layout(legend_title="", margin={"t": 12})
    figure.update_yaxes(autorange="reversed", showgrid=False, title="")
    figure.update_xaxes(title="Seconds", rangemode="tozero")
    words = "; ".join(
        f"{label}: " + ", ".join(f"{phase} {number:.3g} s" for phase, number in row.items())
        for label, row in seconds.iterrows()
    )
    return Chart(
        name="phases", description=f"Seconds in each phase. {words}.", figure=figure, height=220
    )


def every(points: Sequence[tuple[float, float]], most: int) -> Sequence[tuple[float, float]]:
    """At most ``most`` points of a curve, evenly over its length, with the first and the last."""
    return (
        points
        if len(points) <= most
        else [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]
    )


def _marker(outcome: Outcome) -> dict[str, Any]:
    colour = marker_colour(outcome)
    return {
        "symbol": outcome.traits.symbol,
        "color": colour,
        "size": 9,
        "line": {"width": 1.5, "color": colour},
    }


def marker_colour(outcome: Outcome) -> str:
    """The outcome's colour.

    What is black in figures on white paper is a tone that shows on a dark page, too.
    """
    return "#8C6BB1" if outcome.traits.colour == "#000000" else outcome.traits.colour


def _text(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else f"{value:.3g}"
        if isinstance(value, float)
        else override_text(value)
    )
