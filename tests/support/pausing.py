"""A sampler that pauses, so simple that what comes of it is known."""

import math
from collections.abc import Sequence
from typing import Any

from autotune.measurement import Evaluation
from autotune.policy import Decision
from autotune.search.samplers import PausingSampler
from autotune.space import Suggestion


class PausesAtFirst(PausingSampler):
    """Pauses every trial at its first evaluation, and takes them up in turn when there is no new
    point.
    """

    def __init__(self, points: Sequence[Suggestion]) -> None:
        self.waiting: list[int] = []
        self.best = math.inf
        self._points = iter(points)

    def propose(self, *, new: bool = True) -> Suggestion | int | None:
        point = next(self._points, None) if new else None
        if point is not None:
            return point
        return self.waiting.pop(0) if self.waiting else None

    def paused(
        self, number: int, suggestion: Suggestion, evaluations: Sequence[Evaluation]
    ) -> None:
        self.waiting.append(number)

    def resumed(self, number: int) -> None:
        self.forget(number)

    def observe(
        self, number: int, evaluation: Evaluation, *, new: bool = True, may_pause: bool = True
    ) -> Decision:
        if evaluation.step > 1 or not may_pause:
            return Decision.CONTINUE
        self.waiting.append(number)
        return Decision.PAUSE

    def finish(self, result: Any, score: float | None) -> None:
        self.best = min(self.best, math.inf if score is None else score)

    def forget(self, number: int) -> None:
        if number in self.waiting:
            self.waiting.remove(number)

    def score_to_beat(self, number: int) -> float:
        return self.best
