"""What further trials are expected to bring, and to cost, by what a search's trials have brought so far.

With ``n`` trials so far, of which the ``first``-th was the first to reach the target, the best score is expected to fall by the factor
``exp(-gain)`` over ``m`` further trials::

    gain = FACTOR * (1 + log2(n / first)) ** FADE * log2(1 + m / n)

The constants are fitted to searches over recorded learning curves (``python -m benchmarks.outlook``): each doubling of a search brings
less than the one before. What a search gained so far, or how long ago its best trial was, tells nothing more there.
"""

import math
from dataclasses import dataclass

from autotune.measurement import Evaluation
from autotune.objective import BoundedObjective, Objective, Pareto

FACTOR, FADE = 0.65, -1.1
"""Constants of the formula above."""
NUM_AHEAD = 20
"""Number of further trials that are judged together."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a number of further trials is expected to bring, and to cost."""

    num_trials: int
    gain: float
    """Share by which the best score is expected to fall: 0.03 for 3%."""
    saving: float
    """What a training with the best configuration is expected to save thereby, in the objective's unit."""
    cost: float
    """What the trials are expected to spend, in the objective's unit."""
    device_seconds: float
    """Seconds of training that the trials are expected to take, times the devices of each."""

    @property
    def num_trainings(self) -> float:
        """Trainings after which the trials have paid for themselves."""
        return self.cost / self.saving if self.saving else math.inf


class SearchHistory:
    """What each trial of a search has spent, and the scores of those that reached the target, by trial number."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective if isinstance(objective, BoundedObjective) and not isinstance(objective, Pareto) else None
        self._spent: dict[int, tuple[float, float]] = {}
        self._scores: dict[int, float] = {}

    @property
    def has_costs(self) -> bool:
        """Whether scores are what a training spends, so that they can be weighed against the search's own cost."""
        return self._objective is not None

    def evaluated(self, trial: int, evaluation: Evaluation) -> None:
        """Take what a trial has spent up to an evaluation."""
        if self._objective is not None:
            spent = self._objective.lower_bound(evaluation)
            self._spent[trial] = spent, (evaluation.warm_seconds + evaluation.spent_build_seconds) * evaluation.num_workers

    def reached(self, trial: int, score: float) -> None:
        """Take the score of a trial that reached the target."""
        self._scores[trial] = score

    def outlook(self, num_trials: int = NUM_AHEAD) -> Outlook | None:
        """What further trials are expected to bring; None while no trial has reached the target, or if scores are no costs."""
        scores = {place: self._scores[trial] for place, trial in enumerate(sorted(self._spent), 1) if trial in self._scores}
        if not scores:
            return None
        num_tried, best = len(self._spent), min(scores.values())
        gain = expected_gain(num_tried, first=min(scores), num_trials=num_trials)
        share = -math.expm1(-gain)
        cost, device_seconds = (math.fsum(amounts) / num_tried * num_trials for amounts in zip(*self._spent.values(), strict=True))
        return Outlook(num_trials=num_trials, gain=share, saving=share * best, cost=cost, device_seconds=device_seconds)


def expected_gain(num_tried: int, *, first: int, num_trials: int) -> float:
    """Logarithm of the factor by which the best score is expected to fall over ``num_trials`` further trials.

    Args:
        first: place, from 1, of the first of the ``num_tried`` trials that reached the target.
    """
    doublings = math.log2(num_tried / first)
    return FACTOR * math.pow(1 + doublings, FADE) * math.log2(1 + num_trials / num_tried)
