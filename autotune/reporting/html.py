"""``report.html``: one page about a study, made from the files in its folder.

It needs neither a network nor anything beside it: Plotly's library is a part of the page, which is
most of its size.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from autotune.files import replace_file
from autotune.outcome import Outcome
from autotune.reporting import scores
from autotune.reporting.concluded_study import ConcludedStudy, read_concluded_study, readable
from autotune.reporting.drawing import (
    Chart,
    shorten,
    target_label,
    value_text,
    write_charts,
)
from autotune.reporting.study_charts import study_charts
from autotune.reporting.study_files import METRIC_COLUMN, REPORT
from autotune.search.importances import MIN_TRIALS, Importances, time_importances


def write_study_report(folder: Path, output: Path | None = None) -> Path:
    """Write the report of the study in a folder, and its charts as pages of their own in
    ``figures/``; return the report's path.

    Args:
        output: the file to write instead of ``report.html`` in the study's folder; then without the
            charts' pages.

    Raises:
        AutotuneError: the folder has no study that has ended, or one of its files cannot be read.
    """
    with readable(folder):
        study = read_concluded_study(folder)
        importances = time_importances(study.recording)
        charts = study_charts(study, importances)
        page = _page(study, importances, charts)
    if output is None:
        write_charts(folder / "figures", charts.values())
    path = output or folder / REPORT
    replace_file(path, page.encode(errors="replace"))
    return path


def _page(
    study: ConcludedStudy, importances: Importances | None, charts: Mapping[str, Chart]
) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"date": _date, "number": _number}
    target, trials = study.recording.target, study.trials
    measured = trials[trials.metric.notna()]
    return environment.get_template("report.html.jinja").render(
        study=study,
        summary=study.summary,
        scores=scores,
        value_text=value_text,
        scale=study.scale,
        trials=trials,
        target=target_label(target),
        metric=shorten(target.metric),
        closest=None
        if measured.empty
        else trials.loc[
            measured.apply(
                lambda row: target.shortfall(row.metric, study.measured(row)), axis="columns"
            ).idxmin()
        ],
        cost_seconds=study.summary.get("wall_seconds")
        or float(trials.stopped_at.max() - trials.started_at.min()),
        charts=charts,
        min_trials=MIN_TRIALS,
        metric_names=[name.removeprefix(METRIC_COLUMN) for name in study.metric_columns],
        importances=importances,
        ordered=pd.concat([study.reached, trials[trials.score.isna()]]).head(100),
        outcomes=_outcomes(study),
        errors=trials.error[trials.error != ""].value_counts().head(8),
        # Plotly writes its JSON without "<", so that it cannot end the element that holds it.
        figures={
            name: Markup(_json_of(chart.figure))  # noqa: S704
            for name, chart in charts.items()
        },
        plotly=Markup(get_plotlyjs()),  # noqa: S704  # the library's own file
    )


def _json_of(figure: go.Figure) -> str:
    figure.update_layout(template="none", legend_title="", margin={"t": 12})
    return str(pio.to_json(figure))


def _number(number: float) -> str:
    return "" if pd.isna(number) else f"{number:.4g}"


def _date(seconds: float) -> str:
    return (
        "" if pd.isna(seconds) else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S UTC}"
    )


def _outcomes(study: ConcludedStudy) -> dict[Outcome, pd.Series]:
    """Seconds that each trial spent, by how the trials ended, with those that ``trace.csv`` knows
    and that were tried again.
    """
    ended = study.trials[["outcome", "spent"]]
    if study.trace is not None:
        again = study.trace[
            study.trace.outcome.isin([Outcome.LOST, Outcome.CONTENDED])
            & ~study.trace.trial.isin(study.trials.index)
        ]
        ended = pd.concat([ended, again.rename(columns={"train_seconds": "spent"})])
    groups = dict(iter(ended.groupby("outcome").spent))
    return {outcome: groups[outcome] for outcome in Outcome if outcome in groups}
