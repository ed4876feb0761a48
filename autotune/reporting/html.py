"""``report.html``: one page about a study, made from the files in its folder; it needs neither a network nor anything beside it.

Plotly's library is a part of the page, which is most of its size.
"""

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import plotly.io as pio
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from autotune.comparison import Claim
from autotune.effects import MIN_TRIALS, Effects
from autotune.files import FORMAT_KEY, check_format, replace_file
from autotune.measurement import Phase
from autotune.outcome import Outcome
from autotune.reporting.concluded_study import ConcludedStudy, ConcludedTrial
from autotune.reporting.drawing import Chart, counted, shorten, target_label
from autotune.reporting.failures import EndedTrial, gathered_failures
from autotune.reporting.html_charts import (
    confirmation_chart,
    curves_chart,
    effect_charts,
    front_chart,
    importance_chart,
    marker_colour,
    parameters_chart,
    phases_chart,
    search_chart,
)
from autotune.reporting.scores import describe_arm, describe_interval, describe_ratio, describe_reached, format_expected, format_seconds
from autotune.reporting.study_files import REPORT
from autotune.space import override_text

_MAX_ROWS = 100


def write_report(
    study: ConcludedStudy, effects: Sequence[Effects], output: Path | None = None, *, charts: Mapping[str, Chart] | None = None
) -> Path:
    """Write the report of a concluded study, and return its path.

    Args:
        effects: what the parameters do to the time to target and to its two parts; empty if that is not known.
        output: the file to write; None for ``report.html`` in the study's folder.
        charts: what ``study_charts`` gave, where that was asked before.
    """
    output = output or study.folder / REPORT
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    charts = {**(charts or study_charts(study, effects)), **{chart.name: chart for chart in effect_charts(effects)}}
    front, sides = _front(study), _sides(study)
    page = environment.get_template("report.html.jinja").render(
        name=study.folder.resolve().name,
        experiment=study.summary.get("experiment", ""),
        target=target_label(study.recording.target),
        answer=_answer(study),
        failures=_failures(study),
        arms=[(scores, arm, format_expected(scores) or "no runs", describe_reached(scores)) for scores, arm in study.arms],
        scale=study.scale,
        charts=charts,
        effects=effects,
        min_trials=MIN_TRIALS,
        front=front,
        sides=_side_by_side(study, sides),
        side_labels=list(sides),
        outcomes=_outcomes(study),
        errors=Counter(trial.error for trial in study.trials if trial.error).most_common(8),
        trials=[*study.reached, *(trial for trial in study.trials if trial.score is None)][:_MAX_ROWS],
        num_trials=len(study.trials),
        provenance=_provenance(study),
        colours={outcome: marker_colour(outcome) for outcome in Outcome},
        # Plotly writes its JSON without "<", so that it cannot end the element that holds it.
        figures={name: Markup(pio.to_json(chart.figure.update_layout(template="none"), validate=False)) for name, chart in charts.items()},  # noqa: S704
        plotly=Markup(get_plotlyjs()),  # noqa: S704  # the library's own file
    )
    replace_file(output, page.encode(errors="replace"))
    return output


def study_charts(study: ConcludedStudy, effects: Sequence[Effects]) -> dict[str, Chart]:
    """The charts of a concluded study, by name; those that would be empty are left out."""
    front, sides = _front(study), _sides(study)
    phases = {label: {str(phase): side.measured.get(f"{phase}_seconds", 0.0) for phase in Phase} for label, side in sides.items()}
    found = (
        confirmation_chart(study),
        search_chart(study),
        curves_chart(study),
        parameters_chart(study),
        importance_chart(effects),
        phases_chart(phases) if sides else None,
        front_chart(front["header"][1:-2], front["scores"]) if front else None,
    )
    return {chart.name: chart for chart in found if chart is not None}


def _answer(study: ConcludedStudy) -> dict[str, Any]:
    """What to change, what it brings and what finding it cost."""
    scale, best, speed_up = study.scale, study.best_arm, study.speed_up
    better = "faster" if scale.is_time else "better"
    facts = [("Trials", f"{len(study.trials)}", f"{len(study.reached)} reached {target_label(study.recording.target)}")]
    changes = [(row["key"], _shown(row["baseline"]), _shown(row["best"])) for row in study.summary.get("changes") or _changes(study)]
    if best is not None and speed_up is not None:
        is_shown, bound = speed_up.is_gain, "" if speed_up.claim is Claim.MEASURED else f"{speed_up.claim} "
        gain = (
            f"{bound}{speed_up.ratio:.3g} times as fast as the baseline"
            if scale.is_time
            else f"{scale.gain} {bound}{speed_up.ratio:.3g} times"
        )
        headline = f"{gain[0].upper()}{gain[1:]}" if is_shown else f"No configuration is shown to be {better} than the baseline"
        pairs = f"n = {counted(speed_up.num_pairs, 'pair')} of runs on fresh seeds"
        detail = f"{scale.gain.capitalize()} {describe_ratio(speed_up)}, {pairs}"
        if not speed_up.is_resolved:
            detail += f"; {describe_interval(speed_up)}, so the best one is not shown to be {better}"
        facts.insert(0, (f"Expected {scale.quantity}", f"{describe_arm(best)}", f"baseline: {describe_arm(study.arms[0][0])}"))
        facts.insert(1, ("Reach rate", describe_reached(best), f"baseline: {describe_reached(study.arms[0][0])}"))
    elif study.arms and study.summary.get("trial") is not None:
        baseline = study.arms[0][0]
        headline = "Keep the baseline" if best is None else f"{best.label.capitalize()} reaches the target"
        detail = "No other configuration was confirmed to be better." if best is None else "The baseline and it could not be compared."
        facts.insert(0, (f"Expected {scale.quantity}", describe_arm(best or baseline), describe_reached(best or baseline)))
    elif study.reached:
        first = study.reached[0]
        failed = "Nothing reached the target again on fresh seeds" if study.arms else "Not confirmed"
        headline = f"{failed}: trial {first.number} was {'fastest' if scale.is_time else 'best'} in the search"
        detail = f"{scale.format(first.score or 0.0)}, one run of the search; the best of many runs looks better than it is."
    else:
        headline, detail = f"Nothing reached {target_label(study.recording.target)}", _closest(study)
    facts += _cost(study)
    is_gain = best is not None and speed_up is not None and speed_up.is_gain
    return {"headline": headline, "detail": detail, "is_gain": is_gain, "changes": changes, "facts": facts}


def _failures(study: ConcludedStudy) -> list[str]:
    """Options of choices that failures gather on, a line for each."""
    ended = [EndedTrial(trial.values, trial.outcome, trial.error) for trial in study.trials]
    return gathered_failures(ended, study.recording.space.choices)


def _changes(study: ConcludedStudy) -> list[dict[str, Any]]:
    """Values of the baseline's trial and of the best one, for a study whose summary does not have them."""
    by_number = {trial.number: trial.values for trial in study.trials}
    before = by_number.get(study.recording.baseline if study.recording.baseline is not None else -1)
    after = by_number.get(study.best_trial) if study.best_trial is not None else None
    if not before or not after or before is after:
        return []
    return [{"key": key, "baseline": before.get(key), "best": after.get(key)} for key in {**before, **after}]


def _shown(value: Any) -> str:
    return (
        "not set"
        if value is None
        else f"{value:.6g}"
        if isinstance(value, float)
        else value
        if isinstance(value, str)
        else override_text(value)
    )


def _closest(study: ConcludedStudy) -> str:
    target = study.recording.target
    measured = [(target.shortfall(trial.metric), trial) for trial in study.trials if trial.metric is not None]
    if not measured:
        return "No trial was evaluated."
    _, trial = min(measured, key=lambda pair: pair[0])
    what = "the baseline" if trial.number == study.recording.baseline else f"with {trial.overrides}"
    return f"Closest: trial {trial.number}, {shorten(target.metric)} {trial.metric:.4g}, {what}"


def _cost(study: ConcludedStudy) -> Iterator[tuple[str, str, str]]:
    """What the study took, and after how many trainings the best configuration has paid it back."""
    summary, spans = study.summary, [trial.stopped_at for trial in study.trials]
    seconds = summary.get("wall_seconds") or (max(spans) - min(trial.started_at for trial in study.trials) if spans else 0.0)
    training = math.fsum(trial.measured.get("train_seconds", 0.0) for trial in study.trials)
    yield "Cost of the study", format_seconds(seconds), f"{format_seconds(training)} of training in the search"
    scores = [arm.expected_score for arm in (study.arms[0][0], study.best_arm) if arm is not None] if study.arms else []
    is_gain = study.scale.is_time and study.speed_up is not None and study.speed_up.is_gain
    if is_gain and len(scores) == 2 and all(score is not None and math.isfinite(score) for score in scores):
        saved = (scores[0] or 0.0) - (scores[1] or 0.0)
        yield "Paid back after", f"{math.ceil(seconds / saved):,} trainings", f"each saves {format_seconds(saved)}"


def _front(study: ConcludedStudy) -> dict[str, Any] | None:
    """The Pareto front as a table: what its file says, and the same with fewer digits."""
    path = study.folder / "pareto_front.csv"
    if not path.is_file():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    shown = [[row[0], *(f"{float(score):.4g}" for score in row[1:-2]), *row[-2:]] for row in rows]
    return {"header": header, "scores": rows, "rows": shown}


def _sides(study: ConcludedStudy) -> dict[str, ConcludedTrial]:
    """The trials of the baseline and of the best configuration, by the labels of the two."""
    by_number = {trial.number: trial for trial in study.trials if trial.measured}
    numbers = {"baseline": study.recording.baseline, "best": study.best_trial if study.best_trial != study.recording.baseline else None}
    return {label: by_number[number] for label, number in numbers.items() if number in by_number}


def _side_by_side(study: ConcludedStudy, sides: Mapping[str, ConcludedTrial]) -> list[tuple[str, list[str], str]]:
    """What a training of the baseline and one of the best configuration consist of: a name, a text for each, and their ratio."""
    steps = {trial.number: trial.steps[-1] for trial in study.recording.trials if trial.steps and trial.steps[-1] > 0}
    rows: list[tuple[str, list[float | None], Callable[[float], str]]] = [
        ("Steps", [steps.get(side.number) for side in sides.values()], lambda number: f"{number:,.0f}"),
        ("Seconds a step", [_seconds_a_step(side, steps.get(side.number)) for side in sides.values()], lambda number: f"{number:.3g} s"),
        *(
            (name, [side.measured.get(column) for side in sides.values()], show)
            for name, column, show in (
                ("Seconds of training", "train_seconds", format_seconds),
                ("Seconds of preparing", "prepare_seconds", format_seconds),
                ("Seconds of building, once a process", "build_seconds", format_seconds),
                ("Samples a second, at the end", "samples_per_second", lambda number: f"{number:,.4g}"),
                ("Peak memory", "peak_memory_bytes", lambda number: f"{number / 2**20:,.0f} MiB"),
                ("Energy", "energy_joules", lambda number: f"{number:,.4g} J"),
            )
        ),
    ]
    known = [row for row in rows if any(row[1])]  # an own function may tell no samples, and prepares nothing
    return [(name, ["" if number is None else show(number) for number in numbers], _ratio(numbers)) for name, numbers, show in known]


def _seconds_a_step(side: ConcludedTrial, steps: float | None) -> float | None:
    return side.measured["train_seconds"] / steps if steps and "train_seconds" in side.measured else None


def _ratio(numbers: Sequence[float | None]) -> str:
    """The first of two numbers over the second one."""
    first, second = numbers if len(numbers) == 2 else (None, None)
    return f"{first / second:.3g}x" if first and second else ""


def _outcomes(study: ConcludedStudy) -> list[dict[str, Any]]:
    """How the trials ended, with those that ``trace.csv`` knows and that were tried again."""
    spent = {outcome: math.fsum(trial.spent or 0.0 for trial in study.trials if trial.outcome is outcome) for outcome in Outcome}
    counts = Counter(trial.outcome for trial in study.trials)
    known = {trial.number for trial in study.trials}
    for row in _trace(study):
        if row["outcome"] in (Outcome.LOST, Outcome.CONTENDED) and int(row["trial"]) not in known:
            counts[Outcome[row["outcome"]]] += 1
            spent[Outcome[row["outcome"]]] += float(row["train_seconds"])
    total = sum(counts.values())
    return [
        {"outcome": outcome, "count": count, "share": 100 * count / total, "spent": format_seconds(spent[outcome])}
        for outcome in Outcome
        if (count := counts[outcome])
    ]


def _trace(study: ConcludedStudy) -> list[dict[str, str]]:
    path = study.folder / "trace.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _provenance(study: ConcludedStudy) -> list[tuple[str, str]]:
    """Where the numbers come from: pairs of a name and a text."""
    summary, trace = study.summary, _trace(study)
    path = study.folder / "machine.yaml"
    machine = (yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None) or {}
    check_format("machine", machine.get(FORMAT_KEY), path)
    processor = machine.get("processor") or {}
    versions = summary.get("versions") or machine.get("versions") or {}
    seeds = summary.get("seeds") or {}
    rows = [
        ("Folder", str(study.folder.resolve())),
        ("Command", summary.get("command")),
        *((key.replace("_", " ").capitalize(), value) for key, value in (summary.get("settings") or {}).items()),
        ("Began", _date(min((trial.started_at for trial in study.trials), default=None))),
        ("Ended", _date(summary.get("stopped_at") or max((trial.stopped_at for trial in study.trials), default=None))),
        ("Workers", 1 + max((int(row["worker"]) for row in trace), default=0) if trace else None),
        ("Pauses", sum(row["outcome"] == "PAUSED" for row in trace) if trace else None),
        ("Times marked as spoilt", sum(bool(trial.contention) for trial in study.trials) or None),
        ("Device", summary.get("device")),
        ("Host", machine.get("host")),
        ("Processor", ", ".join(f"{key} {value}" for key, value in processor.items() if key != "memory_bytes") or None),
        ("GPUs", ", ".join(str(gpu.get("name")) for gpu in machine.get("gpus") or []) or None),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version) or None),
        ("Seeds of the confirmation", ", ".join(map(str, seeds.get("confirmation", []))) or None),
        ("Seeds of the search", f"in trials.csv, such as {study.trials[0].seed}" if study.trials else None),
    ]
    return [(name, str(value)) for name, value in rows if value is not None]


def _date(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
