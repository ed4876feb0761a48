"""What all charts share: the record of a chart, the files it is written to, and labels.

Plotly reads texts as HTML, so texts of others are escaped where a chart is made.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from autotune.files import make_folder, replace_file
from autotune.measurement import Target
from autotune.reporting.scores import ConfigurationScores
from autotune.space import override_text

BASELINE_COLOUR = "#666666"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart: ``description`` says in words what it shows, for those who do not see it."""

    name: str
    description: str
    figure: go.Figure
    height: int = 400
    """Height in CSS pixels."""


def write_charts(folder: Path, charts: Iterable[Chart]) -> list[Path]:
    """Write each chart to ``NAME.html`` in ``folder``, made if missing, and return the paths.

    The pages load Plotly's library from its server, as those of ``mlflow.log_figure`` do.
    """
    make_folder(folder)
    paths = []
    for chart in charts:
        figure = go.Figure(chart.figure).update_layout(
            template="plotly_white", colorway=["#333333"], height=chart.height
        )
        drawn = figure.to_html(
            include_plotlyjs="cdn", full_html=False, config={"displayModeBar": False}
        )
        words = escape(chart.description)
        page = (
            '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>'
            f'{escape(chart.name)}</title><p style="font:14px sans-serif;margin:8px">{words}</p>'
            f"{drawn}</html>\n"
        )
        paths.append(folder / f"{chart.name}.html")
        replace_file(paths[-1], page.encode(errors="replace"))
    return paths


def runs_chart(
    name: str, arms: Sequence[ConfigurationScores], colours: Sequence[str], description: str
) -> Chart:
    """A row for each configuration: its runs, and a bar up to what a success costs."""
    scale, labels = arms[0].scale, [escape(shorten(arm.label, 24)) for arm in arms]
    runs = pd.DataFrame(
        [
            (label, score, "a run that reached the target" if reached else "a run that fell short")
            for label, arm in zip(labels, arms, strict=True)
            for score, reached in arm.scored_runs
        ],
        columns=["arm", "score", "run"],
    )
    figure = px.strip(
        runs,
        x="score",
        y="arm",
        color="run",
        orientation="h",
        stripmode="overlay",
        color_discrete_sequence=["#777777", "#D55E00"],
    )
    figure.update_traces(jitter=1, marker={"size": 8}, hovertemplate="%{y}: %{x:.4g}")
    figure.add_bar(
        x=[arm.expected_score if arm.num_reached else arm.mean_spent for arm in arms],
        y=labels,
        orientation="h",
        marker={"color": [*colours], "opacity": 0.55},
        name="what one success costs",
        hoverinfo="skip",
    )
    figure.update_xaxes(title=escape(scale.axis_label), rangemode="tozero")
    figure.update_yaxes(
        title="", categoryarray=labels, categoryorder="array", autorange="reversed", showgrid=False
    )
    return Chart(name=name, description=description, figure=figure, height=150 + 56 * len(arms))


def axis_scale(values: Sequence[float]) -> dict[str, Any]:
    """The properties of an axis for values: logarithmic if all are positive and the largest is over
    30 times the smallest, with plain numbers at its ticks.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0 or max(finite) <= 30 * min(finite):
        return {"type": "linear"}
    return {"type": "log", "tickformat": ".4~g", "nticks": 6}


def target_label(target: Target) -> str:
    """A target as pages show it, such as ``accuracy ≥ 0.94``."""
    return str(target).replace(">=", "≥").replace("<=", "≤")


def value_text(value: Any) -> str:
    """A parameter's value as a page shows it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else override_text(value)


def shorten(name: str, max_characters: int = 56) -> str:
    """A name on one line, with an ellipsis for the middle if it is longer than
    ``max_characters``.
    """
    line = " ".join(name.split())
    if len(line) <= max_characters:
        return line
    return f"{line[: max_characters // 2 - 1]}…{line[-max_characters // 2 :]}"
