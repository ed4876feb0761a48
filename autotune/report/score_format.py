"""What a study's scores are told in: the objective's quantity and unit, in words and numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from autotune.measurement import Evaluation, TrialResult
from autotune.objective import BoundedObjective, Objective


@dataclass(frozen=True, kw_only=True)
class ScoreFormat:
    """How scores of one objective are told."""

    quantity: str
    unit: str
    """Empty for one that has none."""
    lower_bound: Callable[[Evaluation], float] | None
    """What a trial that fell short had spent, in the same unit; None where the objective does not tell."""

    @property
    def is_time(self) -> bool:
        """Whether scores are seconds."""
        return self.unit == "s"

    @property
    def gain(self) -> str:
        """What the baseline's score over another one's is called."""
        return "speed-up" if self.is_time else "gain"

    @property
    def description(self) -> str:
        """Quantity and unit."""
        return f"{self.quantity} ({self.unit})" if self.unit else self.quantity

    @property
    def axis_label(self) -> str:
        """The same, as it stands beside an axis."""
        return self.description[:1].upper() + self.description[1:]

    def spent(self, result: TrialResult) -> float | None:
        """What bounds the score of a trial that fell short from below; None where nothing does."""
        if result.last is None or self.lower_bound is None:
            return None
        bound = self.lower_bound(result.last)
        return bound if math.isfinite(bound) else None

    def format(self, score: float) -> str:
        """A score as a person reads it: ``12.3 s``, ``1,230 J``, ``0.0123 USD``."""
        if self.is_time:
            return format_seconds(score)
        if not math.isfinite(score):
            return "unknown"
        number = f"{score:,.0f}" if score >= 1000 else f"{score:.3g}"
        return f"{number} {self.unit}".rstrip()


SECONDS = ScoreFormat(quantity="time to target", unit="s", lower_bound=lambda evaluation: evaluation.warm_seconds)
"""Seconds, where no objective is known: what prepare and train took."""


def score_format_of(objective: Objective) -> ScoreFormat:
    """How an objective's scores are told; one that says no quantity has scores."""
    return ScoreFormat(
        quantity=getattr(objective, "quantity", "score"),
        unit=getattr(objective, "unit", ""),
        lower_bound=objective.lower_bound if isinstance(objective, BoundedObjective) else None,
    )


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
