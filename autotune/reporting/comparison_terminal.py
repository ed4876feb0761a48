"""Terminal output of a comparison: a line for each run that ends, and the table of results."""

from collections.abc import Callable, Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.measurement import Evaluation, differing_devices
from autotune.reporting.compared import ComparedSide, Comparison, step_seconds, verdict
from autotune.reporting.scores import format_expected, format_seconds, measured_ratio
from autotune.reporting.terminal import format_metric, printable


class ComparisonDisplay:
    """Shows a comparison while it runs: a line for each run that ends, the current one in
    ``status``.
    """

    def __init__(self, comparison: Comparison, console: Console) -> None:
        self._comparison = comparison
        self._num_runs = len(comparison.sides) * comparison.num_seeds
        self._console = console
        self.status = console.status("starting new processes")
        self._running = ""
        head = f"{comparison.experiment} · {comparison.name}: target {comparison.target}"
        self._print(f"{head}, {self._num_runs} runs", "bold")
        for side in comparison.sides:
            self._print(f"  {side.label}")

    def run_started(self, side: ComparedSide, seed: int) -> None:
        """Show that a run of a side begins."""
        self._running = f"{side.name}, seed {seed}"
        self.status.update(Text(self._running))

    def evaluated(self, evaluation: Evaluation) -> None:
        """Show the latest evaluation of the current run."""
        metric = f"{self._comparison.target.metric} {format_metric(evaluation.metric)}"
        spent = f"train {evaluation.train_seconds:.1f} s"
        text = f"{self._running} · epoch {evaluation.epoch:.1f}  {metric}  {spent}"
        self.status.update(Text(printable(text)))

    def run_finished(self, side: ComparedSide, number: int) -> None:
        """Print the line of a run that ended, and was added to its side."""
        comparison, result, score = self._comparison, side.runs[number], side.scores[number].score
        scale, last = comparison.scale, result.last
        nothing = "no time" if scale.is_time else "no score"
        parts = [f"run {comparison.num_runs} of {self._num_runs}", side.name, f"{result.outcome}"]
        parts.append(nothing if score is None else scale.format(score))
        if last is not None:
            parts.append(f"{last.step} steps")
            if (seconds := step_seconds(result)) is not None:
                parts.append(f"{format_step(seconds)} a step")
            parts.append(f"{comparison.target.metric} {format_metric(last.metric)}")
        parts += [remark for remark in (result.error_line, result.contention) if remark]
        style = "" if last is not None else result.outcome.traits.terminal_style
        self._print("  ".join(parts), style)

    def _print(self, line: str, style: str = "") -> None:
        self._console.print(Text(printable(line), style=style), soft_wrap=True)


def print_comparison(console: Console, comparison: Comparison, *, folder: str) -> None:
    """Print the result of a comparison: a table of all sides with their ratios, and the
    verdicts.
    """
    sides, others = comparison.sides, comparison.sides[1:]
    labels = [(side.name, side.label.partition(": ")[2]) for side in sides]
    console.print(
        Text(f"\n{comparison.experiment} · {comparison.name}", style="bold"), soft_wrap=True
    )
    lines = [f"{name:<8}{text}" for name, text in [("target", str(comparison.target)), *labels]]
    console.print(Text(_indented(lines)), soft_wrap=True)
    console.print(_table(comparison))
    for side in others:
        ratio = comparison.score_ratio(side)
        is_resolved = comparison.all_sides_reached and ratio is not None and ratio.is_resolved
        style = "bold green" if is_resolved else "bold"
        console.print(Text(f"  {verdict(comparison, side)}", style=style), soft_wrap=True)
    lines = [*_notes(comparison), f"{'folder':<8}{folder}"]
    console.print(Text(_indented(lines)), soft_wrap=True)


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"  {printable(line)}" for line in lines)


def _table(comparison: Comparison) -> Table:
    """A row for each quantity, a column for each side, and one for each ratio to the first side."""
    first, *others = comparison.sides
    ratios = [comparison.ratios(side) for side in others]
    table = Table(box=None, padding=(0, 0, 0, 2))
    table.add_column("")
    for side in comparison.sides:
        table.add_column(side.name, justify="right", overflow="fold")
    for side in others:
        table.add_column(f"{first.name} / {side.name}", overflow="fold")

    def add(name: str, cell: Callable[[ComparedSide], str], ratio: str = "") -> None:
        found = [each.get(ratio) for each in ratios]
        shown = ["" if each is None else measured_ratio(each) for each in found]
        table.add_row(Text(name), *map(cell, comparison.sides), *shown)

    quantity = comparison.scale.quantity
    add("reached", lambda side: f"{side.arm.num_reached} of {side.arm.num_runs}")
    add(quantity, lambda side: format_expected(side.arm) or "-", quantity.replace(" ", "_"))
    add("steps to target", _mean_steps, "steps_to_target")
    add("step time", _mean_step, "step_seconds")
    add("build, once a process", _mean_build)
    add(f"test {comparison.target.metric}", _mean_test)
    if len({side.config["batch_size"] for side in comparison.sides}) > 1:
        add("samples a step", lambda side: f"{side.config['batch_size']}")
    if comparison.is_scaling:
        add("workers", lambda side: f"{side.num_workers}")
        add("efficiency, to target", lambda side: "", "efficiency")
        add("efficiency, a step", lambda side: "", "step_efficiency")
    return table


def _notes(comparison: Comparison) -> list[str]:
    """Notes that a reader needs to understand the table."""
    notes, sides = [], comparison.sides
    if not comparison.is_complete:
        num_runs = len(sides) * comparison.num_seeds
        notes.append(f"interrupted after {comparison.num_runs} of {num_runs} runs")
    for side in sides:
        scoreless = [run for number, run in side.runs.items() if side.scores[number].score is None]
        if scoreless:
            nothing = "without a time" if comparison.scale.is_time else "without a score"
            why = f"{scoreless[0].outcome} {scoreless[0].error_line}".rstrip()
            notes.append(f"{side.name}: {len(scoreless)} {nothing}: {why}")
    differences = differing_devices(run for side in sides for run in side.runs.values())
    return notes if differences is None else [*notes, differences]


def format_step(seconds: float) -> str:
    """A step time for display, such as ``1.23 ms`` or ``0.456 s``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.1 else f"{seconds:.3g} s"


def _mean_steps(side: ComparedSide) -> str:
    steps = [run.score for run in side.steps.values() if run.score is not None]
    return f"{'' if side.arm.all_reached else 'at least '}{fmean(steps):,.0f}" if steps else "-"


def _mean_step(side: ComparedSide) -> str:
    steps = [step.score or 0.0 for step in side.step_seconds.values()]
    return format_step(fmean(steps)) if steps else "-"


def _mean_build(side: ComparedSide) -> str:
    builds = [run.last.build_seconds for run in side.runs.values() if run.last is not None]
    return format_seconds(fmean(builds)) if builds else "-"


def _mean_test(side: ComparedSide) -> str:
    tests = [run.test_metric for run in side.runs.values() if run.test_metric is not None]
    return format_metric(fmean(tests)) if tests else "-"
