"""The scores of an arm (a configuration that is run repeatedly), and its display as text.

These records are not in the figures' modules, so that a terminal can print a summary without importing a plotting library.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.comparison import Claim, Ratio, RunScore, expected_score, reach_rate_interval
from autotune.report.score_format import SECONDS, ScoreFormat


@dataclass(frozen=True, kw_only=True)
class ArmScores:
    """The objective's scores of one arm's runs."""

    label: str
    runs: Sequence[RunScore]
    scale: ScoreFormat = SECONDS

    @property
    def scored_runs(self) -> list[tuple[float, bool]]:
        """Pairs of a run's score and whether it reached the target, for runs with a score; the score of a miss is what the run spent."""
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
        """Expected score per success, misses included; infinite if no run reached the target, None if no run has a score."""
        return expected_score(self.runs)

    @property
    def mean_spent(self) -> float | None:
        """Mean score of all runs, whether they reached the target or not; None if no run has a score."""
        spent = [score for score, _ in self.scored_runs]
        return math.fsum(spent) / len(spent) if spent else None


@dataclass(frozen=True, kw_only=True)
class ConfirmationFigures:
    """The arms of a confirmation, and the speed-up of the chosen one over the baseline."""

    arms: Sequence[ArmScores]
    """The arms in the order baseline, chosen arm, any others."""
    speed_up: Ratio | None
    """The baseline's expected score divided by the chosen arm's; None if it was not measured."""


def format_expected(arm: ArmScores) -> str | None:
    """The expected score as text, ``at least`` the mean spent if no run reached the target; None if no run has a score."""
    expected, spent = arm.expected_score, arm.mean_spent
    if expected is None or spent is None:
        return None
    return arm.scale.format(expected) if math.isfinite(expected) else f"at least {arm.scale.format(spent)}"


def describe_arm(arm: ArmScores) -> str:
    """An arm's score and runs in words, such as ``10.5 s (mean of 13 runs)`` or ``12.0 s (expected; reached in 7 of 8 runs)``."""
    text = format_expected(arm)
    if text is None:
        return "no confirmation runs"
    if arm.all_reached:
        return f"{text} ({'1 run' if arm.num_runs == 1 else f'mean of {arm.num_runs} runs'})"
    return f"{text} ({describe_reached(arm)})"


def describe_reached(arm: ArmScores) -> str:
    """How often an arm reached the target, in words, with the 95% interval of its chance if some runs missed it."""
    text = f"reached in {arm.num_reached} of {arm.num_runs} runs"
    if arm.all_reached or not arm.runs:
        return text
    low, high = reach_rate_interval(arm.num_reached, arm.num_runs)
    return f"{text}: in {100 * low:.0f}% to {100 * high:.0f}% of all"


def describe_ratio(ratio: Ratio | None) -> str:
    """A ratio with its interval and its claim (such as ``at least``), in words."""
    if ratio is None:
        return "not measured"
    bound = "" if ratio.claim is Claim.MEASURED else f"{ratio.claim} "
    return f"{bound}{ratio.ratio:.2f}x ({describe_interval(ratio)})"


def describe_interval(ratio: Ratio) -> str:
    """The confidence interval of a ratio, in words."""
    if ratio.low > 0:
        return f"interval {ratio.low:.2f}x to {ratio.high:.2f}x" if math.isfinite(ratio.high) else f"interval from {ratio.low:.2f}x"
    return f"interval to {ratio.high:.2f}x" if math.isfinite(ratio.high) else "one pair, no interval"
