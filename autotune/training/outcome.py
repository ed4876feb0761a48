"""How an evaluation ends a training, whoever wrote the loop."""

import math

from autotune.measurement import Target
from autotune.outcome import Outcome


def outcome_of(
    target: Target,
    metric: float,
    loss: float,
    train_seconds: float,
    prepare_seconds: float,
    cap_seconds: float,
    *,
    ended: bool,
    counts: bool = True,
) -> Outcome | None:
    """What an evaluation ends a training with, None where it goes on.

    ``loss`` is the mean validation loss: NaN counts as divergence, so give 0 where there is none. ``ended`` says that the
    schedule has no step left, ``counts`` that an evaluation at or past the target is one.
    """
    if not (math.isfinite(metric) and math.isfinite(loss)):
        return Outcome.DIVERGED
    if train_seconds > target.max_train_seconds:
        return Outcome.TIMED_OUT
    if counts and target.reached_by(metric):
        return Outcome.REACHED
    if prepare_seconds + train_seconds > cap_seconds:
        return Outcome.CAPPED
    return Outcome.MISSED if ended else None


def as_measured(metric: float) -> float:
    """A metric to the seven digits that float32 holds: 0.9 computed in float32 lies below 0.9 and would miss that target."""
    return float(f"{metric:.7g}")
