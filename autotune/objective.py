"""What a search minimises: a number made of one trial's result.

Of two configurations the better one is the one with the lower score. An objective whose score can only grow while a trial
trains also has ``lower_bound``, and then running trials can be stopped at the best score so far.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Outcome, TrialResult


class Objective(Protocol):
    """Contract of ``objective:`` in the configuration."""

    def score(self, result: TrialResult) -> float:
        """The number to minimise, for a result that REACHED the target."""
        ...


@runtime_checkable
class BoundedObjective(Objective, Protocol):
    """An objective that only grows with the time a trial has spent."""

    def lower_bound(self, evaluation: Evaluation) -> float:
        """The least score that a trial can still get, in the unit of ``score``."""
        ...


@dataclass(frozen=True, kw_only=True)
class AmortisedTime:
    """Seconds to target when the exported configuration is trained ``num_trainings`` times by one process.

    Build time (loading, compiling) is paid once by the process and shared by its trainings: with 1 this is the cold time to
    target, with a large number the warm one.

    Raises:
        ConfigError: ``num_trainings`` is less than one.
    """

    num_trainings: int

    def __post_init__(self) -> None:
        if self.num_trainings < 1:
            raise ConfigError(f"objective.num_trainings: found {self.num_trainings}, accepted is a whole number from 1")

    def score(self, result: TrialResult) -> float:
        """Amortised seconds to target.

        Raises:
            ValueError: the trial did not reach the target, so it has no time.
        """
        if result.outcome is not Outcome.REACHED or result.last is None:
            raise ValueError(f"trial {result.trial} ended {result.outcome}: only a trial that REACHED has a time to target")
        return self.lower_bound(result.last)

    def lower_bound(self, evaluation: Evaluation) -> float:
        """Amortised seconds spent up to an evaluation."""
        return evaluation.build_seconds / self.num_trainings + evaluation.warm_seconds
