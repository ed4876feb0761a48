"""The record of a comparison: two sides, their runs in pairs, and the ratios between the sides.

Time to target is steps to target times seconds per step, so all three are reported, each as side a's value divided by side b's.
Seconds per step are also known for a run that fell short of the target.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.comparison import Claim, Ratio, RunScore, ratio_of_expected_scores, ratio_of_means, ratio_where_both_reached
from autotune.measurement import Evaluation, Target, TrialResult
from autotune.report.arms import ArmScores, describe_interval, describe_ratio
from autotune.report.score_format import SECONDS, ScoreFormat


@dataclass(frozen=True, kw_only=True)
class ComparedSide:
    """One of the compared configurations, with its runs that ended."""

    name: str
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    """The resolved configuration; its seed is not the seed of any run."""
    runs: Mapping[int, TrialResult]
    """The results of the runs that ended, by number of the pair."""
    scores: Mapping[int, RunScore]
    """The objective's score of each run, by number of the pair; seconds to target if the objective is time."""
    scale: ScoreFormat = SECONDS

    @property
    def label(self) -> str:
        """The side's name and overrides on one line."""
        return f"{self.name}: {' '.join(self.overrides) or 'as the experiment stands'}"

    @property
    def arm(self) -> ArmScores:
        """The scores of the side's runs, in the order of the pairs."""
        return ArmScores(label=self.label, runs=[self.scores[number] for number in sorted(self.scores)], scale=self.scale)

    @property
    def steps(self) -> Mapping[int, RunScore]:
        """Optimizer steps until a run reached the target or ended without reaching it, by number of the pair."""
        return {
            number: RunScore(float(run.last.step) if run.last is not None else None, self.scores[number].reached)
            for number, run in self.runs.items()
        }

    @property
    def step_seconds(self) -> Mapping[int, float]:
        """Mean training seconds per step of each run that was evaluated, by number of the pair."""
        seconds = {number: step_seconds(run.last) for number, run in self.runs.items() if run.last is not None}
        return {number: mean for number, mean in seconds.items() if mean is not None}


def step_seconds(evaluation: Evaluation) -> float | None:
    """Mean training seconds per step up to an evaluation; None if no step was timed."""
    seconds = evaluation.train_seconds / evaluation.step if evaluation.step > 0 else 0.0
    return seconds if seconds > 0 and math.isfinite(seconds) else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison, finished or interrupted."""

    name: str
    experiment: str
    target: Target
    num_seeds: int
    """Number of pairs that were asked for."""
    sides: tuple[ComparedSide, ComparedSide]

    @property
    def scale(self) -> ScoreFormat:
        """The format of the objective's scores, which both sides share."""
        return self.sides[0].scale

    @property
    def num_runs(self) -> int:
        """Number of runs that ended, on both sides."""
        return sum(len(side.runs) for side in self.sides)

    @property
    def num_pairs(self) -> int:
        """Number of pairs of which both runs ended."""
        return len(self._pairs)

    @property
    def is_complete(self) -> bool:
        """Whether every run ended."""
        return self.num_runs == 2 * self.num_seeds

    @property
    def both_sides_reached(self) -> bool:
        """Whether each side reached the target at least once."""
        return all(side.arm.num_reached > 0 for side in self.sides)

    @property
    def _pairs(self) -> list[int]:
        return sorted(self.sides[0].runs.keys() & self.sides[1].runs.keys())

    @property
    def score_ratio(self) -> Ratio | None:
        """Side a's expected score divided by side b's: above 1 if b is better."""
        one, other = (side.scores for side in self.sides)
        return ratio_of_expected_scores([one[number] for number in self._pairs], [other[number] for number in self._pairs])

    @property
    def score_ratio_where_both_reached(self) -> Ratio | None:
        """Descriptive ratio of mean scores (a / b) over the pairs that both reached the target; None if every run did or no pair did."""
        one, other = ([side.scores[number] for number in self._pairs] for side in self.sides)
        return None if all(run.reached for run in (*one, *other)) else ratio_where_both_reached(one, other)

    @property
    def steps_ratio(self) -> Ratio | None:
        """Side a's expected steps to target divided by side b's."""
        one, other = (side.steps for side in self.sides)
        return ratio_of_expected_scores([one[number] for number in self._pairs], [other[number] for number in self._pairs])

    @property
    def step_ratio(self) -> Ratio | None:
        """Side a's mean seconds per step divided by side b's; None if no pair has them on both sides."""
        one, other = (side.step_seconds for side in self.sides)
        numbers = sorted(one.keys() & other.keys())
        return ratio_of_means([one[number] for number in numbers], [other[number] for number in numbers]) if numbers else None


def verdict(comparison: Comparison) -> str:
    """The conclusion of a comparison, in one sentence."""
    ratio = comparison.score_ratio
    if comparison.num_pairs == 0:
        return "nothing to compare: no pair of runs ended"
    if not comparison.both_sides_reached:
        return f"{_who_never_reached(comparison)} reached the target" + (f"; a / b is {describe_ratio(ratio)}" if ratio else "")
    if ratio is None:
        return f"no pair of runs has two {'times' if comparison.scale.is_time else 'scores'} to compare"
    bound = "" if ratio.claim is Claim.MEASURED else f"{ratio.claim} "
    pairs = "1 pair" if ratio.num_pairs == 1 else f"{ratio.num_pairs} pairs"
    scale = comparison.scale
    how = (
        f"b reaches the target {bound}{ratio.ratio:.2f}x as fast as a"
        if scale.is_time
        else f"{scale.quantity}: a / b is {bound}{ratio.ratio:.2f}x"
    )
    text = f"{how} ({describe_interval(ratio)}, n = {pairs})"
    is_open = ratio.low <= 1 <= ratio.high
    return f"{text}; the interval includes 1: which is {'faster' if scale.is_time else 'better'} is not resolved" if is_open else text


def format_step(seconds: float) -> str:
    """A step time for display, such as ``1.23 ms`` or ``0.456 s``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.1 else f"{seconds:.3g} s"


def _who_never_reached(comparison: Comparison) -> str:
    names = [side.name for side in comparison.sides if side.arm.num_reached == 0]
    return "neither side ever" if len(names) == 2 else f"side {names[0]} never"
