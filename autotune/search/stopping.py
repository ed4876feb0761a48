"""Stopping rules: whether a running trial goes on.

Contract of ``stopping:`` in the configuration: an object with ``observe(trial, evaluation) -> Decision``. A rule may also have
``finish(result, score)``, called when a trial ended, and ``cap_seconds()``, warm seconds at which the worker itself ends a
trial. ``objective`` is passed to a rule whose signature has it.
"""

import math
from enum import StrEnum
from typing import Protocol

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, TrialResult
from autotune.objective import AmortisedTime, BoundedObjective, DeviceSeconds, Objective


class Decision(StrEnum):
    """What happens to a running trial."""

    CONTINUE = "CONTINUE"
    CAP = "CAP"
    """It can no longer beat the best trial so far."""
    STOP = "STOP"
    """It is not worth going on, though it might win."""
    PAUSE = "PAUSE"
    """Another one promises more now; it may go on later from where it stands."""


class StoppingRule(Protocol):
    """What a stopping rule must have."""

    def observe(self, trial: int, evaluation: Evaluation) -> Decision:
        """Whether the trial goes on after this evaluation."""
        ...


class NeverStop:
    """Every trial runs to its target, its schedule's end or its time limit."""

    def observe(self, trial: int, evaluation: Evaluation) -> Decision:
        """Always goes on."""
        return Decision.CONTINUE


class CapAtIncumbent:
    """Stops a trial once its score can only be worse than the best so far: no winner is lost by it.

    ``cap_margin`` times the best score is the cap: 1 where timing is quiet, more where it is noisy. An objective without
    ``lower_bound`` is never capped.

    Raises:
        ConfigError: ``cap_margin`` is below 1.
    """

    def __init__(self, *, objective: Objective, cap_margin: float) -> None:
        if not cap_margin >= 1:
            raise ConfigError(f"stopping.cap_margin: found {cap_margin}, accepted is a number from 1")
        self._objective = objective if isinstance(objective, BoundedObjective) else None
        self._margin = cap_margin
        self._cap = math.inf

    def observe(self, trial: int, evaluation: Evaluation) -> Decision:
        """Cap a trial whose least possible score is past the cap."""
        if self._objective is not None and self._objective.lower_bound(evaluation) > self._cap:
            return Decision.CAP
        return Decision.CONTINUE

    def finish(self, result: TrialResult, score: float | None) -> None:
        """Learn a trial's score, None where it has none."""
        if score is not None:
            self._cap = min(self._cap, score * self._margin)

    def cap_seconds(self) -> float:
        """Warm seconds that no winner can take; infinite for an objective that is not known to count seconds."""
        return self._cap if isinstance(self._objective, AmortisedTime | DeviceSeconds) else math.inf
