"""What repeated runs of a configuration measured, as figures and terminal tell it.

These records live apart from the figures so that a terminal can print a summary without importing a plotting library.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.comparison import Claim, Ratio, RunTime
from autotune.report.scale import SECONDS, Scale


@dataclass(frozen=True, kw_only=True)
class ArmTimes:
    """One configuration's runs; where the objective is not time, what stands for their seconds is their score on its scale."""

    label: str
    runs: Sequence[RunTime]
    scale: Scale = SECONDS

    @property
    def timed_runs(self) -> list[tuple[float, bool]]:
        """The runs that have a time, each with whether it reached the target; where it did not, its time is a lower bound."""
        return [(run.seconds, run.reached) for run in self.runs if run.seconds is not None]

    @property
    def num_runs(self) -> int:
        """How many runs there are, with a time or without."""
        return len(self.runs)

    @property
    def num_reached(self) -> int:
        """How many runs reached the target."""
        return sum(run.reached for run in self.runs)

    @property
    def all_reached(self) -> bool:
        """Whether there are runs and all of them reached the target."""
        return bool(self.runs) and self.num_reached == self.num_runs

    @property
    def mean_seconds(self) -> float | None:
        """Mean time over the runs: a lower bound unless all of them reached the target; None without a time."""
        times = [seconds for seconds, _ in self.timed_runs]
        return math.fsum(times) / len(times) if times else None


@dataclass(frozen=True, kw_only=True)
class ConfirmationFigures:
    """The arms of a confirmation and how much faster the exported one is."""

    arms: Sequence[ArmTimes]
    """The baseline first, then what is exported, then any others."""
    speed_up: Ratio | None
    """The baseline's time over the exported one's; None where it was not measured."""


def describe_arm(arm: ArmTimes) -> str:
    """One arm's mean and count in words, such as ``10.5 s (mean of 13 runs)``."""
    mean = arm.mean_seconds
    if mean is None:
        return "no confirmation runs"
    runs = "1 run" if arm.num_runs == 1 else f"mean of {arm.num_runs} runs"
    if arm.all_reached:
        return f"{arm.scale.format(mean)} ({runs})"
    return f"at least {arm.scale.format(mean)} ({runs}, {arm.num_reached} reached the target)"


def describe_speed_up(best: ArmTimes, speed_up: Ratio | None) -> str:
    """What confirmation claims, in words; runs of the best that did not reach the target leave nothing to claim."""
    if not best.all_reached:
        return f"not claimed, since {best.num_reached} of {best.num_runs} runs of {best.label} reached the target"
    return describe_ratio(speed_up)


def describe_ratio(ratio: Ratio | None) -> str:
    """A ratio in words, with its interval where there is one, and no more than it claims."""
    if ratio is None:
        return "not measured"
    is_bound = ratio.claim in (Claim.AT_LEAST, Claim.AT_MOST)
    text = f"{ratio.claim} {ratio.ratio:.2f}x" if is_bound else f"{ratio.ratio:.2f}x"
    text += f" ({describe_interval(ratio)})"
    if ratio.claim is Claim.WHERE_BOTH_REACHED:
        pairs = "pair" if ratio.num_pairs == 1 else f"{ratio.num_pairs} pairs"
        text += f" over the {pairs} in which both reached the target"
    return text


def describe_interval(ratio: Ratio) -> str:
    """A ratio's interval in words."""
    if ratio.low > 0:
        return f"interval {ratio.low:.2f}x to {ratio.high:.2f}x" if math.isfinite(ratio.high) else f"interval from {ratio.low:.2f}x"
    return f"interval to {ratio.high:.2f}x" if math.isfinite(ratio.high) else "one pair, no interval"
