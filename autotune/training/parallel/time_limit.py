"""When a training's time is over, for all ranks at the same step."""

from autotune.measurement import Phase, PhaseClock
from autotune.training.parallel.ranks import Ranks

_SHARE_LEFT = 0.5
"""Of the steps that the time left is enough for, after how many the first rank is asked again."""
_MOST_STEPS = 1000
"""Between two times that it is asked: steps may become longer."""


class TimeLimit:
    """Whether the first rank's train seconds are past a limit.

    To ask it in every step would cost as much as a small step. It is asked when half of the steps are done that the time left was
    enough for: the nearer the limit, the more often, and some ten times in all.

    Args:
        ranks: those that train together.
        clock: this rank's.
        seconds: the limit.
        first_step: where this process begins.
    """

    def __init__(self, ranks: Ranks, clock: PhaseClock, seconds: float, first_step: int) -> None:
        self._ranks, self._clock, self._seconds = ranks, clock, seconds
        self._first_step, self._next_step = first_step, first_step + 1
        self._before = clock.seconds(Phase.TRAIN)

    def is_past(self, step: int) -> bool:
        """Whether it is, after so many steps; every rank is given the same answer."""
        if self._ranks.size == 1:
            return self._clock.seconds(Phase.TRAIN) > self._seconds
        if step < self._next_step:
            return False
        is_past, self._next_step = self._ranks.agreed(self._verdict(step))
        return bool(is_past)

    def _verdict(self, step: int) -> tuple[bool, int]:
        spent = self._clock.seconds(Phase.TRAIN)
        each = max(1e-6, (spent - self._before) / (step - self._first_step))
        enough = min(_MOST_STEPS, max(0.0, self._seconds - spent) / each * _SHARE_LEFT)
        return spent > self._seconds, step + max(1, int(enough))
