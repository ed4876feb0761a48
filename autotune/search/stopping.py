"""Stopping rules: whether a running trial goes on.

Contract of ``stopping:`` in the configuration: an object with ``observe(trial, evaluation) -> Decision``. A rule may also have
``finish(result, score)``, called when a trial ended, ``cap_seconds(trial)``, warm seconds at which the worker itself ends a trial, and
``must_beat(trial, score)``, by which a sampler that models what configurations need says what a trial is measured by. ``objective`` is
passed to a rule whose signature has it.
"""

import math
from enum import StrEnum
from typing import Protocol

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, TrialResult
from autotune.objective import AmortisedTime, BoundedObjective, DeviceSeconds, Objective
from autotune.search.expected_scores import Key, RunningTime, spent_by
from autotune.space import Suggestion


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
    """Stops a trial once its score can only be worse than the incumbent's.

    The incumbent is the configuration with the least expected running time over all its runs, so that a lucky run is corrected when its
    configuration is run again. A sampler that models what configurations need says itself what a trial must beat. ``cap_margin`` times
    that score is the cap: what is allowed for noise, 1 where timing is quiet and more where it is not. An objective without
    ``lower_bound`` is never capped.

    Raises:
        ConfigError: ``cap_margin`` is below 1.
    """

    def __init__(self, *, objective: Objective, cap_margin: float) -> None:
        if not cap_margin >= 1:
            raise ConfigError(f"stopping.cap_margin: found {cap_margin}, accepted is a number from 1")
        self._objective = objective if isinstance(objective, BoundedObjective) else None
        self._margin = cap_margin
        self._running_times: dict[Key, RunningTime] = {}
        self._incumbent = math.inf
        self._to_beat: dict[int, float] = {}

    def observe(self, trial: int, evaluation: Evaluation) -> Decision:
        """Cap a trial whose least possible score is past its cap."""
        if self._objective is not None and self._objective.lower_bound(evaluation) > self._cap(trial):
            return Decision.CAP
        return Decision.CONTINUE

    def must_beat(self, trial: int, score: float) -> None:
        """What a trial is measured by from now on, in place of the incumbent's expected running time."""
        self._to_beat[trial] = score

    def finish(self, result: TrialResult, score: float | None) -> None:
        """Learn how a trial ended, and its score, None where it has none."""
        self._to_beat.pop(result.trial, None)
        if self._objective is None:
            return
        spent = spent_by(result, self._objective) if score is None else score
        self._running_times.setdefault(Suggestion(result.values).key, RunningTime()).add(result.outcome, spent)
        self._incumbent = min(each.expected for each in self._running_times.values())

    def cap_seconds(self, trial: int) -> float:
        """Warm seconds that a trial can take and still win; infinite for an objective that is not known to count seconds."""
        return self._cap(trial) if isinstance(self._objective, AmortisedTime | DeviceSeconds) else math.inf

    def _cap(self, trial: int) -> float:
        return self._to_beat.get(trial, self._incumbent) * self._margin
