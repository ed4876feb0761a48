"""``report.html``: one page about a study, made from the files in its folder.

It needs neither a network nor anything beside it: Plotly's library is a part of the page, which is
most of its size.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from autotune.confirm.statistics import Claim
from autotune.files import replace_file
from autotune.outcome import Outcome
from autotune.reporting.concluded_study import ConcludedStudy, read_concluded_study, readable
from autotune.reporting.drawing import (
    Chart,
    counted,
    shorten,
    target_label,
    value_text,
    write_charts,
)
from autotune.reporting.failures import EndedTrial, gathered_failures
from autotune.reporting.scores import (
    describe_arm,
    describe_interval,
    describe_ratio,
    describe_reached,
    format_expected,
    format_seconds,
)
from autotune.reporting.study_charts import study_charts
from autotune.reporting.study_files import REPORT
from autotune.search.importances import MIN_TRIALS, Effects, time_effects

Rows = list[dict[str, Any]]
"""A table: its rows, each with its cells by column."""


def write_study_report(folder: Path, output: Path | None = None) -> Path:
    """Write the report of the study in a folder, and its charts as pages of their own in
    ``figures/``; return the report's path.

    Args:
        output: the file to write instead of ``report.html`` in the study's folder; then without the
            charts' pages.

    Raises:
        AutotuneError: the folder has no study that has ended, or one of its files cannot be read.
    """
    study = read_concluded_study(folder)
    with readable(folder):
        effects = time_effects(study.recording)
        charts = study_charts(study, effects)
        page = _page(study, effects, charts)
    if output is None:
        pages = [chart for name, chart in charts.items() if not name.startswith("effect-")]
        write_charts(folder / "figures", pages)
    path = output or folder / REPORT
    replace_file(path, page.encode(errors="replace"))
    return path


def _page(study: ConcludedStudy, effects: Effects | None, charts: Mapping[str, Chart]) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    ended = [
        EndedTrial({key: text for key, text in values.items() if text}, trial.outcome, trial.error)
        for trial, values in zip(
            study.trials.itertuples(), study.parameters.to_dict("records"), strict=True
        )
    ]
    headline, detail = _answer(study)
    return environment.get_template("report.html.jinja").render(
        study=study,
        target=target_label(study.recording.target),
        headline=headline,
        detail=detail,
        facts=_facts(study),
        failures=gathered_failures(ended, study.recording.space.choices),
        charts=charts,
        min_trials=MIN_TRIALS,
        num_evaluated=None if effects is None else effects.num_trials,
        tables=_tables(study),
        # Plotly writes its JSON without "<", so that it cannot end the element that holds it.
        figures={
            name: Markup(_json_of(chart.figure))  # noqa: S704
            for name, chart in charts.items()
        },
        plotly=Markup(get_plotlyjs()),  # noqa: S704  # the library's own file
    )


def _json_of(figure: go.Figure) -> str:
    margin = {"t": 34 if figure.layout.title.text else 12}
    return str(pio.to_json(figure.update_layout(template="none", legend_title="", margin=margin)))


def _answer(study: ConcludedStudy) -> tuple[str, str]:
    """What was found, in a headline and a sentence."""
    scale, best, speed_up = study.scale, study.best_arm, study.speed_up
    better, best_word = ("faster", "fastest") if scale.is_time else ("better", "best")
    if best is not None and speed_up is not None:
        headline = f"No configuration is shown to be {better} than the baseline"
        if speed_up.is_gain:
            bound = "" if speed_up.claim is Claim.MEASURED else f"{speed_up.claim} ".capitalize()
            than = "as fast as the baseline" if scale.is_time else f"less {scale.quantity}"
            headline = f"{bound}{speed_up.ratio:.3g} times {than}"
        pairs = f"n = {counted(speed_up.num_pairs, 'pair')} of runs on fresh seeds"
        detail = f"{scale.gain.capitalize()} {describe_ratio(speed_up)}, {pairs}"
        if not speed_up.is_resolved:
            interval = describe_interval(speed_up)
            detail += f"; {interval}, so the best one is not shown to be {better}"
        return headline, detail
    if study.arms and study.summary.get("trial") is not None:
        if best is None:
            return "Keep the baseline", "No other configuration was confirmed to be better."
        headline = f"{best.label.capitalize()} reaches the target"
        return headline, "The baseline and it could not be compared."
    if len(study.reached):
        failed = (
            "Nothing reached the target again on fresh seeds" if study.arms else "Not confirmed"
        )
        first = study.reached.iloc[0]
        return (
            f"{failed}: trial {first.name} was {best_word} in the search",
            f"{scale.format(first.score)}, one run of the search; the best of many runs looks"
            " better than it is.",
        )
    target, measured = study.recording.target, study.trials[study.trials.metric.notna()]
    headline = f"Nothing reached {target_label(target)}"
    if measured.empty:
        return headline, "No trial was evaluated."
    trial = measured.loc[measured.metric.map(target.shortfall).idxmin()]
    what = "the baseline" if trial.name == study.recording.baseline else f"with {trial.overrides}"
    metric = f"{shorten(target.metric)} {trial.metric:.4g}"
    return headline, f"Closest: trial {trial.name}, {metric}, {what}"


def _facts(study: ConcludedStudy) -> list[tuple[str, str, str]]:
    """Names, values and notes: how good the best configuration is, and what finding it cost."""
    facts, best, trials = [], study.best_arm, study.trials
    if study.arms and study.summary.get("trial") is not None:
        baseline = study.arms[0][0]
        expected = f"Expected {study.scale.quantity}"
        for name, describe in ((expected, describe_arm), ("Reach rate", describe_reached)):
            facts.append((name, describe(best or baseline), f"baseline: {describe(baseline)}"))
    reached = f"{len(study.reached)} reached {target_label(study.recording.target)}"
    facts.append(("Trials", str(len(trials)), reached))
    seconds = study.summary.get("wall_seconds") or _search_seconds(trials)
    spent = f"{format_seconds(trials.train_seconds.sum())} of training in the search"
    facts.append(("Cost of the study", format_seconds(seconds), spent))
    if study.scale.is_time and best is not None and study.speed_up and study.speed_up.is_gain:
        saved = (baseline.expected_score or math.inf) - (best.expected_score or 0.0)
        if math.isfinite(saved):
            trainings = f"{math.ceil(seconds / saved):,} trainings"
            facts.append(("Paid back after", trainings, f"each saves {format_seconds(saved)}"))
    return facts


def _search_seconds(trials: pd.DataFrame) -> float:
    return float(trials.stopped_at.max() - trials.started_at.min())


def _tables(study: ConcludedStudy) -> dict[str, Rows]:
    """The page's tables, by name."""
    scale, trials = study.scale, study.trials
    ordered = pd.concat([study.reached, trials[trials.score.isna()]]).head(100)
    return {
        "changes": [
            {
                "Key": row["key"],
                "Baseline": _cell(row["baseline"]),
                "Best": _cell(row["best"]) + (" (same)" if row["best"] == row["baseline"] else ""),
            }
            for row in study.summary.get("changes", ())
        ],
        "arms": [
            {
                "Configuration": scores.label,
                "Expected": format_expected(scores) or "no runs",
                "Reached": describe_reached(scores),
                f"Runs ({scale.unit or scale.quantity})": ", ".join(
                    f"{'' if is_reached else '≥ '}{score:.4g}"
                    for score, is_reached in scores.scored_runs
                ),
                "What became of it": arm["why"],
                "Values": " ".join(arm["overrides"]),
            }
            for scores, arm in study.arms
        ],
        "front": [] if study.front is None else study.front.to_dict("records"),
        "outcomes": _outcomes(study),
        "errors": [
            {"Message": text, "Trials": count}
            for text, count in trials.error[trials.error != ""].value_counts().head(8).items()
        ],
        "sides": _side_by_side(study.sides, study),
        "trials": [
            {
                "Trial": trial.Index,
                "Outcome": trial.outcome,
                scale.description: _number(trial.score),
                "Metric": _number(trial.metric),
                "Values": trial.overrides,
            }
            for trial in ordered.itertuples()
        ],
        "provenance": [
            {"What": name, "Where these numbers come from": str(value)}
            for name, value in _provenance(study).items()
            if value not in (None, "")
        ],
    }


def _cell(value: Any) -> str:
    return "not set" if value is None else value_text(value)


def _number(number: float) -> str:
    return "" if pd.isna(number) else f"{number:.4g}"


def _side_by_side(sides: pd.DataFrame, study: ConcludedStudy) -> Rows:
    """What a training of the baseline and one of the best configuration consist of."""
    last_steps = {trial.number: trial.steps[-1] for trial in study.recording.trials if trial.steps}
    steps = sides.trial.map(last_steps).astype(float)
    quantities = {
        "Steps": (steps, "{:,.0f}"),
        "Seconds a step": (sides.train_seconds / steps, "{:.3g} s"),
        "Seconds of training": (sides.train_seconds, "{:.3g} s"),
        "Seconds of preparing": (sides.prepare_seconds, "{:.3g} s"),
        "Seconds of building, once a process": (sides.build_seconds, "{:.3g} s"),
        "Samples a second, at the end": (sides.samples_per_second, "{:,.0f}"),
        "Peak memory": (sides.peak_memory_bytes / 2**20, "{:,.0f} MiB"),
        "Energy": (sides.energy_joules, "{:,.4g} J"),
    }
    rows = []
    for name, (numbers, text) in quantities.items():
        if (numbers > 0).any():  # a training function may tell no samples, and prepares nothing
            cells = numbers.map(text.format, na_action="ignore").fillna("")
            rows.append({"Of one training": name, **cells})
    return rows


def _outcomes(study: ConcludedStudy) -> Rows:
    """How the trials ended, with those that ``trace.csv`` knows and that were tried again."""
    ended = study.trials[["outcome", "spent"]]
    if study.trace is not None:
        again = study.trace[
            study.trace.outcome.isin([Outcome.LOST, Outcome.CONTENDED])
            & ~study.trace.trial.isin(study.trials.index)
        ]
        again = again[["outcome", "train_seconds"]].set_axis(["outcome", "spent"], axis=1)
        ended = pd.concat([ended, again])
    groups = {outcome: ended.spent[ended.outcome == outcome] for outcome in Outcome}
    return [
        {
            "Outcome": outcome,
            "Trials": len(spent),
            "Share": f"{len(spent) / len(ended):.0%}",
            "Training": format_seconds(spent.sum()),
            "What it means": outcome.traits.meaning,
        }
        for outcome, spent in groups.items()
        if len(spent)
    ]


def _provenance(study: ConcludedStudy) -> dict[str, Any]:
    """Where the numbers come from; None or empty for what is not known."""
    summary, trace, machine, trials = study.summary, study.trace, study.machine, study.trials
    versions = summary.get("versions") or machine.get("versions") or {}
    processor = machine.get("processor") or {}
    return {
        "Folder": study.folder.resolve(),
        "Command": summary.get("command"),
        **{
            key.replace("_", " ").capitalize(): value
            for key, value in (summary.get("settings") or {}).items()
        },
        "Began": _date(trials.started_at.min()),
        "Ended": _date(summary.get("stopped_at") or trials.stopped_at.max()),
        "Workers": None if trace is None or trace.empty else 1 + trace.worker.max(),
        "Pauses": None if trace is None else (trace.outcome == "PAUSED").sum(),
        "Times marked as spoilt": (trials.contention != "").sum() or None,
        "Device": summary.get("device"),
        "Host": machine.get("host"),
        "Processor": _listed({**processor, "memory_bytes": None}),
        "GPUs": ", ".join(str(gpu.get("name")) for gpu in machine.get("gpus") or []),
        "Versions": _listed(versions),
        "Seeds": _listed(summary.get("seeds") or {}),
    }


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in (None, ""))


def _date(seconds: float) -> str | None:
    if pd.isna(seconds):
        return None
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
