"""What further trials are expected to bring, and to cost, by what a search's trials have brought so
far.

With ``n`` trials so far, of which the ``first``-th was the first to reach the target, the best
score is expected to fall by the factor
``exp(-gain)`` over ``m`` further trials::

    gain = FACTOR * (1 + log2(n / first)) ** FADE * log2(1 + m / n)

The constants are fitted to searches over recorded learning curves (``python -m
benchmarks.outlook``): each doubling of a search brings less than the one before. What a search
gained so far, or how long ago its best trial was, tells nothing more there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from autotune.measurement import Evaluation
from autotune.objective import BoundedObjective, Objective, Pareto

FACTOR, FADE = 0.65, -1.1
"""Constants of the formula above."""
NUM_AHEAD = 20
"""Number of further trials that are judged together."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What ``NUM_AHEAD`` further trials are expected to bring, and to cost."""

    gain: float
    """Share by which the best score is expected to fall: 0.03 for 3%."""
    saving: float
    """What a training with the best configuration is expected to save thereby, in the
    objective's unit."""
    cost: float
    """What the trials are expected to spend, in the objective's unit."""
    device_seconds: float
    """Seconds of training that the trials are expected to take, times the devices of each."""

    @property
    def num_trainings(self) -> float:
        """Trainings after which the trials have paid for themselves."""
        return self.cost / self.saving if self.saving else math.inf


def has_costs(objective: Objective) -> TypeGuard[BoundedObjective]:
    """Whether scores are what a training spends, so that they can be weighed against the
    search's own cost.
    """
    return isinstance(objective, BoundedObjective) and not isinstance(objective, Pareto)


def outlook(
    objective: Objective,
    last: Mapping[int, Evaluation],
    scores: Mapping[int, float],
) -> Outlook | None:
    """What ``NUM_AHEAD`` further trials are expected to bring.

    None while no trial has reached the target, or if scores are no costs.

    Args:
        last: the last evaluation of every trial that has been evaluated, by trial number.
        scores: the score of every trial that reached the target.
    """
    if not scores or not has_costs(objective):
        return None
    first = next(position for position, trial in enumerate(sorted(last), 1) if trial in scores)
    share = -math.expm1(-expected_gain(len(last), first=first, num_trials=NUM_AHEAD))
    costs = [objective.lower_bound(evaluation) for evaluation in last.values()]
    seconds = [
        (evaluation.warm_seconds + evaluation.spent_build_seconds) * evaluation.num_workers
        for evaluation in last.values()
    ]
    cost, device_seconds = (
        math.fsum(amounts) / len(last) * NUM_AHEAD for amounts in (costs, seconds)
    )
    return Outlook(
        gain=share,
        saving=share * min(scores.values()),
        cost=cost,
        device_seconds=device_seconds,
    )


def expected_gain(num_tried: int, *, first: int, num_trials: int) -> float:
    """Logarithm of the factor by which the best score is expected to fall over ``num_trials``
    further trials.

    Args:
        first: position, from 1, of the first of the ``num_tried`` trials that reached the target.
    """
    doublings = math.log2(num_tried / first)
    return FACTOR * math.pow(1 + doublings, FADE) * math.log2(1 + num_trials / num_tried)
