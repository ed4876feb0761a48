"""Decides whether an evaluation ends a training, and with which outcome: for autotune's loop and for the user's."""

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
    """Outcome with which an evaluation ends the training; None if the training continues.

    ``loss`` is the mean validation loss: NaN counts as divergence, so pass 0 if there is no loss. ``ended`` says that the
    schedule has no step left; ``counts`` says that an evaluation at or past the target reaches it.
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
    """The metric rounded to the seven digits that float32 holds; otherwise 0.9 computed in float32 would miss a target of 0.9."""
    return float(f"{metric:.7g}")
