"""The charts of a study's HTML report, as Plotly's figures.

Colours of text, grid and unmarked lines are the page's, which has a light and a dark theme. Plotly reads texts as HTML, so texts of
others are escaped here.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Any

import plotly.graph_objects as go

from autotune.effects import Effect, Effects, Interval
from autotune.outcome import Outcome
from autotune.reporting.concluded_study import ConcludedStudy, ConcludedTrial
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
    shorten,
    target_label,
)
from autotune.reporting.scores import ArmScores, describe_arm
from autotune.space import override_text

_MAX_CURVE_POINTS = 20_000
"""Points of all learning curves together, so that the page stays small."""
_MAX_PARAMETERS = 16
_MAX_EFFECTS = 12
_SHADES = ("#D55E00", "#E69F00", "#AA9F80", "#56B4E9", "#0072B2")
"""Colours of fifths of the trials that reached the target, the best first; they show on white and on black."""


def confirmation_chart(study: ConcludedStudy) -> Chart | None:
    """Runs on fresh seeds of each configuration, and a bar up to what a success costs."""
    arms = [scores for scores, _ in study.arms if scores.scored_runs]
    if not arms:
        return None
    rows = range(len(arms), 0, -1)
    figure = go.Figure()
    colours = [BASELINE_COLOUR if arm is arms[0] else "#009E73" if arm is study.best_arm else "#56B4E9" for arm in arms]
    lengths = [finite(_bar(arm)) for arm in arms]
    figure.add_bar(
        x=lengths,
        y=list(rows),
        orientation="h",
        marker={"color": colours, "opacity": 0.55},
        name="what one success costs",
        hoverinfo="skip",
    )
    for has_reached, symbol, name in (
        (True, "circle", "a run that reached the target"),
        (False, "arrow-right-open", "a run that fell short"),
    ):
        runs = [
            (finite(score), row + (index % 5 - 2) * 0.11, f"{escape(arm.label)}: {escape(study.scale.format(score))}")
            for row, arm in zip(rows, arms, strict=True)
            for index, (score, reached) in enumerate(arm.scored_runs)
            if reached is has_reached
        ]
        if runs:
            add_points(figure, runs, name=name, marker={"symbol": symbol, "size": 9, "line": {"width": 1}})
    figure.update_xaxes(title=escape(study.scale.axis_label), rangemode="tozero")
    figure.update_yaxes(tickvals=list(rows), ticktext=[escape(shorten(arm.label, 24)) for arm in arms], showgrid=False)
    words = "; ".join(f"{arm.label}: {describe_arm(arm)}" for arm in arms)
    return Chart(
        name="confirmation",
        description=f"Runs on fresh seeds of each configuration. {words}",
        figure=figure,
        height=150 + 56 * len(arms),
    )


def _bar(arm: ArmScores) -> float:
    expected, spent = arm.expected_score, arm.mean_spent
    return expected if expected is not None and math.isfinite(expected) else spent or 0.0


def search_chart(study: ConcludedStudy) -> Chart | None:
    """The end of each trial over the time of the search, with the best score so far."""
    if not study.trials:
        return None
    start = min(trial.started_at for trial in study.trials)
    bounds = {trial.number: study.bound(trial) for trial in study.trials}
    known = [bound for bound in bounds.values() if bound is not None]
    floor = min(known, default=1.0) * 0.8 if is_log(known) else min(0.0, *known) if known else 0.0
    figure = go.Figure()
    ordered = sorted(study.reached, key=lambda trial: trial.stopped_at)
    best = list(accumulate((trial.score or 0.0 for trial in ordered), min))
    if ordered:
        ends = [*(trial.stopped_at for trial in ordered), max(trial.stopped_at for trial in study.trials)]
        add_line(figure, [end - start for end in ends], [*best, best[-1]], name="best so far", line={"shape": "hv", "width": 2.5})
    baseline = next((trial for trial in study.trials if trial.number == study.recording.baseline), None)
    if baseline is not None and baseline.score is not None:
        span = [0.0, max(trial.stopped_at for trial in study.trials) - start]
        add_line(figure, span, [baseline.score] * 2, name="baseline", line={"dash": "dash", "width": 1.5})
    for outcome in Outcome:
        trials = [trial for trial in study.trials if trial.outcome is outcome]
        heights = [floor if (bound := bounds[trial.number]) is None else bound for trial in trials]
        points = [
            (finite(trial.stopped_at - start), finite(height), _told(study, trial)) for trial, height in zip(trials, heights, strict=True)
        ]
        if points:
            name, numbers = f"{outcome} ({len(points)})", [trial.number for trial in trials]
            add_points(figure, points, trials=numbers, name=name, marker=_marker(outcome))
    figure.update_xaxes(title="Seconds since the search began", rangemode="tozero")
    figure.update_yaxes(title=escape(study.scale.axis_label), **axis_scale([*known, floor]))
    counts = ", ".join(f"{count} {outcome}" for outcome, count in Counter(trial.outcome for trial in study.trials).most_common())
    span_of_scores = [study.scale.format(score) for score in best]
    gain = f"The best score goes from {span_of_scores[0]} to {span_of_scores[-1]}." if best else "No trial has a score."
    description = f"{counted(len(study.trials), 'trial')} over the search. {gain} Outcomes: {counts}."
    return Chart(name="search", description=description, figure=figure, height=460)


def _told(study: ConcludedStudy, trial: ConcludedTrial) -> str:
    bound = study.bound(trial)
    score = "no score" if bound is None else f"{'' if trial.score is not None else 'at least '}{study.scale.format(bound)}"
    return "<br>".join([f"trial {trial.number}, {trial.outcome}, {escape(score)}", *_wrapped(trial.overrides)])


def _wrapped(text: str, width: int = 60, most: int = 6) -> list[str]:
    """A text in escaped lines of ``width`` characters, at most ``most`` of them."""
    text = shorten(text, width * most)
    return [escape(text[start : start + width]) for start in range(0, len(text), width)]


def curves_chart(study: ConcludedStudy) -> Chart | None:
    """Learning curves of all trials over seconds of preparing and training."""
    target, outcomes = study.recording.target, {trial.number: trial.outcome for trial in study.trials}
    curves = {
        trial.number: [pair for pair in zip(trial.train_seconds, trial.metrics, strict=True) if all(map(math.isfinite, pair))]
        for trial in study.recording.trials
        if trial.number in outcomes
    }
    curves = {number: curve for number, curve in curves.items() if curve}
    if not curves:
        return None
    best = study.best_trial
    low, high = metric_range(
        [metric for curve in curves.values() for _, metric in curve], target, curves.get(-1 if best is None else best, [])
    )
    most, figure = max(2, _MAX_CURVE_POINTS // len(curves)), go.Figure()
    for outcome in reversed(Outcome):
        numbers = [number for number in curves if outcomes[number] is outcome and number != best]
        if numbers:
            _add_curves(figure, {number: every(curves[number], most) for number in numbers}, f"{outcome} ({len(numbers)})", outcome)
    if best in curves:
        _add_curves(figure, {best: every(curves[best], most)}, f"trial {best}, the best", outcomes[best], width=4)
    longest = max(curve[-1][0] for curve in curves.values())
    add_line(figure, [0.0, longest], [target.value] * 2, name=f"target {target.value:g}", line={"dash": "dash", "width": 1.5})
    figure.update_xaxes(title="Seconds of preparing and training", rangemode="tozero")
    margin = 0.03 * (high - low)
    figure.update_yaxes(title=escape(shorten(target.metric)), range=[low - margin, high + margin])
    description = (
        f"Learning curves of {counted(len(curves), 'trial')}: {target.metric} over seconds of training, target {target_label(target)}."
    )
    return Chart(name="curves", description=description, figure=figure, height=460)


def _add_curves(
    figure: go.Figure, curves: Mapping[int, Sequence[tuple[float, float]]], name: str, outcome: Outcome, width: float = 1.4
) -> None:
    """Curves as one line with gaps."""
    x: list[float | None] = []
    y: list[float | None] = []
    trials: list[int | None] = []
    for number, curve in curves.items():
        x += [*(finite(seconds) for seconds, _ in curve), None]
        y += [*(finite(metric) for _, metric in curve), None]
        trials += [*([number] * len(curve)), None]
    figure.add_scatter(
        x=x, y=y, customdata=trials, name=name, mode="lines+markers", line={"color": marker_colour(outcome), "width": width},
        marker={"size": width + 1.6, "color": marker_colour(outcome)}, opacity=1 if width > 2 else 0.35 if len(curves) > 100 else 0.65,
        hovertemplate="trial %{customdata}<br>%{x:.4g} s, %{y:.4g}<extra></extra>",
    )  # fmt: skip


def importance_chart(effects: Sequence[Effects]) -> Chart | None:
    """Share of each parameter in the variance of time to target, steps to target and seconds a step."""
    if not effects:
        return None
    names = [effect.name for effect in effects[0].effects][:_MAX_PARAMETERS]
    figure = go.Figure()
    for part, colour in zip(effects, PART_COLOURS, strict=False):
        shares = {effect.name: effect.share for effect in part.effects}
        found = [shares[name] for name in names]
        figure.add_bar(
            x=[finite(share.middle) for share in found], y=[escape(shorten(name, 30)) for name in names], orientation="h",
            name=escape(part.quantity), marker={"color": colour}, error_x=_error_bars(found),
            hovertemplate="%{y}: %{x:.0%}<extra></extra>",
        )  # fmt: skip
    figure.update_layout(barmode="group", bargap=0.25)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(title="Share of the variance over the search space", tickformat=".0%", rangemode="tozero")
    words = "; ".join(
        f"{part.quantity}: " + ", ".join(f"{effect.name} {effect.share.middle:.0%}" for effect in part.effects[:4]) for part in effects
    )
    return Chart(name="importance", description=f"Importance of each parameter. {words}.", figure=figure, height=130 + 44 * len(names))


def effect_charts(effects: Sequence[Effects]) -> list[Chart]:
    """A chart for each of the most important parameters: what its values do to steps to target and to seconds a step."""
    if not effects:
        return []
    _, *parts = effects
    names = [effect.name for effect in effects[0].effects if effect.share.high >= 0.01][:_MAX_EFFECTS]
    factors = [factor for part in parts for effect in part.effects if effect.name in names for factor in effect.factors]
    low, high = min((factor.low for factor in factors), default=1.0), max((factor.high for factor in factors), default=1.0)
    charts = []
    for index, name in enumerate(names):
        figure, words = go.Figure(), []
        for part, colour in zip(parts, PART_COLOURS[1:], strict=True):
            effect = next(effect for effect in part.effects if effect.name == name)
            is_number = _is_numeric(effect.values)
            values = effect.values if is_number else [escape(shorten(_text(value), 16)) for value in effect.values]
            figure.add_scatter(
                name=escape(part.quantity), x=values, y=[finite(factor.middle) for factor in effect.factors],
                error_y=_error_bars(effect.factors),
                mode="lines+markers" if is_number else "markers", line={"color": colour, "width": 2}, marker={"size": 8, "color": colour},
                hovertemplate="%{x}: %{y:.3g} times the average<extra></extra>", showlegend=False,
            )  # fmt: skip
            words.append(_effect_in_words(part.quantity, effect))
            figure.update_xaxes(**(axis_scale(effect.values) if is_number else {"type": "category"}))
        figure.update_yaxes(title="times the average", **log_axis([low, high]), range=[math.log10(low) - 0.05, math.log10(high) + 0.05])
        figure.update_layout(title={"text": escape(shorten(name, 38))}, margin={"t": 34})
        charts.append(Chart(name=f"effect-{index}", description=f"{name}. {'; '.join(words)}.", figure=figure, height=260))
    return charts


def _effect_in_words(quantity: str, effect: Effect) -> str:
    least = min(zip(effect.factors, effect.values, strict=True), key=lambda pair: pair[0].middle)
    most = max(zip(effect.factors, effect.values, strict=True), key=lambda pair: pair[0].middle)
    told = [f"{factor.middle:.2g} times the average at {_text(value)}" for factor, value in (least, most)]
    return f"{quantity} from {told[0]} to {told[1]}"


def parameters_chart(study: ConcludedStudy) -> Chart | None:
    """Parallel coordinates: an axis for each parameter that was varied, a line for each trial."""
    found = dict.fromkeys(key for trial in study.trials for key in trial.values)
    texts = {key: {trial.values[key] for trial in study.trials if key in trial.values} for key in found}
    keys = [key for key in found if len(texts[key]) > 1 or any(key not in trial.values for trial in study.trials)][:_MAX_PARAMETERS]
    if not keys:
        return None
    heights = {key: _heights(texts[key]) for key in keys}
    fifths = {trial.number: len(_SHADES) * rank // len(study.reached) for rank, trial in enumerate(study.reached)}
    figure = go.Figure()
    for fifth in (None, *reversed(range(len(_SHADES)))):
        trials = [trial for trial in study.trials if fifths.get(trial.number) == fifth]
        if not trials:
            continue
        scores = [study.scale.format(trial.score) for trial in study.reached if fifths[trial.number] == fifth and trial.score is not None]
        figure.add_scatter(
            x=[*range(len(keys)), None] * len(trials),
            y=[height for trial in trials for height in (*(heights[key].get(trial.values.get(key, ""), 0.0) for key in keys), None)],
            customdata=[number for trial in trials for number in (*[trial.number] * len(keys), None)],
            name="no score" if fifth is None else escape(" to ".join(dict.fromkeys((scores[0], scores[-1])))),
            mode="lines", line={"color": "#9AA4AE" if fifth is None else _SHADES[fifth], "width": 1 if fifth is None else 2},
            opacity=0.4 if fifth is None else 0.85, hovertemplate="trial %{customdata}<extra></extra>",
        )  # fmt: skip
    labels = [(column, height, text) for column, key in enumerate(keys) for height, text in _ticks(heights[key])]
    labels += [(column, 0.0, "not set") for column, key in enumerate(keys) if any(key not in trial.values for trial in study.trials)]
    figure.add_scatter(
        x=[x for x, _, _ in labels], y=[y for _, y, _ in labels], text=[escape(shorten(text, 14)) for _, _, text in labels], mode="text",
        textposition="middle right", showlegend=False, hoverinfo="skip",
    )  # fmt: skip
    names = [escape(shorten(key.rsplit(".", 1)[-1], 16)) for key in keys]
    figure.update_xaxes(tickvals=list(range(len(keys))), ticktext=names, side="top", range=[-0.35, len(keys) - 0.3], zeroline=False)
    figure.update_yaxes(visible=False, range=[-0.04, 1.04])
    description = f"Values of {', '.join(keys)} in each trial; lines are coloured by {study.scale.quantity}."
    return Chart(name="parameters", description=description, figure=figure, height=460, min_width=110 * len(keys))


def _heights(texts: Iterable[str]) -> dict[str, float]:
    """Height of each value between 0.1 and 1: numbers by value or its logarithm, other texts evenly; 0 is left to what is not set."""
    try:
        numbers = {text: float(text) for text in texts}
        if not all(map(math.isfinite, numbers.values())):
            raise ValueError
    except ValueError:
        ordered = sorted(texts)
        return {text: 0.1 + 0.9 * index / max(len(ordered) - 1, 1) for index, text in enumerate(ordered)}
    if is_log(numbers.values()):
        numbers = {text: math.log(number) for text, number in numbers.items()}
    low, high = min(numbers.values()), max(numbers.values())
    return {text: round(0.1 + 0.9 * (number - low) / (high - low or 1.0), 4) for text, number in numbers.items()}


def _ticks(heights: Mapping[str, float], gap: float = 0.09) -> list[tuple[float, str]]:
    """Heights and texts of values that leave room for each other, the ends among them."""
    ordered = sorted((height, text) for text, height in heights.items())
    ticks = [ordered[-1]]
    for height, text in ordered[:-1]:
        if ticks[0][0] - height >= gap and (len(ticks) == 1 or height - ticks[-1][0] >= gap):
            ticks.append((height, text))
    return [(height, _short_number(text)) for height, text in ticks]


def _short_number(text: str) -> str:
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text


def front_chart(objectives: Sequence[str], rows: Sequence[Sequence[str]]) -> Chart | None:
    """The Pareto front by its first two objectives, from rows of trial number, scores, preferences and overrides."""
    if len(objectives) < 2:
        return None
    figure = go.Figure()
    points = [
        (float(row[1]), float(row[2]), "<br>".join([f"trial {escape(row[0])}", *_wrapped(row[-2]), *_wrapped(row[-1])]))
        for row in sorted(rows, key=lambda row: float(row[1]))
    ]
    if len(objectives) == 2:
        add_line(figure, [x for x, _, _ in points], [y for _, y, _ in points], name="front", line={"shape": "hv", "width": 1.5})
    add_points(figure, points, name="trials that no other beats", marker=_marker(Outcome.REACHED) | {"size": 11})
    for update, name, values in (
        (figure.update_xaxes, objectives[0], [x for x, _, _ in points]),
        (figure.update_yaxes, objectives[1], [y for _, y, _ in points]),
    ):
        update(title=escape(shorten(name)), **axis_scale(values))
    description = f"Pareto front of {counted(len(rows), 'trial')} by {' and '.join(objectives[:2])}."
    return Chart(name="front", description=description, figure=figure)


def phases_chart(phases: Mapping[str, Mapping[str, float]]) -> Chart | None:
    """Seconds of each phase, for a few trials by their labels."""
    figure, labels = go.Figure(), list(phases)
    for phase, colour in (("prepare", "#E69F00"), ("train", "#009E73"), ("evaluate", "#56B4E9"), ("build", "#999999")):
        seconds = [phases[label].get(phase, 0.0) for label in labels]
        if any(seconds):
            figure.add_bar(
                x=[finite(number) for number in seconds], y=labels, orientation="h", name=phase, marker={"color": colour},
                hovertemplate=f"{phase}: %{{x:.3g}} s<extra></extra>",
            )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(title="Seconds", rangemode="tozero")
    words = "; ".join(f"{label}: " + ", ".join(f"{phase} {seconds:.3g} s" for phase, seconds in phases[label].items()) for label in labels)
    return Chart(name="phases", description=f"Seconds in each phase. {words}.", figure=figure, height=220) if figure.data else None


def every(points: Sequence[tuple[float, float]], most: int) -> Sequence[tuple[float, float]]:
    """At most ``most`` points of a curve, evenly over its length, with the first and the last."""
    return points if len(points) <= most else [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def _marker(outcome: Outcome) -> dict[str, Any]:
    return {
        "symbol": outcome.traits.symbol,
        "color": marker_colour(outcome),
        "size": 9,
        "line": {"width": 1.5, "color": marker_colour(outcome)},
    }


def marker_colour(outcome: Outcome) -> str:
    """The outcome's colour; what is black in figures on white paper is a tone that shows on a dark page, too."""
    return "#8C6BB1" if outcome.traits.colour == "#000000" else outcome.traits.colour


def _error_bars(intervals: Sequence[Interval]) -> dict[str, Any]:
    above = [finite(interval.high - interval.middle) for interval in intervals]
    below = [finite(interval.middle - interval.low) for interval in intervals]
    return {"type": "data", "array": above, "arrayminus": below, "thickness": 1.2, "width": 3}


def _is_numeric(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) for value in values)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.3g}" if isinstance(value, float) else override_text(value)
