"""How long a study still takes, with an interval, from the pace of its trials so far."""

import itertools
import math
import statistics
import time
from collections.abc import Callable

_MIN_TRIALS = 5
"""Trials that must have started before the pace of the search is told."""
_Z = 1.645
"""Standard errors of a two-sided 90% interval."""
_PACE_ERROR = 0.15
"""Least relative error of the search's remaining time: later trials are not like earlier ones."""
_CONFIRMATION = (0.5, 2.0)
"""Confirmation takes between half and twice ``confirm.budget_fraction`` of the search's training seconds (a claim may take twice), ..."""
_CONFIRMATION_START = (1.0, 18.0)
"""... and these seconds for starting its runs. The wall seconds of 17 of 18 studies on a CPU lay within."""
_RUNS = (0.6, 1.4)
"""The runs that a confirmation still makes, as multiples of the number planned: it drops and adds some."""


class TimeLeft:
    """Estimates the seconds until a study ends.

    Args:
        num_trials_left: trials that the search may still start; None means no limit.
        seconds_left: seconds of searching that the time budget still holds; None means no limit.
        confirm_fraction: ``confirm.budget_fraction``; None if no confirmation follows, or if it has no limit of time.
        clock: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        *,
        num_trials_left: int | None,
        seconds_left: float | None,
        confirm_fraction: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_trials_left = math.inf if num_trials_left is None else num_trials_left
        self._seconds_left = math.inf if seconds_left is None else seconds_left
        self._confirm_fraction = confirm_fraction
        self._clock = clock
        self._started: list[float] = []
        self._train_seconds = 0.0
        self._confirming: tuple[float, int, int] | None = None

    def started(self) -> None:
        """Note that a new trial starts."""
        self._started.append(self._clock())

    def withdrawn(self) -> None:
        """Note that a trial counts for nothing, such as one whose times were spoilt: another one starts in its place."""
        self._num_trials_left += 1

    def trained(self, seconds: float) -> None:
        """Note seconds of training that a trial has done."""
        self._train_seconds += seconds

    def confirming(self, done: int, total: int) -> None:
        """Note that a confirmation run starts after ``done - 1`` of ``total``, as planned now, have ended."""
        began = self._clock() if self._confirming is None else self._confirming[0]
        self._confirming = began, done, total

    @property
    def interval(self) -> tuple[float, float] | None:
        """Fewest and most seconds left, about a 90% interval; None while that cannot be told."""
        search, confirmation = self.searching, self.confirmation
        if search is None or confirmation is None:
            return None
        return search[0] + confirmation[0], search[1] + confirmation[1]

    @property
    def searching(self) -> tuple[float, float] | None:
        """Fewest and most seconds left of the search."""
        if self._confirming is not None:
            return 0.0, 0.0
        budget = max(0.0, self._seconds_left - self._elapsed)
        num_started = len(self._started)
        num_left = max(0.0, self._num_trials_left - num_started)
        if not math.isfinite(num_left):
            return (budget, budget) if math.isfinite(budget) else None
        if num_started < _MIN_TRIALS:
            return None
        gaps = [after - before for before, after in itertools.pairwise(self._started)]
        expected = num_left * statistics.fmean(gaps)
        error = max(_Z * statistics.stdev(gaps) * math.sqrt(num_left + num_left**2 / len(gaps)), _PACE_ERROR * expected)
        return min(budget, max(0.0, expected - error)), min(budget, expected + error)

    @property
    def confirmation(self) -> tuple[float, float] | None:
        """Fewest and most seconds that confirmation runs still take; zeros if there is no confirmation."""
        if self._confirming is not None:
            began, done, total = self._confirming
            run_seconds = (self._clock() - began) / (done - 1) if done > 1 else math.nan
            return None if done == 1 else (_RUNS[0] * (total - done + 1) * run_seconds, _RUNS[1] * (total - done + 1) * run_seconds)
        search = self.searching
        if self._confirm_fraction is None or search is None:
            return 0.0, 0.0
        growth = [1 + seconds / self._elapsed if self._elapsed else 1.0 for seconds in search]
        train_seconds = [self._confirm_fraction * self._train_seconds * factor for factor in growth]
        return (
            _CONFIRMATION[0] * train_seconds[0] + _CONFIRMATION_START[0],
            _CONFIRMATION[1] * train_seconds[1] + _CONFIRMATION_START[1],
        )

    @property
    def _elapsed(self) -> float:
        return self._clock() - self._started[0] if self._started else 0.0
