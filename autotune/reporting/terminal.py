"""Terminal output of a study: the live display while it runs, and the summary at its end.

On a terminal a table of the running trials is redrawn in place; anywhere else (a log file, a pipe) each trial that ends and each
confirmation run that starts is one plain line. The user's own text (overrides, errors, commands) is never read as markup and never
wrapped, so that it can be searched for and copied whole.
"""

import contextlib
import importlib.util
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from autotune.comparison import Ratio
from autotune.measurement import OUTPUT_AT, Evaluation, Target, TrialResult
from autotune.outcome import Outcome
from autotune.reporting.scores import SECONDS, ArmScores, ScoreFormat, describe_arm, describe_ratio, describe_reached, format_seconds
from autotune.reporting.time_left import TimeLeft

REFRESHES_PER_SECOND = 2
LOG_WIDTH = 120
"""Width in columns of output that does not go to a terminal."""
_TELL_SECONDS = 10.0
_TELL_SHARE = 0.1
"""A log gets a line about the time left after so many seconds and this share of the trials."""
MAX_SPOILT_TOLD = 3
"""Trainings with spoilt times that are told one by one, before they would fill the screen of a busy machine."""
FRAME_LINES = 8
"""Lines of the live display that do not show a trial."""


class StudyDisplay:
    """Context manager that shows a study while it runs.

    Args:
        outcomes: number of trials that earlier processes ended, by outcome.
        paused: trials that earlier processes paused: for each its overrides and its last evaluation.
        best: number and score, in the unit of ``scale``, of the best of the earlier trials.
        confirm_fraction: ``confirm.budget_fraction``; None if no confirmation follows, or if it has no limit of time.
        price: price of an hour of the devices that a trial has, and its currency; None if it is not known.
        backlog: returns how far the tracker is behind, in words; empty if it keeps up.

    The methods are called from one thread; the live table is redrawn from another one.
    """

    def __init__(
        self,
        *,
        title: str,
        target: Target,
        num_trials: int | None,
        time_budget_seconds: float | None,
        outcomes: Mapping[Outcome, int] = MappingProxyType({}),
        paused: Mapping[int, tuple[Sequence[str], Evaluation | None]] = MappingProxyType({}),
        console: Console | None = None,
        best: tuple[int, float] | None = None,
        scale: ScoreFormat = SECONDS,
        confirm_fraction: float | None = None,
        price: tuple[float, str] | None = None,
        backlog: Callable[[], str] = lambda: "",
    ) -> None:
        self._title = title
        self._backlog = backlog
        self._target = target
        self._num_trials = num_trials
        self._console = console or Console()
        self._best = best
        self._scale = scale
        self._price = price
        self._seconds_left = time_budget_seconds
        self._running: dict[int, _Running] = {}
        self._paused = {trial: _Running(shorten_overrides(overrides), evaluation) for trial, (overrides, evaluation) in paused.items()}
        self._outcomes = Counter(outcomes)
        self._most_running = 1
        self._told_at = (time.monotonic(), self._num_done)
        num_left = None if num_trials is None else max(0, num_trials - self._num_done - len(self._paused))
        self._time_left = TimeLeft(num_trials_left=num_left, seconds_left=time_budget_seconds, confirm_fraction=confirm_fraction)
        self._confirming: str | None = None
        self._live: Live | None = None
        self._num_spoilt, self._num_retaken = 0, 0

    def __enter__(self) -> Self:
        if self._console.is_interactive or (self._console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None):
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=REFRESHES_PER_SECOND)
            self._live.start(refresh=True)
        else:
            self._print(f"{self._title}: target {self._target}, {self._num_done_text()}{self._limit()}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._num_spoilt > MAX_SPOILT_TOLD:
            kept = self._num_spoilt - self._num_retaken
            self._print(
                f"other programs spoilt the times of {self._num_spoilt} trainings: {self._num_retaken} trained again, {kept} marked"
            )

    def trial_started(self, trial: int, overrides: Sequence[str]) -> None:
        """Show a trial that was handed to a worker; a resumed one keeps its last evaluation."""
        earlier = self._paused.pop(trial, None)
        self._running[trial] = earlier or _Running(shorten_overrides(overrides), None)
        self._most_running = max(self._most_running, len(self._running))
        if earlier is None:
            self._time_left.started()

    def evaluated(self, trial: int, evaluation: Evaluation) -> None:
        """Show the latest evaluation of a running trial."""
        if trial in self._running:
            before = self._running[trial].evaluation
            self._time_left.trained(evaluation.train_seconds - (before.train_seconds if before is not None else 0.0))
            self._running[trial] = _Running(self._running[trial].overrides, evaluation)

    def trial_paused(self, trial: int) -> None:
        """Take a paused trial out of the table; it may be resumed later."""
        if trial in self._running:
            self._paused[trial] = self._running.pop(trial)

    def trial_lost(self, trial: int, why: str) -> None:
        """Note that a trial was lost with its machine, or its process killed, and that its configuration is tried again."""
        self._time_left.withdrawn()
        self._running.pop(trial, None)
        self._paused.pop(trial, None)
        self.note(f"trial {trial}  LOST {why}; its configuration is tried again")

    def trial_contended(self, trial: int, why: str) -> None:
        """Note that other programs spoilt a trial's times, and that its configuration is tried again."""
        self._time_left.withdrawn()
        self._running.pop(trial, None)
        self._paused.pop(trial, None)
        self._num_retaken += 1
        self.spoilt(f"trial {trial}  CONTENDED: {why}; its configuration is tried again")

    def trial_finished(self, result: TrialResult, score: float | None) -> None:
        """Count a trial that ended and print its line; ``score`` is None unless it reached the target."""
        self._running.pop(result.trial, None)
        self._paused.pop(result.trial, None)
        self._outcomes[result.outcome] += 1
        improved = score is not None and math.isfinite(score) and (self._best is None or score < self._best[1])
        if improved and score is not None:
            self._best = (result.trial, score)
        if self._live is None or improved or result.outcome is Outcome.ERRORED:
            self._print(self._line(result, score))
        if result.contention is not None:
            self.spoilt(f"trial {result.trial}  marked: {result.contention}")
        self._tell_progress()

    def confirming(self, number: int, total: int, label: str, *, num_ended: int) -> None:
        """Show that confirmation run ``number`` of ``total`` starts, after ``num_ended`` have ended; ``label`` names its arm."""
        self._confirming = f"confirmation run {number} of {total}: {label}"
        self._time_left.confirming(num_ended + 1, total)
        if self._live is None:
            self._print(self._confirming)

    def spoilt(self, line: str) -> None:
        """Note that other programs spoilt a training's times: the first few times, then once what can be done, and at the end how often."""
        self._num_spoilt += 1
        if self._num_spoilt <= MAX_SPOILT_TOLD:
            self.note(line)
        elif self._num_spoilt == MAX_SPOILT_TOLD + 1:
            self.note(
                "other programs keep spoiling times, which is no longer told of each training: end them, or keep such times, marked, "
                "with search.max_retakes=0 (docs/measuring.md)"
            )

    def note(self, line: str) -> None:
        """Print a line of text above the live table, where it stays."""
        self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(Text(printable(line)), soft_wrap=True)

    def _line(self, result: TrialResult, score: float | None) -> str:
        last = result.last
        spent = score if score is not None else self._scale.spent(result)
        parts = [f"trial {result.trial}", f"{result.outcome}"]
        nothing = "no time" if self._scale.is_time else "no score"
        parts.append(nothing if spent is None else self._scale.format(spent))
        parts.append(f"{self._target.metric} {'none' if last is None else format_metric(last.metric)}")
        parts.append(self._best_so_far())
        parts += [result.error_line, result.output_path and f"{OUTPUT_AT}{result.output_path}"]
        return "  ".join(part for part in parts if part)

    def _best_so_far(self) -> str:
        if self._best is None:
            return "best none yet"
        trial, score = self._best
        return f"best {self._scale.format(score)} (trial {trial})"

    def _tell_progress(self) -> None:
        """Print the time left, where no table shows it: after a tenth of the trials, but not more often than every ten seconds."""
        seconds, num_done = (time.monotonic() - self._told_at[0], self._num_done - self._told_at[1])
        is_due = seconds >= _TELL_SECONDS and num_done >= _TELL_SHARE * (self._num_trials or num_done)
        if self._live is None and is_due and self._time_left.interval is not None:
            self._told_at = (time.monotonic(), self._num_done)
            self._print(f"progress: {self._progress()}")

    @property
    def _num_done(self) -> int:
        return self._outcomes.total()

    def _num_done_text(self) -> str:
        return f"{self._num_done} trials done" if self._num_trials is None else f"{self._num_done} of {self._num_trials} trials done"

    def _limit(self) -> str:
        return "" if self._seconds_left is None else f", at most {format_seconds(max(0.0, self._seconds_left))} of search"

    def _progress(self) -> str:
        """The number of trials done, and the time and the money that the study still takes, in words."""
        parts = [self._num_done_text()]
        interval, search, confirmation = self._time_left.interval, self._time_left.searching, self._time_left.confirmation
        if interval is not None:
            parts.append(f"{_between(*interval, format_seconds)} left")
        if interval is not None and self._price is not None and search is not None and confirmation is not None:
            hour, currency = self._price
            money = [(most * self._most_running + runs) * hour / 3600 for most, runs in zip(search, confirmation, strict=True)]
            parts.append(f"{_between(money[0], money[1], '{:.3g}'.format)} {currency}")
        return ", ".join([*parts, *filter(None, [self._backlog()])])

    def _render(self) -> RenderableType:
        # Called by the refreshing thread: the dict is copied in one step, since the study adds and removes trials meanwhile.
        running = list(self._running.items())
        room = max(3, self._console.height - FRAME_LINES)
        table = Table(box=None, expand=True, padding=(0, 1), header_style="bold")
        table.add_column("trial", justify="right", no_wrap=True)
        table.add_column("overrides", ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column("epoch", justify="right", no_wrap=True)
        table.add_column(Text(self._target.metric), justify="right", no_wrap=True, max_width=24)
        table.add_column("train s", justify="right", no_wrap=True)
        for trial, row in running[:room]:
            table.add_row(*map(Text, (str(trial), row.overrides, *row.numbers())))
        head = Text(self._title, style="bold", no_wrap=True, overflow="ellipsis")
        head.append(f"  target {self._target}", style="not bold")
        lines: list[RenderableType] = [head, table]
        if len(running) > room:
            lines.append(Text(f"and {len(running) - room} more running", style="dim"))
        if self._confirming is not None:
            lines.append(Text(self._confirming))
        lines.append(_outcome_line(self._outcomes, len(self._paused)))
        lines.append(Text(f"{self._best_so_far()} · {self._progress()}"))
        return Group(*lines)


def output_console() -> Console:
    """A console for the standard output: as wide as the terminal, or ``LOG_WIDTH`` where there is none."""
    return Console(width=None if sys.stdout.isatty() else LOG_WIDTH)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The contents of the summary that is printed at the end of a study."""

    study: str
    experiment: str
    target: Target
    baseline: ArmScores
    chosen: ArmScores | None
    """The candidate that won the confirmation; None if there was none."""
    chosen_overrides: Sequence[str]
    is_exported: bool
    """Whether the chosen candidate is exported; False if no candidate beat the baseline."""
    speed_up: Ratio | None
    """The baseline's expected score divided by the chosen candidate's."""
    others: Sequence[tuple[ArmScores, str]]
    """The other candidates, each with the reason why it left the confirmation."""
    outcomes: Mapping[str, int]
    """Number of trials by outcome."""
    train_seconds_spent: float
    """Training seconds summed over the search's trials."""
    wall_seconds: float
    folder: str
    next_commands: Sequence[tuple[str, str]]
    """Pairs of a purpose and the command for it, as it is typed."""
    notes: Sequence[tuple[str, str]] = ()
    """Pairs of a name and a remark on how the study was measured."""
    advice: str | None = None
    """What would make a better result likelier; None if a candidate beat the baseline."""


def print_summary(console: Console, summary: Summary) -> None:
    """Print a study's summary: the gain, what it cost, where the files are and which commands come next."""
    outcomes = ", ".join(f"{outcome} {count}" for outcome, count in summary.outcomes.items() if count)
    times = f"{format_seconds(summary.train_seconds_spent)} of training in {format_seconds(summary.wall_seconds)} of wall clock"
    rows = [
        ("target", str(summary.target)),
        *([] if summary.baseline.scale.is_time else [("objective", summary.baseline.scale.description)]),
        *_verdict(summary),
        ("trials", outcomes or "none"),
        ("spent", times),
        *summary.notes,
        ("folder", summary.folder),
    ]
    lines = [Text(f"{summary.experiment} · {summary.study}", style="bold")]
    for name, value in rows:
        style = "bold green" if name == summary.baseline.scale.gain and _is_resolved_gain(summary) else ""
        lines.append(Text.assemble((f"  {name:<10}", "dim"), (printable(value), style)))
    if summary.advice is not None:
        lines.append(Text(f"\n{printable(summary.advice)}"))
    for purpose, command in summary.next_commands:
        lines += [Text(f"\n{printable(purpose)}:"), Text(f"  {command}", style="cyan")]
    for line in lines:
        console.print(line, soft_wrap=True)


def format_metric(metric: float) -> str:
    """A metric with four significant digits."""
    return f"{metric:.4g}"


def shorten_overrides(overrides: Sequence[str]) -> str:
    """Overrides on one line: the last part of each key, and floats with three significant digits."""
    return " ".join(_shorten_override(override) for override in overrides) or "(no overrides)"


@dataclass(frozen=True)
class _Running:
    overrides: str
    evaluation: Evaluation | None

    def numbers(self) -> tuple[str, str, str]:
        """The cells of a table row: epoch, metric and train seconds."""
        if self.evaluation is None:
            return "-", "-", "-"
        return f"{self.evaluation.epoch:.1f}", format_metric(self.evaluation.metric), f"{self.evaluation.train_seconds:.1f}"


def _verdict(summary: Summary) -> list[tuple[str, str]]:
    """Summary rows that compare the baseline with the chosen candidate, then one row for every other candidate."""
    rows = [("baseline", describe_arm(summary.baseline))]
    chosen, scale, speed_up = summary.chosen, summary.baseline.scale, summary.speed_up
    better = "faster" if scale.is_time else "better"
    if chosen is None:
        return [*rows, ("best", "the baseline: no other configuration reached the target in the search")]
    if summary.is_exported:
        rows.append(("best", f"{describe_arm(chosen)}, {chosen.label}"))
    else:
        rows += [("best", f"no configuration was shown to be {better} than the baseline")]
        rows += [("closest", f"{describe_arm(chosen)}, {chosen.label}")]
    rows += [("" if index else "overrides", override) for index, override in enumerate(summary.chosen_overrides)]
    pairs = "" if speed_up is None else f", n = {'1 pair' if speed_up.num_pairs == 1 else f'{speed_up.num_pairs} pairs'}"
    rows.append((scale.gain, f"{describe_ratio(speed_up)}{pairs}, {describe_reached(chosen)}"))
    if speed_up is not None and not speed_up.is_resolved:
        worse = "slower" if scale.is_time else "worse"
        why = "a single pair has no interval" if speed_up.num_pairs == 1 else "the interval includes 1"
        rows.append(("", f"{why}: not shown to be {better} than the baseline, nor {worse}"))
    if speed_up is not None and speed_up.high < 1:
        rows.append(("", "slower than the baseline" if scale.is_time else "worse than the baseline"))
    rows += [
        ("" if index else "others", f"{arm.label}: {describe_arm(arm) if arm.runs else 'no runs'}, {why}")
        for index, (arm, why) in enumerate(summary.others)
    ]
    return rows


def _is_resolved_gain(summary: Summary) -> bool:
    return summary.is_exported and summary.speed_up is not None and summary.speed_up.is_gain


def _between(low: float, high: float, text: Callable[[float], str]) -> str:
    return text(high) if text(low) == text(high) else f"{text(low)} to {text(high)}"


def _outcome_line(outcomes: Mapping[Outcome, int], num_paused: int) -> Text:
    parts = [Text(f"{outcome} {outcomes[outcome]}", style=outcome.traits.terminal_style) for outcome in Outcome if outcomes.get(outcome)]
    if num_paused:
        parts.append(Text(f"paused {num_paused}", style="dim"))
    return Text(" · ").join(parts) if parts else Text("no trial has finished yet", style="dim")


def _shorten_override(override: str) -> str:
    key, equals, value = override.partition("=")
    with contextlib.suppress(ValueError):
        value = f"{float(value):.3g}" if any(mark in value for mark in ".e") else value
    return f"{key.rsplit('.', 1)[-1]}{equals}{value}"


def printable(line: str) -> str:
    """The line with spaces in place of control characters, which a log must not carry."""
    return "".join(character if character.isprintable() else " " for character in line)
