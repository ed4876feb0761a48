"""Stopping rules: whether a running trial continues."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.config.build import build
from autotune.errors import ConfigError
from autotune.measurement import Evaluation, TrialResult
from autotune.objective import AmortisedTime, BoundedObjective, DeviceSeconds, Objective
from autotune.policy import Decision


class StoppingRule:
    """Base of what ``stopping:`` names in the configuration: it lets every trial run.

    ``objective`` is passed to rules that take it.
    """

    score_to_beat: Callable[[int], float] = staticmethod(lambda trial: math.inf)
    """Score that a trial must beat to be expected better than the incumbent, by its number; set by
    the scheduler."""

    def observe(self, trial: int, evaluation: Evaluation) -> Decision:
        """Decide whether a trial continues after an evaluation."""
        return Decision.CONTINUE

    def finish(self, result: TrialResult, score: float | None) -> None:
        """Learn how a trial ended; ``score`` is None unless it reached the target."""

    def cap_seconds(self, trial: int) -> float:
        """Warm seconds after which the worker itself ends a trial, which can then not win.

        Infinite without a cap.
        """
        return math.inf


class NeverStop(StoppingRule):
    """Lets every trial run to its target, its schedule's end or its time limit."""


class CapAtIncumbent(StoppingRule):
    """Caps a trial once its score can only be worse than the incumbent's.

    The incumbent is the configuration with the least expected score over all its runs, so that a
    lucky run is corrected when its configuration is run again. The cap is the score that a trial
    must beat times ``cap_margin``, an allowance for noise: 1 where timing is quiet and more where
    it is not. With an objective without ``lower_bound`` no trial is capped.

    Raises:
        ConfigError: ``cap_margin`` is below 1.
    """

    def __init__(self, *, objective: Objective, cap_margin: float) -> None:
        if not cap_margin >= 1:
            raise ConfigError(f"stopping.cap_margin: found {cap_margin}, must be a number from 1")
        self._objective = objective if isinstance(objective, BoundedObjective) else None
        self._margin = cap_margin

    def observe(self, trial: int, evaluation: Evaluation) -> Decision:
        """Cap a trial whose lower bound on its score is above its cap."""
        if self._objective is None:
            return Decision.CONTINUE
        is_past = self._objective.lower_bound(evaluation) > self._cap(trial)
        return Decision.CAP if is_past else Decision.CONTINUE

    def cap_seconds(self, trial: int) -> float:
        """Warm seconds that a trial can take and still win.

        Infinite for an objective that does not count seconds.
        """
        counts_seconds = isinstance(self._objective, AmortisedTime | DeviceSeconds)
        return self._cap(trial) if counts_seconds else math.inf

    def _cap(self, trial: int) -> float:
        return self.score_to_beat(trial) * self._margin


def make_stopping(
    node: Mapping[str, Any], allowed: Sequence[str], objective: Objective
) -> StoppingRule:
    """Make the stopping rule that ``stopping`` names.

    The objective is passed if its signature has it.

    Raises:
        ConfigError: the rule cannot be made, or is no ``StoppingRule``.
    """
    rule = build(node, allowed, "stopping", objective=objective)
    if not isinstance(rule, StoppingRule):
        raise ConfigError(
            f"stopping: {node['_target_']} must be a subclass of"
            " autotune.search.stopping.StoppingRule"
        )
    return rule
