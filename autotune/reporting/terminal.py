"""Terminal output of a study: the live display while it runs, and the summary at its end.

On a terminal a table of the running trials is redrawn in place; anywhere else (a log file, a pipe)
each trial that ends is one plain line, and every ten minutes one says how the study stands. The
user's own text (overrides, errors, commands) is never read as markup and never wrapped, so that it
can be searched for and copied whole.
"""

import contextlib
import importlib.util
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from autotune.confirm.statistics import Ratio
from autotune.measurement import OUTPUT_AT, Evaluation, Target, TrialResult
from autotune.objective import Objective
from autotune.outcome import Outcome
from autotune.reporting.scores import (
    ConfigurationScores,
    ScoreFormat,
    counted,
    describe_ratio,
    describe_reached,
    describe_scores,
    format_seconds,
    run_score,
    score_format_of,
)

LOG_SECONDS = 600.0
"""Seconds between two lines that say, in a log, how a study stands."""
_MAX_TOLD = 8
"""Number of running trainings that such a line tells of."""


class Progress:
    """The trainings of a command, as a console shows them: those that run, with their last
    evaluations, and how long those take that are left.

    Args:
        num_ended: number of trainings that earlier processes ended.
        train_seconds: training seconds of these together.
        paused: trainings that earlier processes paused: for each its overrides and its last
            evaluation.

    The methods are called from one thread; what is shown is drawn from another one.
    """

    def __init__(
        self,
        console: Console,
        target: Target,
        objective: Objective,
        *,
        num_ended: int = 0,
        train_seconds: float = 0.0,
        paused: Mapping[int, tuple[Sequence[str], Evaluation | None]] = MappingProxyType({}),
    ) -> None:
        self._console, self._target = console, target
        self._objective, self._scale = objective, score_format_of(objective)
        self._began_at = time.monotonic()
        self._num_ended, self._ended_seconds = num_ended, train_seconds
        self._running: dict[int, tuple[Sequence[str], Evaluation | None]] = {}
        self._paused = dict(paused)
        self._made_seconds, self._first_at = 0.0, math.inf
        """Training seconds of this process's trainings together, and when the first began."""

    def trial_started(self, trial: int, overrides: Sequence[str]) -> None:
        """Show that a training begins or continues; a paused one keeps its last evaluation."""
        self._running[trial] = self._paused.pop(trial, (overrides, None))
        self._first_at = min(self._first_at, time.monotonic())

    def evaluated(self, trial: int, evaluation: Evaluation) -> None:
        """Show the latest evaluation of a training that runs."""
        if trial in self._running:
            overrides, last = self._running[trial]
            self._made_seconds += evaluation.train_seconds - _train_seconds(last)
            self._running[trial] = overrides, evaluation

    def trial_paused(self, trial: int) -> None:
        """Take out a training that has left its worker; it may continue later."""
        if trial in self._running:
            self._paused[trial] = self._running.pop(trial)

    def trial_withdrawn(self, result: TrialResult) -> None:
        """Take out a training that is no result: it continues elsewhere, or is made again."""
        self._running.pop(result.trial, None)
        self._paused.pop(result.trial, None)

    def trial_finished(self, result: TrialResult, score: float | None) -> None:
        """Count a training that ended; ``score`` is None unless it reached the target."""
        if result.last is not None:
            self.evaluated(result.trial, result.last)
        self._running.pop(result.trial, None)
        self._paused.pop(result.trial, None)
        self._num_ended += 1
        self._ended_seconds += _train_seconds(result.last)

    def note(self, line: str, style: str = "") -> None:
        """Print a line of text above what is drawn, where it stays."""
        print_line(self._console, line, style)

    def left_seconds(self, num_trainings: int | None) -> float | None:
        """Seconds that the rest of so many trainings is expected to take; None while that cannot be
        told.
        """
        running, paused = (
            [_train_seconds(last) for _, last in list(trainings.values())]
            for trainings in (self._running, self._paused)
        )
        if num_trainings is None or not self._num_ended or self._made_seconds <= 0:
            return None
        num_taken = self._num_ended + len(paused)
        mean_seconds = (self._ended_seconds + sum(paused)) / num_taken
        num_left = max(0, num_trainings - num_taken - len(running))
        to_train = num_left * mean_seconds + sum(max(0, mean_seconds - each) for each in running)
        return to_train * (time.monotonic() - self._first_at) / self._made_seconds or None

    def describe_left(
        self, num_trainings: int | None, limit_seconds: float | None = None, what: str = "left"
    ) -> str:
        """The time that is left, such as "about 12 min left"; empty if nothing is known of it.

        Args:
            limit_seconds: seconds that are left at most.
        """
        about = self.left_seconds(num_trainings)
        running = [_train_seconds(last) for _, last in list(self._running.values())]
        words = []
        if about is not None and about < (math.inf if limit_seconds is None else limit_seconds):
            words = [f"about {format_rough(about)}"]
        if limit_seconds is not None:
            words.append(f"at most {format_seconds(limit_seconds)}")
        elif not self._num_ended and running and math.isfinite(self._target.max_train_seconds):
            most = max(0.0, self._target.max_train_seconds - max(running))
            return f"the first to end trains at most {format_rough(most)} more"
        return f"{', '.join(words)} {what}" if words else ""

    @property
    def _elapsed(self) -> str:
        """The time since this object was made, in words."""
        return f"elapsed {format_rough(time.monotonic() - self._began_at)}"

    def _label(self, trial: int) -> str:
        return f"trial {trial}"

    def _standing(self) -> str:
        """How the trainings stand, in a line."""
        raise NotImplementedError

    def _words_of_running(self) -> str:
        """What a line tells of the trainings that run, with their last evaluations; empty without
        any.
        """
        running = sorted(self._running.copy().items())
        told = [
            f"{self._label(trial)} not evaluated yet"
            if last is None
            else f"{self._label(trial)} epoch {last.epoch:.1f} {self._target.metric}"
            f" {format_metric(last.metric)} train {format_seconds(last.train_seconds)}"
            for trial, (_, last) in running[:_MAX_TOLD]
        ]
        more = [f"and {len(running) - len(told)} more"] if len(running) > len(told) else []
        return f"; running: {', '.join([*told, *more])}" if told else ""

    @contextlib.contextmanager
    def _saying_now_and_then(self) -> Iterator[None]:
        """Context in which a log gets a line of how things stand every ``LOG_SECONDS``; on a
        terminal none.
        """
        is_over = threading.Event()

        def say() -> None:
            while not is_over.wait(LOG_SECONDS):
                self.note(self._standing())

        if self._console.is_interactive:
            yield
            return
        thread = threading.Thread(target=say, name="log", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def _train_seconds(last: Evaluation | None) -> float:
    return 0.0 if last is None else last.train_seconds


def format_rough(seconds: float) -> str:
    """A duration as it is estimated: ``45 s``, ``12 min``, ``3 h 07 min`` or ``2 days 3 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


class StudyDisplay(Progress):
    """Context manager that shows a study while it runs.

    Args:
        outcomes: number of trials that earlier processes ended, by outcome.
        train_seconds: training seconds of these together.
        paused: trials that earlier processes paused: for each its overrides and its last
            evaluation.
        best: number and score of the best of the earlier trials.
    """

    def __init__(
        self,
        *,
        title: str,
        target: Target,
        objective: Objective,
        num_trials: int | None,
        time_budget_seconds: float | None,
        outcomes: Mapping[Outcome, int] = MappingProxyType({}),
        train_seconds: float = 0.0,
        paused: Mapping[int, tuple[Sequence[str], Evaluation | None]] = MappingProxyType({}),
        console: Console | None = None,
        best: tuple[int, float] | None = None,
    ) -> None:
        super().__init__(
            console or Console(),
            target,
            objective,
            num_ended=sum(outcomes.values()),
            train_seconds=train_seconds,
            paused=paused,
        )
        self._title, self._num_trials, self._seconds = title, num_trials, time_budget_seconds
        self._best, self._outcomes, self._num_spoilt = best, Counter(outcomes), 0
        self._is_drawn = self._console.is_interactive or (
            self._console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        )
        """Whether a table is redrawn in place."""
        self._shown = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._is_drawn:
            drawn = Live(console=self._console, get_renderable=self._render, refresh_per_second=2)
            self._shown.enter_context(drawn)
        else:
            parts = [f"{self._title}: target {self._target}", self._num_done, self._time_left]
            self.note(", ".join(filter(None, parts)))
            self._shown.enter_context(self._saying_now_and_then())
        return self

    def __exit__(self, *error: object) -> None:
        self._shown.close()
        if self._num_spoilt > 3:
            self.note(
                f"other programs spoilt the times of {self._num_spoilt} trainings"
                " (search.max_retakes, docs/measuring.md)"
            )

    def trial_withdrawn(self, result: TrialResult) -> None:
        """Note that a trial is no result: it continues, or its configuration is tried again."""
        super().trial_withdrawn(result)
        why = f"{result.outcome}: {result.error_line}"
        is_lost = result.outcome is Outcome.LOST
        again = "it continues" if is_lost else "its configuration is tried again"
        line = f"trial {result.trial}  {why}; {again}"
        if result.outcome is Outcome.CONTENDED:
            self._spoilt(line)
        else:
            self.note(line)

    def trial_finished(self, result: TrialResult, score: float | None) -> None:
        """Count a trial that ended and print its line.

        ``score`` is None unless it reached the target.
        """
        super().trial_finished(result, score)
        self._outcomes[result.outcome] += 1
        is_best = score is not None and score < (math.inf if self._best is None else self._best[1])
        if is_best and score is not None:
            self._best = (result.trial, score)
        if not self._is_drawn or is_best or result.outcome is Outcome.ERRORED:
            self.note(self._line(result, score))
        if result.contention is not None:
            self._spoilt(f"trial {result.trial}  marked: {result.contention}")

    def _spoilt(self, line: str) -> None:
        """Note that other programs spoilt a training's times: the first few times, and at the end
        how often.
        """
        self._num_spoilt += 1
        if self._num_spoilt <= 3:
            self.note(line)

    def _line(self, result: TrialResult, score: float | None) -> str:
        spent = run_score(result, self._objective).score if score is None else score
        output = result.output_path
        parts = [
            f"trial {result.trial}",
            *words_of_result(result, spent, self._target, self._scale),
            self._best_so_far,
            result.error_line,
            f"{OUTPUT_AT}{output}" if output and output not in result.error_line else "",
        ]
        return "  ".join(part for part in parts if part)

    @property
    def _best_so_far(self) -> str:
        return (
            "best none yet"
            if self._best is None
            else f"best {self._scale.format(self._best[1])} (trial {self._best[0]})"
        )

    @property
    def _num_done(self) -> str:
        of_all = "" if self._num_trials is None else f" of {self._num_trials}"
        return f"{self._num_ended}{of_all} trials done"

    @property
    def _time_left(self) -> str:
        budget = self._seconds
        most = None if budget is None else max(0.0, budget - (time.monotonic() - self._began_at))
        return self.describe_left(self._num_trials, most, "of search left")

    def _standing(self) -> str:
        """How the study stands, in a line for a log."""
        paused = f"{len(self._paused)} paused" if self._paused else ""
        parts = [self._elapsed, self._num_done, paused, self._best_so_far, self._time_left]
        return f"{', '.join(filter(None, parts))}{self._words_of_running()}"

    def _render(self) -> RenderableType:
        # Called by the refreshing thread: the dict is copied in one step, since the study adds and
        # removes trials meanwhile.
        running = list(self._running.items())
        room = max(3, self._console.height - 8)  # the other lines
        table = Table(box=None, expand=True, padding=(0, 1), header_style="bold")
        table.add_column("trial", justify="right", no_wrap=True)
        table.add_column("overrides", ratio=1, no_wrap=True, overflow="ellipsis")
        for name in ("epoch", self._target.metric, "train s"):
            table.add_column(Text(name), justify="right", no_wrap=True, max_width=24)
        for trial, (overrides, last) in running[:room]:
            numbers = (
                ("-",) * 3
                if last is None
                else (f"{last.epoch:.1f}", format_metric(last.metric), f"{last.train_seconds:.1f}")
            )
            table.add_row(*map(Text, (str(trial), shorten_overrides(overrides), *numbers)))
        head = Text.assemble(
            (self._title, "bold"), f"  target {self._target}", no_wrap=True, overflow="ellipsis"
        )
        outcomes = [
            Text(f"{outcome} {count}", outcome.traits.terminal_style)
            for outcome in Outcome
            if (count := self._outcomes[outcome])
        ]
        outcomes += [Text(f"paused {len(self._paused)}", "dim")] if self._paused else []
        lines = [
            Text(f"and {len(running) - room} more running", "dim") if len(running) > room else None,
            Text(" · ").join(outcomes) if outcomes else Text("no trial has finished yet", "dim"),
            Text(
                " · ".join(
                    filter(
                        None, [self._best_so_far, self._num_done, self._elapsed, self._time_left]
                    )
                )
            ),
        ]
        return Group(head, table, *filter(None, lines))


def words_of_result(
    result: TrialResult, score: float | None, target: Target, scale: ScoreFormat
) -> list[str]:
    """How a training ended: its outcome, its score or what it spent, its last metric, and the
    bounds of further metrics that it did not keep.
    """
    nothing = "no time" if scale.is_time else "no score"
    words = [str(result.outcome), nothing if score is None else scale.format(score)]
    if result.last is not None:
        words.append(f"{target.metric} {format_metric(result.last.metric)}")
        words += target.violations(result.last.measured)
    return words


def print_line(console: Console, line: str, style: str = "") -> None:
    """Print a line of text, whole and as it is."""
    console.print(Text(printable(line), style=style), soft_wrap=True)


def output_console() -> Console:
    """A console for the standard output: as wide as the terminal, or 120 columns where there is
    none.
    """
    return Console(width=None if sys.stdout.isatty() else 120)


def verdict_rows(
    baseline: ConfigurationScores,
    chosen: ConfigurationScores | None,
    speed_up: Ratio | None,
    *,
    is_exported: bool,
    overrides: Sequence[str] = (),
    others: Sequence[tuple[ConfigurationScores, str]] = (),
) -> list[tuple[str, str]]:
    """Rows of a summary that compare the baseline with the chosen candidate, then one row for every
    other candidate.

    Args:
        chosen: the candidate that won the confirmation; None if there was none.
        speed_up: the baseline's expected score divided by the chosen candidate's.
        is_exported: whether the chosen candidate is exported; False if no candidate beat the
            baseline.
        others: the other candidates, each with the reason why it left the confirmation.
    """
    rows, scale = [("baseline", describe_scores(baseline))], baseline.scale
    better, worse = ("faster", "slower") if scale.is_time else ("better", "worse")
    if chosen is None:
        why = "no other configuration reached the target in the search"
        return [*rows, ("best", f"the baseline: {why}")]
    name = "best"
    if not is_exported:
        rows.append((name, f"no configuration was shown to be {better} than the baseline"))
        name = "closest"
    rows.append((name, f"{describe_scores(chosen)}, {chosen.label}"))
    rows += [("" if index else "overrides", value) for index, value in enumerate(overrides)]
    pairs = "" if speed_up is None else f", n = {counted(speed_up.num_pairs, 'pair')}"
    rows.append((scale.gain, f"{describe_ratio(speed_up)}{pairs}, {describe_reached(chosen)}"))
    if speed_up is not None and not speed_up.is_gain:
        unknown = f"not shown to be {better} than the baseline, nor {worse}"
        rows.append(("", f"{worse} than the baseline" if speed_up.is_resolved else unknown))
        if speed_up.num_pairs_lacking is not None:
            lacking = counted(speed_up.num_pairs_lacking, "more pair")
            limits = "confirm.budget_fraction and confirm.max_runs limit them"
            rows.append(("", f"about {lacking} of runs would tell; {limits}"))
    for index, (arm, why) in enumerate(others):
        scores = describe_scores(arm) if arm.runs else "no runs"
        rows.append(("" if index else "others", f"{arm.label}: {scores}, {why}"))
    return rows


def print_summary(
    console: Console,
    title: str,
    rows: Sequence[tuple[str, str]],
    *,
    advice: str = "",
    commands: Sequence[tuple[str, str]] = (),
) -> None:
    """Print a study's summary: what was found, what it cost, where the files are and which commands
    come next.

    Args:
        rows: pairs of a name and what is told.
        advice: what would make a better result likelier.
        commands: pairs of a purpose and the command for it, as it is typed.
    """
    print_line(console, title, "bold")
    for name, value in rows:
        line = Text.assemble((f"  {name:<10}", "dim"), printable(value))
        console.print(line, soft_wrap=True)
    if advice:
        print_line(console, "")
        print_line(console, advice)
    for purpose, command in commands:
        print_line(console, "")
        print_line(console, f"{purpose}:")
        print_line(console, f"  {command}", "cyan")


def format_metric(metric: float) -> str:
    """A metric with four significant digits."""
    return f"{metric:.4g}"


def shorten_overrides(overrides: Sequence[str]) -> str:
    """Overrides on one line: the last part of each key, and floats with three significant
    digits.
    """
    shown = []
    for override in overrides:
        key, equals, value = override.partition("=")
        with contextlib.suppress(ValueError):
            value = f"{float(value):.3g}" if any(mark in value for mark in ".e") else value
        shown.append(f"{key.rsplit('.', 1)[-1]}{equals}{value}")
    return " ".join(shown) or "(no overrides)"


def printable(line: str) -> str:
    """The line with spaces in place of control characters, which a log must not carry."""
    return "".join(character if character.isprintable() else " " for character in line)
