"""The time limit of a training, at which all ranks end at the same step."""

from autotune.measurement import Phase, PhaseClock
from autotune.training.parallel.ranks import Ranks

_SHARE_LEFT = 0.5
"""Share of the steps that fit into the time left, after which the first rank's clock is read again."""
_MOST_STEPS = 1000
"""Upper limit on the steps between two readings of the first rank's clock, since steps may become longer."""


class TimeLimit:
    """A limit on the train seconds of the first rank's clock.

    Asking the first rank in every step would cost as much as a small step. It is asked when half of the steps are done that fitted into
    the time left when it was last asked: more often near the limit, and about ten times in all.

    Args:
        ranks: the ranks that train together.
        clock: this rank's clock.
        seconds: the limit.
        first_step: step at which this process begins to train.
    """

    def __init__(self, ranks: Ranks, clock: PhaseClock, seconds: float, first_step: int) -> None:
        self._ranks, self._clock, self._seconds = ranks, clock, seconds
        self._first_step, self._next_step = first_step, first_step + 1
        self._seconds_before = clock.seconds(Phase.TRAIN)

    def is_past(self, step: int) -> bool:
        """Whether the limit has passed after ``step`` steps; every rank gets the same answer."""
        if self._ranks.size == 1:
            return self._clock.seconds(Phase.TRAIN) > self._seconds
        if step < self._next_step:
            return False
        is_past, self._next_step = self._ranks.broadcast_from_first(self._verdict(step))
        return bool(is_past)

    def _verdict(self, step: int) -> tuple[bool, int]:
        """Whether this rank's clock is past the limit, and the step after which to ask again."""
        spent = self._clock.seconds(Phase.TRAIN)
        step_seconds = max(1e-6, (spent - self._seconds_before) / (step - self._first_step))
        num_steps = min(_MOST_STEPS, max(0.0, self._seconds - spent) / step_seconds * _SHARE_LEFT)
        return spent > self._seconds, step + max(1, int(num_steps))
