"""Stopping rules: whether a running trial goes on.

Contract of ``stopping:`` in the configuration: an object with ``observe(trial, evaluation) -> Decision``. A rule may also have
``finish(result, score)``, called when a trial has ended, ``cap_seconds(trial)``, the warm seconds after which the worker itself ends a
trial, and ``must_beat(trial, score)``, called with the score that a trial must beat if the sampler models expected scores. ``objective``
is passed to a rule whose signature has it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from autotune.config.build import accepted_arguments, build_partial, call
from autotune.errors import ConfigError
from autotune.measurement import Evaluation, TrialResult
from autotune.objective import AmortisedTime, BoundedObjective, DeviceSeconds, Objective
from autotune.search.expected_scores import Key, RunningTime, spent_by
from autotune.space import Suggestion


class Decision(StrEnum):
    """What a policy or stopping rule decides about a running trial."""

    CONTINUE = "CONTINUE"
    CAP = "CAP"
    """End the trial, since it can no longer beat the incumbent."""
    STOP = "STOP"
    """End the trial, since it is not worth going on, though it might still win."""
    PAUSE = "PAUSE"
    """Suspend the trial, since another one promises more now; it may be resumed later from its state."""


class StoppingRule(Protocol):
    """The interface that every stopping rule must have."""

    def observe(self, trial: int, evaluation: Evaluation) -> Decision:
        """Decide whether a trial goes on after an evaluation."""
        ...


class CompleteRule:
    """A stopping rule with defaults for the methods that it need not have; it is told the score to beat before each of its answers.

    Args:
        score_to_beat: score that a trial must beat by now; None for a sampler that has no model of it.
    """

    def __init__(self, rule: StoppingRule, score_to_beat: Callable[[int], float] | None) -> None:
        self._score_to_beat = score_to_beat
        self._observe = rule.observe
        self._cap_seconds: Callable[[int], float] = getattr(rule, "cap_seconds", lambda trial: math.inf)
        self._must_beat: Callable[[int, float], None] | None = getattr(rule, "must_beat", None)
        self.finish: Callable[[TrialResult, float | None], None] = getattr(rule, "finish", lambda result, score: None)
        """Learns how a trial ended."""

    def observe(self, trial: int, evaluation: Evaluation) -> Decision:
        """Decide whether a trial goes on after an evaluation."""
        self._tell_score_to_beat(trial)
        return self._observe(trial, evaluation)

    def cap_seconds(self, trial: int) -> float:
        """Warm seconds after which a trial cannot win; infinite without a cap."""
        self._tell_score_to_beat(trial)
        return self._cap_seconds(trial)

    def _tell_score_to_beat(self, trial: int) -> None:
        if self._must_beat is not None and self._score_to_beat is not None:
            self._must_beat(trial, self._score_to_beat(trial))


class NeverStop:
    """Lets every trial run to its target, its schedule's end or its time limit."""

    def observe(self, trial: int, evaluation: Evaluation) -> Decision:
        """Always let the trial go on."""
        return Decision.CONTINUE


class CapAtIncumbent:
    """Caps a trial once its score can only be worse than the incumbent's.

    The incumbent is the configuration with the least expected running time over all its runs, so that a lucky run is corrected when its
    configuration is run again. A sampler that models expected scores sets the score that a trial must beat instead. The cap is that score
    times ``cap_margin``, an allowance for noise: 1 where timing is quiet and more where it is not. With an objective without
    ``lower_bound`` no trial is capped.

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
        """Cap a trial whose lower bound on its score is above its cap."""
        if self._objective is not None and self._objective.lower_bound(evaluation) > self._cap(trial):
            return Decision.CAP
        return Decision.CONTINUE

    def must_beat(self, trial: int, score: float) -> None:
        """Set the score that a trial must beat from now on, in place of the incumbent's expected running time."""
        self._to_beat[trial] = score

    def finish(self, result: TrialResult, score: float | None) -> None:
        """Update the incumbent with a trial that ended; ``score`` is None unless it reached the target."""
        self._to_beat.pop(result.trial, None)
        if self._objective is None:
            return
        spent = spent_by(result, self._objective) if score is None else score
        running_time = self._running_times.setdefault(Suggestion(result.values).key, RunningTime())
        was_incumbent = running_time.expected <= self._incumbent
        running_time.add(result.outcome, spent)
        if was_incumbent and running_time.expected > self._incumbent:  # its configuration turned out worse, so another one may be better
            self._incumbent = min(other.expected for other in self._running_times.values())
        else:
            self._incumbent = min(self._incumbent, running_time.expected)

    def cap_seconds(self, trial: int) -> float:
        """Warm seconds that a trial can take and still win; infinite for an objective that does not count seconds."""
        return self._cap(trial) if isinstance(self._objective, AmortisedTime | DeviceSeconds) else math.inf

    def _cap(self, trial: int) -> float:
        return self._to_beat.get(trial, self._incumbent) * self._margin


def make_stopping(node: Mapping[str, Any], allowed: Sequence[str], objective: Objective) -> StoppingRule:
    """Make the stopping rule that ``stopping`` names; the objective is passed if its signature has it.

    Raises:
        ConfigError: the rule cannot be made, or has no ``observe``.
    """
    make = build_partial(node, allowed, "stopping")
    rule = call(make, "stopping", **accepted_arguments(make, {"objective": objective}))
    if not callable(getattr(rule, "observe", None)):
        raise ConfigError(f"stopping: {node['_target_']} has no observe(trial, evaluation)")
    return rule  # type: ignore[no-any-return]  # checked just above
