"""The display of a study's scores: the objective's quantity and unit, and scores and durations as text."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from autotune.measurement import Evaluation, TrialResult
from autotune.objective import BoundedObjective, Objective


@dataclass(frozen=True, kw_only=True)
class ScoreFormat:
    """The format in which the scores of one objective are displayed."""

    quantity: str
    unit: str
    """The unit of scores; empty if they have none."""
    lower_bound: Callable[[Evaluation], float] | None
    """What a trial had spent at an evaluation, in ``unit``, as a lower bound on its score; None if the objective has no such bound."""

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

    def spent(self, result: TrialResult) -> float | None:
        """Lower bound on the score of a trial that fell short of the target; None if there is no finite one."""
        if result.last is None or self.lower_bound is None:
            return None
        bound = self.lower_bound(result.last)
        return bound if math.isfinite(bound) else None

    def format(self, score: float) -> str:
        """A score with its unit for display, such as ``12.3 s``, ``1,230 J`` or ``0.0123 USD``."""
        if self.is_time:
            return format_seconds(score)
        if not math.isfinite(score):
            return "unknown"
        number = f"{score:,.0f}" if score >= 1000 else f"{score:.3g}"
        return f"{number} {self.unit}".rstrip()


SECONDS = ScoreFormat(quantity="time to target", unit="s", lower_bound=lambda evaluation: evaluation.warm_seconds)
"""The format for time to target in seconds of prepare and train, used if no objective is known."""


def score_format_of(objective: Objective) -> ScoreFormat:
    """The format of an objective's scores; the quantity is called "score" if the objective does not name one."""
    return ScoreFormat(
        quantity=getattr(objective, "quantity", "score"),
        unit=getattr(objective, "unit", ""),
        lower_bound=objective.lower_bound if isinstance(objective, BoundedObjective) else None,
    )


def format_seconds(seconds: float) -> str:
    """A duration for display, such as ``0.123 s``, ``12.3 s``, ``12 min 05 s`` or ``3 h 07 min``."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 600:
        digits = 3 if seconds < 1 else 2 if seconds < 10 else 1
        return f"{seconds:.{digits}f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
