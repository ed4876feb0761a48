"""The display of scores: the objective's quantity and unit, and the scores of an arm (a
configuration that is run repeatedly) as text.

These records are not in the figures' modules, so that a terminal can print a summary without
importing a plotting library.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.confirm.statistics import Claim, Ratio, RunScore, expected_score, reach_rate_interval
from autotune.measurement import TrialResult
from autotune.objective import BoundedObjective, Objective
from autotune.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class ScoreFormat:
    """The format in which the scores of one objective are displayed."""

    quantity: str
    unit: str
    """The unit of scores; empty if they have none."""

    @property
    def is_time(self) -> bool:
        """Whether scores are seconds."""
        return self.unit == "s"

    @property
    def gain(self) -> str:
        """The name for the baseline's score divided by another configuration's."""
        return "speed-up" if self.is_time else "gain"

    @property
    def description(self) -> str:
        """The quantity, followed by its unit in parentheses."""
        return f"{self.quantity} ({self.unit})" if self.unit else self.quantity

    @property
    def axis_label(self) -> str:
        """The description as the label of an axis, with a capital first letter."""
        return self.description[:1].upper() + self.description[1:]

    def format(self, score: float) -> str:
        """A score with its unit for display, such as ``12.3 s``, ``1,230 J`` or ``0.0123 USD``."""
        if self.is_time:
            return format_seconds(score)
        if not math.isfinite(score):
            return "unknown"
        number = f"{score:,.0f}" if score >= 1000 else f"{score:.3g}"
        return f"{number} {self.unit}".rstrip()


SECONDS = ScoreFormat(quantity="time to target", unit="s")
"""The format for time to target in seconds of prepare and train, used if no objective is known."""


def score_format_of(objective: Objective) -> ScoreFormat:
    """The format of an objective's scores.

    The quantity is called "score" if the objective does not name one.
    """
    return ScoreFormat(
        quantity=getattr(objective, "quantity", "score"), unit=getattr(objective, "unit", "")
    )


def run_score(run: TrialResult, objective: Objective) -> RunScore:
    """The score of a run that reached the target, else what it had spent: a lower bound, if
    known.
    """
    score = None
    if run.outcome is Outcome.REACHED:
        score = objective.score(run)
    elif run.last is not None and isinstance(objective, BoundedObjective):
        score = objective.lower_bound(run.last)
    is_known = score is not None and math.isfinite(score)
    return RunScore(score if is_known else None, run.outcome is Outcome.REACHED)


def format_seconds(seconds: float) -> str:
    """A duration for display, such as ``0.123 s``, ``12.3 s``, ``12 min 05 s`` or ``3 h 07
    min``.
    """
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 600:
        digits = 3 if seconds < 1 else 2 if seconds < 10 else 1
        return f"{seconds:.{digits}f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def counted(number: int, noun: str) -> str:
    """A count with its noun in singular or plural, such as ``1 trial`` or ``2 trials``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True, kw_only=True)
class ConfigurationScores:
    """The objective's scores of one arm's runs."""

    label: str
    runs: Sequence[RunScore]
    scale: ScoreFormat = SECONDS

    @property
    def scored_runs(self) -> list[tuple[float, bool]]:
        """Pairs of a run's score and whether it reached the target, for runs with a score.

        The score of a miss is what the run spent.
        """
        return [(run.score, run.reached) for run in self.runs if run.score is not None]

    @property
    def num_runs(self) -> int:
        """Number of runs, with a score or without."""
        return len(self.runs)

    @property
    def num_reached(self) -> int:
        """Number of runs that reached the target."""
        return sum(run.reached for run in self.runs)

    @property
    def all_reached(self) -> bool:
        """Whether there is at least one run, and every run reached the target."""
        return bool(self.runs) and self.num_reached == self.num_runs

    @property
    def expected_score(self) -> float | None:
        """Expected score per success, misses included.

        Infinite if no run reached the target, None if no run has a score.
        """
        return expected_score(self.runs)

    @property
    def mean_spent(self) -> float | None:
        """Mean score of all runs, whether they reached the target or not.

        None if no run has a score.
        """
        spent = [score for score, _ in self.scored_runs]
        return math.fsum(spent) / len(spent) if spent else None


def format_expected(arm: ConfigurationScores) -> str | None:
    """The expected score as text, ``at least`` the mean spent if no run reached the target.

    None if no run has a score.
    """
    expected, spent = arm.expected_score, arm.mean_spent
    if expected is None or spent is None:
        return None
    return (
        arm.scale.format(expected)
        if math.isfinite(expected)
        else f"at least {arm.scale.format(spent)}"
    )


def describe_scores(arm: ConfigurationScores) -> str:
    """An arm's score and runs in words, such as ``10.5 s (mean of 13 runs)`` or ``12.0 s
    (expected; reached in 7 of 8 runs)``.
    """
    text = format_expected(arm)
    if text is None:
        return "no confirmation runs"
    if arm.all_reached:
        return f"{text} ({'' if arm.num_runs == 1 else 'mean of '}{counted(arm.num_runs, 'run')})"
    return f"{text} ({describe_reached(arm)})"


def describe_reached(arm: ConfigurationScores) -> str:
    """How often an arm reached the target, in words, with the 95% interval of its chance if some
    runs missed it.
    """
    text = f"reached in {arm.num_reached} of {arm.num_runs} runs"
    if arm.all_reached or not arm.runs:
        return text
    low, high = reach_rate_interval(arm.num_reached, arm.num_runs)
    return f"{text}: in {100 * low:.0f}% to {100 * high:.0f}% of all"


def describe_ratio(ratio: Ratio | None) -> str:
    """A ratio with its interval and its claim (such as ``at least``), in words.

    No number if the sides are not shown to differ.
    """
    if ratio is None:
        return "not measured"
    return measured_ratio(ratio) if ratio.is_resolved else "not shown"


def measured_ratio(ratio: Ratio) -> str:
    """A ratio with its interval and its claim as it was measured, for details."""
    return f"{format_ratio(ratio)} ({describe_interval(ratio)})"


def format_ratio(ratio: Ratio) -> str:
    """A ratio with its claim, such as ``2.00x`` or ``at least 3.10x``."""
    return f"{'' if ratio.claim is Claim.MEASURED else f'{ratio.claim} '}{ratio.ratio:.2f}x"


def describe_interval(ratio: Ratio) -> str:
    """The confidence interval of a ratio, in words."""
    if ratio.low > 0:
        return (
            f"interval {ratio.low:.2f}x to {ratio.high:.2f}x"
            if math.isfinite(ratio.high)
            else f"interval from {ratio.low:.2f}x"
        )
    return (
        f"interval to {ratio.high:.2f}x" if math.isfinite(ratio.high) else "one pair, no interval"
    )
