"""Terminal output of runs in turns: a line for each run that ends, and the table of a
comparison.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.measurement import Target, TrialResult, differing_devices
from autotune.objective import Objective
from autotune.reporting.comparison import Compared, Comparison, step_seconds, verdict
from autotune.reporting.scores import (
    format_expected,
    format_seconds,
    measured_ratio,
    run_score,
)
from autotune.reporting.terminal import (
    Progress,
    format_metric,
    print_line,
    printable,
    words_of_result,
)


class RunsDisplay(Progress):
    """Shows runs while they are made: a line for each that ended, the current ones and the time in
    ``status``, a context, or in a log's line every ten minutes.

    Args:
        noun: what a run is called.
        num_ended: number of runs that earlier processes made.
    """

    def __init__(
        self,
        console: Console,
        target: Target,
        objective: Objective,
        *,
        noun: str = "run",
        num_ended: int = 0,
    ) -> None:
        super().__init__(console, target, objective)
        self._noun, self._num_before = noun, num_ended
        self.num_runs: int | None = None
        """Number of runs that will be made altogether; None where that is not known."""
        self.labels: dict[int, str] = {}
        """What each run is called, by its number."""
        self.status = self._shown()

    @contextmanager
    def _shown(self) -> Iterator[None]:
        with (
            self._console.status(self),  # which asks for the line whenever it is drawn
            self._saying_now_and_then(),
        ):
            yield

    def __rich__(self) -> Text:
        return Text(printable(self._standing()), no_wrap=True, overflow="ellipsis")

    def _standing(self) -> str:
        of_all = "" if self.num_runs is None else f" of {self.num_runs}"
        to_make = None if self.num_runs is None else self.num_runs - self._num_before
        parts = [
            f"{self._num_made}{of_all} {self._noun}s made, {self._elapsed} with them",
            self.describe_left(to_make),
        ]
        told = self._words_of_running() or "; starting new processes"
        return f"{', '.join(filter(None, parts))}{told}"

    @property
    def _num_made(self) -> int:
        return self._num_before + self._num_ended

    def _label(self, trial: int) -> str:
        return self.labels[trial]

    def trial_finished(self, result: TrialResult, score: float | None) -> None:
        """Print the line of a run that ended."""
        super().trial_finished(result, score)
        last, seconds = result.last, step_seconds(result)
        known = run_score(result, self._objective).score
        parts = [
            f"{self._noun} {self._num_made} of {self.num_runs}",
            self.labels[result.trial],
            *words_of_result(result, known, self._target, self._scale),
            last and f"{last.step} steps",
            seconds and f"{format_step(seconds)} a step",
            result.error_line,
            result.contention,
        ]
        style = "" if last is not None else result.outcome.traits.terminal_style
        self.note("  ".join(part for part in parts if part), style)


def print_comparison(console: Console, comparison: Comparison, *, folder: str) -> None:
    """Print the result of a comparison: a table of all configurations with their ratios, and the
    verdicts.
    """
    say = partial(print_line, console)
    say("")
    say(f"{comparison.experiment} · {comparison.name}", "bold")
    say(f"  {'target':<8}{comparison.target}")
    for each in comparison.configurations:
        say(f"  {each.name:<8}{each.shown}")
    console.print(_table(comparison))
    for each in comparison.configurations[1:]:
        say(f"  {verdict(comparison, each)}", "bold")
    if not comparison.is_complete:
        say(f"  interrupted after {comparison.num_runs} of {comparison.num_wanted} runs")
    runs = [run for each in comparison.configurations for run in each.runs.values()]
    if differences := differing_devices(runs):
        say(f"  {differences}")
    say(f"  {'folder':<8}{folder}")


def _table(comparison: Comparison) -> Table:
    """A row for each quantity, a column for each configuration and for each ratio to the first."""
    configurations, (first, *others) = comparison.configurations, comparison.configurations
    ratios = [comparison.ratios(each) for each in others]
    table = Table(box=None, padding=(0, 0, 0, 2))
    table.add_column("")
    for each in configurations:
        table.add_column(each.name, justify="right", overflow="fold")
    for each in others:
        table.add_column(f"{first.name} / {each.name}", overflow="fold")

    def mean(values: Iterable[float | None], show: Callable[[float], str]) -> str:
        known = [value for value in values if value is not None]
        return show(fmean(known)) if known else "-"

    def steps_to_target(each: Compared) -> str:
        least = "" if each.summary.all_reached else "at least "
        scores = (run.score for run in each.steps.values())
        return mean(scores, lambda steps: f"{least}{steps:,.0f}")

    def step_time(each: Compared) -> str:
        return mean((run.score for run in each.step_seconds.values()), format_step)

    def build(each: Compared) -> str:
        return mean(
            (run.last.build_seconds for run in each.runs.values() if run.last), format_seconds
        )

    def add(name: str, cell: Callable[[Compared], str], ratio: str = "") -> None:
        found = [of_one.get(ratio) for of_one in ratios]
        shown = ["" if each is None else measured_ratio(each) for each in found]
        table.add_row(Text(name), *map(cell, configurations), *shown)

    scores = comparison.scale.quantity
    add("reached", lambda each: f"{each.summary.num_reached} of {each.summary.num_runs}")
    add(scores, lambda each: format_expected(each.summary) or "-", scores.replace(" ", "_"))
    add("steps to target", steps_to_target, "steps_to_target")
    add("step time", step_time, "step_seconds")
    add("build, once a process", build)
    add(
        f"test {comparison.target.metric}",
        lambda each: mean((run.test_metric for run in each.runs.values()), format_metric),
    )
    if len({each.config["batch_size"] for each in configurations}) > 1:
        add("samples a step", lambda each: f"{each.config['batch_size']}")
    if comparison.is_scaling:
        add("workers", lambda each: f"{each.num_workers}")
        add("efficiency, to target", lambda each: "", "efficiency")
        add("efficiency, a step", lambda each: "", "step_efficiency")
    return table


def format_step(seconds: float) -> str:
    """A step time for display, such as ``1.23 ms`` or ``0.456 s``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.1 else f"{seconds:.3g} s"
