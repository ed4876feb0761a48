"""What a confirmation measured, as figures and terminal tell it.

These records live apart from the figures so that a terminal can print a summary without importing a plotting library.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ArmTimes:
    """One configuration's confirmation runs."""

    label: str
    times_seconds: Sequence[float]
    """One for each run: its time to target, or the time it trained for where it did not reach the target."""
    reached: Sequence[bool]
    """Whether each run reached the target; where it did not, its time is a lower bound."""

    @property
    def runs(self) -> list[tuple[float, bool]]:
        """The runs that have a time, each with whether it reached the target."""
        return [(seconds, reached) for seconds, reached in zip(self.times_seconds, self.reached, strict=False) if math.isfinite(seconds)]

    @property
    def num_reached(self) -> int:
        """How many runs reached the target."""
        return sum(map(bool, self.reached))

    @property
    def all_reached(self) -> bool:
        """Whether there are runs and all of them reached the target."""
        return bool(self.reached) and self.num_reached == len(self.reached)

    @property
    def mean_seconds(self) -> float | None:
        """Mean time over the runs: a lower bound unless all of them reached the target; None without a time."""
        times = [seconds for seconds, _ in self.runs]
        return math.fsum(times) / len(times) if times else None


@dataclass(frozen=True, kw_only=True)
class ConfirmationFigures:
    """The arms of a confirmation and how much faster the exported one is."""

    arms: Sequence[ArmTimes]
    """The baseline first, then what is exported, then any others."""
    ratio: float | None
    """The baseline's time over the exported one's; None where it was not measured."""
    low: float | None
    """Lower end of the ratio's interval."""
    high: float | None
    """Upper end of the ratio's interval."""


def describe_arm(arm: ArmTimes) -> str:
    """One arm's mean and count in words, such as ``10.5 s (mean of 13 runs)``."""
    mean, num_runs = arm.mean_seconds, len(arm.reached)
    if num_runs == 0 or mean is None:
        return "no confirmation runs"
    runs = "1 run" if num_runs == 1 else f"mean of {num_runs} runs"
    if arm.all_reached:
        return f"{format_seconds(mean)} ({runs})"
    return f"at least {format_seconds(mean)} ({runs}, {arm.num_reached} reached the target)"


def describe_ratio(baseline: ArmTimes, best: ArmTimes, ratio: float | None, low: float | None, high: float | None) -> str:
    """The speed-up in words, with its interval where there is one.

    Runs of the baseline that never reached the target make the ratio a lower bound. Runs of the best that did not reach it
    leave nothing to claim.
    """
    if ratio is None or not math.isfinite(ratio):
        return "not measured"
    if not best.all_reached:
        return f"not claimed, since {best.num_reached} of {len(best.reached)} runs of {best.label} reached the target"
    text = f"{ratio:.2f}x" if baseline.all_reached else f"at least {ratio:.2f}x"
    return text if low is None or high is None else f"{text} (interval {low:.2f}x to {high:.2f}x)"


def format_seconds(seconds: float) -> str:
    """A duration as a person reads it: ``0.123 s``, ``12.3 s``, ``12 min 05 s``, ``3 h 07 min``."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 600:
        digits = 3 if seconds < 1 else 2 if seconds < 10 else 1
        return f"{seconds:.{digits}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
