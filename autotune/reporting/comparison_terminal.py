"""Terminal output of a comparison: the live display while it runs, and the table of results at its end.

On a terminal the current run is redrawn in place; each run that ends is one line, on a terminal and anywhere else.
"""

import time
from collections.abc import Callable, Sequence
from statistics import fmean
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from autotune.comparison import Ratio
from autotune.measurement import Evaluation, Target, TrialResult, differing_devices
from autotune.reporting.compared import ComparedSide, Comparison, format_step, step_seconds, verdict
from autotune.reporting.scores import SECONDS, ScoreFormat, format_expected, format_seconds, measured_ratio
from autotune.reporting.terminal import REFRESHES_PER_SECOND, format_metric, printable


class ComparisonDisplay:
    """Context manager that shows a comparison while it runs."""

    def __init__(
        self, *, title: str, target: Target, sides: Sequence[str], num_runs: int, console: Console, scale: ScoreFormat = SECONDS
    ) -> None:
        self._title = title
        self._target = target
        self._sides = sides
        self._num_runs = num_runs
        self._console = console
        self._scale = scale
        self._num_started = self._num_done = 0
        self._running: str | None = None
        self._since = 0.0
        self._evaluation: Evaluation | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        head = f"{self._title}: target {self._target}, {self._num_runs} runs"
        self._console.print(Text(printable(head), style="bold"), soft_wrap=True)
        for side in self._sides:
            self._console.print(Text(printable(f"  {side}")), soft_wrap=True)
        if self._console.is_interactive:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=REFRESHES_PER_SECOND, transient=True)
            self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def run_started(self, side: str, seed: int) -> None:
        """Show that a run of a side begins."""
        self._evaluation, self._since = None, time.monotonic()
        self._num_started += 1
        self._running = f"run {self._num_started} of {self._num_runs}: {side}, seed {seed}"

    def evaluated(self, evaluation: Evaluation) -> None:
        """Show the latest evaluation of the current run."""
        self._evaluation = evaluation

    def run_finished(self, side: str, result: TrialResult, score: float | None) -> None:
        """Print the line of a run that ended; ``score`` is what it spent, whether it reached the target or not."""
        self._num_done += 1
        self._running = None if self._num_done == self._num_started else self._running
        parts = [f"run {self._num_done} of {self._num_runs}", side, f"{result.outcome}"]
        nothing = "no time" if self._scale.is_time else "no score"
        parts.append(nothing if score is None else self._scale.format(score))
        last = result.last
        if last is not None:
            step = step_seconds(last)
            parts += [f"{last.step} steps", *([f"{format_step(step)} a step"] if step else [])]
            parts.append(f"{self._target.metric} {format_metric(last.metric)}")
        parts += [remark for remark in (result.error_line, result.contention) if remark]
        style = "" if last is not None else result.outcome.traits.terminal_style
        self._console.print(Text(printable("  ".join(parts)), style=style), soft_wrap=True)

    def _render(self) -> RenderableType:
        running, evaluation = self._running, self._evaluation  # called by the refreshing thread: the driver may change both meanwhile
        if running is None:
            return Text("starting new processes" if self._num_done < self._num_runs else "")
        text = f"{running} · {format_seconds(time.monotonic() - self._since)}"
        if evaluation is not None:
            text += (
                f" · epoch {evaluation.epoch:.1f}  {self._target.metric} {format_metric(evaluation.metric)}  "
                f"train {evaluation.train_seconds:.1f} s"
            )
        return Text(printable(text), no_wrap=True, overflow="ellipsis")


def print_comparison(console: Console, comparison: Comparison, *, folder: str) -> None:
    """Print the result of a comparison: a table of both sides with their ratios, notes and the conclusion."""
    lines = [Text(f"\n{comparison.experiment} · {comparison.name}", style="bold")]
    lines.append(Text.assemble((f"  {'target':<8}", "dim"), str(comparison.target)))
    lines += [Text.assemble((f"  {side.name:<8}", "dim"), printable(side.label.partition(": ")[2])) for side in comparison.sides]
    lines += _table(comparison)
    lines += [Text(f"  {printable(note)}") for note in _notes(comparison)]
    lines.append(Text(f"  {verdict(comparison)}", style="bold green" if is_resolved(comparison) else "bold"))
    lines.append(Text.assemble((f"  {'folder':<8}", "dim"), printable(folder)))
    for line in lines:
        console.print(line, soft_wrap=True)


def _table(comparison: Comparison) -> list[Text]:
    """The table's rows as aligned text, never wrapped or cut, whatever width a log file claims to have."""
    one, other = comparison.sides
    rows = [("", "a", "b", "a / b"), *((name, cell(one), cell(other), ratio) for name, cell, ratio in _rows(comparison))]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        Text.assemble(
            (f"  {name:<{widths[0]}}", "dim"), (f"  {a:>{widths[1]}}  {b:>{widths[2]}}   {ratio}".rstrip(), "" if name else "bold")
        )
        for name, a, b, ratio in rows
    ]


def is_resolved(comparison: Comparison) -> bool:
    """Whether the comparison shows which side is better: both reached the target, and the ratio's interval excludes 1."""
    ratio = comparison.score_ratio
    return comparison.both_sides_reached and ratio is not None and ratio.is_resolved


def _rows(comparison: Comparison) -> list[tuple[str, Callable[[ComparedSide], str], str]]:
    """Each row of the table: its name, the function that gives a side's cell, and the text of its ratio."""
    return [
        ("reached", lambda side: f"{side.arm.num_reached} of {side.arm.num_runs}", ""),
        (comparison.scale.quantity, lambda side: format_expected(side.arm) or "-", _ratio(comparison, comparison.score_ratio)),
        ("steps to target", _mean_steps, _ratio(comparison, comparison.steps_ratio)),
        ("step time", _mean_step, _ratio(comparison, comparison.step_ratio)),
        ("build, once a process", _mean_build, ""),
        (f"test {comparison.target.metric}", _mean_test, ""),
    ]


def _notes(comparison: Comparison) -> list[str]:
    """Notes that a reader needs to understand the table."""
    one, other = comparison.sides
    notes = []
    if not comparison.is_complete:
        notes.append(f"interrupted after {comparison.num_runs} of {2 * comparison.num_seeds} runs")
    if one.config["batch_size"] != other.config["batch_size"]:
        notes.append(f"a step of a is {one.config['batch_size']} samples, one of b {other.config['batch_size']}")
    for side in comparison.sides:
        nothing = "without a time" if side.scale.is_time else "without a score"
        scoreless = [run for number, run in side.runs.items() if side.scores[number].score is None]
        if scoreless:
            notes.append(f"{side.name}: {len(scoreless)} {nothing}: {scoreless[0].outcome} {scoreless[0].error_line}".rstrip())
    if (differences := differing_devices(run for side in comparison.sides for run in side.runs.values())) is not None:
        notes.append(differences)
    both_reached = comparison.score_ratio_where_both_reached
    if both_reached is not None and comparison.both_sides_reached:
        pairs = "1 pair" if both_reached.num_pairs == 1 else f"{both_reached.num_pairs} pairs"
        notes.append(f"in the {pairs} in which both reached the target, a / b is {both_reached.ratio:.2f}x; above it counts the misses")
    return notes


def _ratio(comparison: Comparison, ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    pairs = "" if ratio.num_pairs == comparison.num_pairs else f", {ratio.num_pairs} of {comparison.num_pairs} pairs"
    return f"{measured_ratio(ratio)}{pairs}"


def _mean_steps(side: ComparedSide) -> str:
    steps = [run.score for run in side.steps.values() if run.score is not None]
    return "-" if not steps else f"{'' if side.arm.all_reached else 'at least '}{fmean(steps):,.0f}"


def _mean_step(side: ComparedSide) -> str:
    return format_step(fmean(side.step_seconds.values())) if side.step_seconds else "-"


def _mean_build(side: ComparedSide) -> str:
    builds = [run.last.build_seconds for run in side.runs.values() if run.last is not None]
    return format_seconds(fmean(builds)) if builds else "-"


def _mean_test(side: ComparedSide) -> str:
    tests = [run.test_metric for run in side.runs.values() if run.test_metric is not None]
    return format_metric(fmean(tests)) if tests else "-"
