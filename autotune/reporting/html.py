"""``report.html``: one page about a study, made from the files in its folder.

It needs neither a network nor anything beside it.

Plotly's library is a part of the page, which is most of its size.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.io as pio
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from autotune.confirm.statistics import Claim
from autotune.effects import MIN_TRIALS, Effects
from autotune.files import replace_file
from autotune.outcome import Outcome
from autotune.recording import Recording
from autotune.reporting.concluded_study import ConcludedStudy, read_concluded_study, readable
from autotune.reporting.drawing import Chart, counted, shorten, target_label, write_charts
from autotune.reporting.failures import EndedTrial, gathered_failures
from autotune.reporting.scores import (
    describe_arm,
    describe_interval,
    describe_ratio,
    describe_reached,
    format_expected,
    format_seconds,
)
from autotune.reporting.study_charts import marker_colour, study_charts
from autotune.reporting.study_files import REPORT
from autotune.space import override_text

_MAX_ROWS = 100


def write_study_report(
    folder: Path, time_effects: Callable[[Recording], Sequence[Effects]], output: Path | None = None
) -> Path:
    """Write the report of the study in a folder, and its charts as pages of their own in
    ``figures/``; return the report's path.

    Args:
        time_effects: learns from a recording what parameters do to the time to target and its two
            parts; empty if too few trials tell.
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
        write_charts(
            folder / "figures",
            (chart for name, chart in charts.items() if not name.startswith("effect-")),
        )
    replace_file(output or folder / REPORT, page.encode(errors="replace"))
    return output or folder / REPORT


def _page(study: ConcludedStudy, effects: Sequence[Effects], charts: Mapping[str, Chart]) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    ended = [
        EndedTrial(
            {key: text for key, text in study.parameters.loc[trial.Index].items() if text},
            trial.outcome,
            trial.error,
        )
        for trial in study.trials.itertuples()
    ]
    ordered = pd.concat([study.reached, study.trials[study.trials.score.isna()]])
    return environment.get_template("report.html.jinja").render(
        name=study.folder.resolve().name,
        experiment=study.summary.get("experiment", ""),
        target=target_label(study.recording.target),
        answer=_answer(study),
        failures=gathered_failures(ended, study.recording.space.choices),
        arms=[
            (scores, arm, format_expected(scores) or "no runs", describe_reached(scores))
            for scores, arm in study.arms
        ],
        scale=study.scale,
        charts=charts,
        effects=effects,
        min_trials=MIN_TRIALS,
        front=study.front,
        number=lambda number, digits=4: "" if pd.isna(number) else f"{number:.{digits}g}",
        sides=study.sides,
        side_rows=_side_by_side(study),
        outcomes=_outcomes(study),
        errors=study.trials.error[study.trials.error != ""].value_counts().head(8),
        trials=[*ordered.head(_MAX_ROWS).itertuples()],
        num_trials=len(study.trials),
        provenance=_provenance(study),
        colours={outcome: marker_colour(outcome) for outcome in Outcome},
        # Plotly writes its JSON without "<", so that it cannot end the element that holds it.
        figures={
            name: Markup(_json_of(chart))  # noqa: S704
            for name, chart in charts.items()
        },
        plotly=Markup(get_plotlyjs()),  # noqa: S704  # the library's own file
    )


def _json_of(chart: Chart) -> str:
    return str(pio.to_json(chart.figure.update_layout(template="none"), validate=False))


def _answer(study: ConcludedStudy) -> dict[str, Any]:
    """What to change, what it brings and what finding it cost."""
    scale, best, speed_up, target = (
        study.scale,
        study.best_arm,
        study.speed_up,
        target_label(study.recording.target),
    )
    better, best_word = ("faster", "fastest") if scale.is_time else ("better", "best")
    shown, facts = best, []
    if best is not None and speed_up is not None:
        bound = "" if speed_up.claim is Claim.MEASURED else f"{speed_up.claim} "
        gain = f"{bound}{speed_up.ratio:.3g} times " + (
            "as fast as the baseline" if scale.is_time else f"less {scale.quantity}"
        )
        headline = (
            gain[0].upper() + gain[1:]
            if speed_up.is_gain
            else f"No configuration is shown to be {better} than the baseline"
        )
        pairs = f"n = {counted(speed_up.num_pairs, 'pair')} of runs on fresh seeds"
        detail = f"{scale.gain.capitalize()} {describe_ratio(speed_up)}, {pairs}"
        if not speed_up.is_resolved:
            detail += (
                f"; {describe_interval(speed_up)}, so the best one is not shown to be {better}"
            )
    elif study.arms and study.summary.get("trial") is not None:
        shown = best or study.arms[0][0]
        headline = (
            "Keep the baseline" if best is None else f"{best.label.capitalize()} reaches the target"
        )
        detail = (
            "No other configuration was confirmed to be better."
            if best is None
            else "The baseline and it could not be compared."
        )
    elif len(study.reached):
        first, failed = (
            study.reached.iloc[0],
            ("Nothing reached the target again on fresh seeds" if study.arms else "Not confirmed"),
        )
        headline = f"{failed}: trial {first.name} was {best_word} in the search"
        detail = (
            f"{scale.format(first.score)}, one run of the search; the best of many runs looks"
            " better than it is."
        )
    else:
        headline, detail = f"Nothing reached {target}", _closest(study)
    if shown is not None:
        baseline = study.arms[0][0]
        facts += [
            (
                f"Expected {scale.quantity}",
                describe_arm(shown),
                f"baseline: {describe_arm(baseline)}",
            ),
            ("Reach rate", describe_reached(shown), f"baseline: {describe_reached(baseline)}"),
        ]
    return {
        "headline": headline,
        "detail": detail,
        "is_gain": best is not None and speed_up is not None and speed_up.is_gain,
        "changes": [
            (row["key"], _shown(row["baseline"]), _shown(row["best"]))
            for row in study.summary.get("changes", ())
        ],
        "facts": [
            *facts,
            ("Trials", str(len(study.trials)), f"{len(study.reached)} reached {target}"),
            *_cost(study),
        ],
    }


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return (
        value
        if isinstance(value, str)
        else f"{value:.6g}"
        if isinstance(value, float)
        else override_text(value)
    )


def _closest(study: ConcludedStudy) -> str:
    measured, target = study.trials[study.trials.metric.notna()], study.recording.target
    if measured.empty:
        return "No trial was evaluated."
    trial = measured.loc[measured.metric.map(target.shortfall).idxmin()]
    what = "the baseline" if trial.name == study.recording.baseline else f"with {trial.overrides}"
    return f"Closest: trial {trial.name}, {shorten(target.metric)} {trial.metric:.4g}, {what}"


def _cost(study: ConcludedStudy) -> Iterator[tuple[str, str, str]]:
    """What the study took, and after how many trainings the best configuration has paid it back."""
    seconds = (
        study.summary.get("wall_seconds")
        or study.trials.stopped_at.max() - study.trials.started_at.min()
    )
    yield (
        "Cost of the study",
        format_seconds(seconds),
        f"{format_seconds(study.trials.train_seconds.sum())} of training in the search",
    )
    if (
        study.scale.is_time
        and study.speed_up is not None
        and study.speed_up.is_gain
        and study.best_arm is not None
    ):
        saved = (study.arms[0][0].expected_score or math.inf) - (
            study.best_arm.expected_score or 0.0
        )
        if math.isfinite(saved):
            yield (
                "Paid back after",
                f"{math.ceil(seconds / saved):,} trainings",
                f"each saves {format_seconds(saved)}",
            )


def _side_by_side(study: ConcludedStudy) -> list[tuple[str, list[str], str]]:
    """What a training of the baseline and one of the best configuration consist of: a name, a
    text for each, and their ratio.
    """
    sides = study.trials.loc[[*study.sides.values()]]
    steps = pd.Series(
        {trial.number: trial.steps[-1] for trial in study.recording.trials if trial.steps},
        dtype=float,
    ).reindex(sides.index)
    rows = [
        ("Steps", steps, "{:,.0f}"),
        ("Seconds a step", sides.train_seconds / steps, "{:.3g} s"),
        ("Seconds of training", sides.train_seconds, "{:.3g} s"),
        ("Seconds of preparing", sides.prepare_seconds, "{:.3g} s"),
        ("Seconds of building, once a process", sides.build_seconds, "{:.3g} s"),
        ("Samples a second, at the end", sides.samples_per_second, "{:,.4g}"),
        ("Peak memory", sides.peak_memory_bytes / 2**20, "{:,.0f} MiB"),
        ("Energy", sides.energy_joules, "{:,.4g} J"),
    ]
    return [
        (
            name,
            ["" if pd.isna(number) else text.format(number) for number in numbers],
            _ratio(numbers),
        )
        for name, numbers, text in rows
        if (numbers > 0).any()  # a training function may tell no samples, and prepares nothing
    ]


def _ratio(numbers: "pd.Series[float]") -> str:
    """The first of two numbers over the second one."""
    return (
        f"{numbers.iloc[0] / numbers.iloc[1]:.3g}x"
        if len(numbers) == 2 and (numbers > 0).all()
        else ""
    )


def _outcomes(study: ConcludedStudy) -> list[dict[str, Any]]:
    """How the trials ended, with those that ``trace.csv`` knows and that were tried again."""
    ended = study.trials[["outcome", "spent"]]
    if len(study.trace):
        again = study.trace[
            study.trace.outcome.isin([Outcome.LOST, Outcome.CONTENDED])
            & ~study.trace.trial.isin(study.trials.index)
        ]
        ended = pd.concat(
            [ended, again[["outcome", "train_seconds"]].rename(columns={"train_seconds": "spent"})]
        )
    groups = [(outcome, ended.spent[ended.outcome == outcome]) for outcome in Outcome]
    return [
        {
            "outcome": outcome,
            "count": len(spent),
            "share": 100 * len(spent) / len(ended),
            "spent": format_seconds(spent.sum()),
        }
        for outcome, spent in groups
        if len(spent)
    ]


def _provenance(study: ConcludedStudy) -> list[tuple[str, str]]:
    """Where the numbers come from: pairs of a name and a text."""
    summary, trace, machine = study.summary, study.trace, study.machine
    versions, seeds = (
        summary.get("versions") or machine.get("versions") or {},
        summary.get("seeds") or {},
    )
    rows = [
        ("Folder", str(study.folder.resolve())),
        ("Command", summary.get("command")),
        *(
            (key.replace("_", " ").capitalize(), value)
            for key, value in (summary.get("settings") or {}).items()
        ),
        ("Began", _date(study.trials.started_at.min())),
        ("Ended", _date(summary.get("stopped_at") or study.trials.stopped_at.max())),
        ("Workers", 1 + int(trace.worker.max()) if len(trace) else None),
        ("Pauses", (trace.outcome == "PAUSED").sum() if len(trace) else None),
        ("Times marked as spoilt", (study.trials.contention != "").sum() or None),
        ("Device", summary.get("device")),
        ("Host", machine.get("host")),
        (
            "Processor",
            ", ".join(
                f"{key} {value}"
                for key, value in (machine.get("processor") or {}).items()
                if key != "memory_bytes"
            ),
        ),
        ("GPUs", ", ".join(str(gpu.get("name")) for gpu in machine.get("gpus") or [])),
        (
            "Versions",
            ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        ),
        ("Seeds of the confirmation", ", ".join(map(str, seeds.get("confirmation", [])))),
        (
            "Seeds of the search",
            f"in trials.csv, such as {study.trials.seed.iloc[0]}" if len(study.trials) else None,
        ),
    ]
    return [(name, str(value)) for name, value in rows if value not in (None, "")]


def _date(seconds: float) -> str | None:
    return (
        None
        if pd.isna(seconds)
        else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    )
