"""The contract between who plans the runs of a study and who makes them.

A policy (the search's scheduler, a confirmation race, a comparison) is asked what to do next and
told what came of it. Whoever makes the runs (Ray Tune, or a replay of recorded curves) does so in
one way, whatever they are for.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, TypeAlias

from autotune.errors import AutotuneError
from autotune.measurement import Evaluation, LearningCurve, TrialResult
from autotune.redaction import without_secrets_in
from autotune.space import Suggestion

SEARCH, CONFIRM, COMPARE = "search", "confirm", "compare"
"""The phases that a run may be part of."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training that is to be made: a configuration with a seed."""

    number: int
    """Number that tells the runs of a policy apart; in a search, the trial's."""
    name: str
    """Name of the run, unique within the study, such as ``trial-7``, ``confirm-7-1`` or ``a-1``."""
    suggestion: Suggestion
    """The point of the search space; in a comparison, the values of what is compared."""
    seed: int
    phase: str = SEARCH
    """What the run is part of."""
    trial: int = 0
    """Number of the trial whose configuration is trained; in a comparison, number of the pair."""
    round: int = 0
    """Number of the round, whose runs share a seed; always 0 in a search."""
    overrides: tuple[str, ...] = ()
    """What distinguishes the configuration, as Hydra overrides without secrets."""
    make_config: Callable[[], Mapping[str, Any]] = dict
    """Composes the resolved configuration, which may take milliseconds."""
    started_at: float = 0.0
    """Unix time at which a worker first began the run; 0 before."""
    cap_seconds: float = math.inf
    """Warm seconds after which the run cannot win."""
    is_baseline: bool = False
    """Whether a trial trains the baseline: the experiment's configuration with no parameter
    varied."""
    retry_of: int | None = None
    """Number of the trial of the same point whose times were spoilt, which this one repeats."""
    may_have_begun: bool = False
    """Whether an earlier process may have begun the run, which then continues from its state."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", without_secrets_in(self.overrides))

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """Value of each varied parameter, by config key, without secrets."""
        values: Mapping[str, Any] = without_secrets_in(self.suggestion.values)
        return values

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The resolved configuration, without secrets."""
        config: Mapping[str, Any] = without_secrets_in(self.make_config())
        return config


@dataclass(frozen=True)
class Start:
    """Begin a new run."""

    trial: Run
    following: tuple[Run, ...] = ()
    """Runs that the same worker makes after it, one after another, unless one of them fails."""


@dataclass(frozen=True)
class Resume:
    """Continue a run that was paused, or lost with its worker."""

    trial: Run
    following: tuple[Run, ...] = ()
    """See ``Start.following``."""


@dataclass(frozen=True)
class Wait:
    """Nothing to train until a run at work reports or ends."""


@dataclass(frozen=True)
class Done:
    """The policy has ended: nothing runs, and nothing will be started or resumed. With an error,
    runs at work end at their next report.
    """

    reason: Literal["budget", "exhausted", "not worth", "error"]
    """``exhausted``: every point of the space was tried; ``not worth``: further trials cost more
    than they save; ``error``: see ``Policy.error``."""


Answer: TypeAlias = Start | Resume | Wait | Done


class Decision(StrEnum):
    """What a policy or stopping rule decides about a run at work."""

    CONTINUE = "CONTINUE"
    CAP = "CAP"
    """End the trial, since it can no longer beat the incumbent."""
    STOP = "STOP"
    """End the trial, since it is not worth continuing, though it might still win."""
    PAUSE = "PAUSE"
    """Suspend the trial, since another one promises more now; it may be resumed later from its
    state."""


class Policy:
    """Base of what plans runs, and is told what came of them; a run is known by its number until it
    ends.

    A policy must define the methods that raise ``NotImplementedError`` here. Those that do nothing
    are for policies that pause runs, or keep their evaluations.
    """

    error: AutotuneError | None = None
    """Why no further run is worth beginning; None while runs may go on."""
    begun: Sequence[tuple[Run, LearningCurve]] = ()
    """Runs that an earlier process began and did not end, with their evaluations."""
    is_everywhere: Callable[[Collection[str | None]], bool] = staticmethod(lambda devices: True)
    """Whether runs that failed on these devices would fail on any: set by who knows the devices."""
    seconds_left: Callable[[], float] = staticmethod(lambda: math.inf)
    """Seconds after which no run goes on: set by who keeps a time budget."""

    def suggest(self) -> Answer:
        """What a free worker does next."""
        raise NotImplementedError

    def finish(self, result: TrialResult, curve: LearningCurve | None = None) -> float | None:
        """Record how a run ended, whose number is ``result.trial``, and return its score; None
        unless it REACHED the target.

        Args:
            curve: the result's evaluations with their numbers, of a run that had more than are
                kept.
        """
        raise NotImplementedError

    def lost(self, number: int, *, most: int, has_progressed: bool) -> bool:
        """Have a run that was lost with its worker resumed.

        Return False if it was already resumed ``most`` times in a row without progress.
        """
        raise NotImplementedError

    def retry(self, number: int, *, most: int) -> bool:
        """Have a run made again whose times were spoilt.

        Return False if it was already made again ``most`` times: nothing has changed then.
        """
        raise NotImplementedError

    def interrupt(self, number: int) -> None:
        """Take a run back that has not ended; when it is planned again, it continues from its last
        state.
        """
        raise NotImplementedError

    def reject(self, number: int, reason: str) -> None:
        """Withdraw a run that cannot be made on these machines."""
        raise NotImplementedError

    def observe(self, number: int, evaluation: Evaluation, *, may_pause: bool = True) -> Decision:
        """Decide whether a run continues after an evaluation."""
        return Decision.CONTINUE

    def store(self, number: int, curve: LearningCurve) -> None:
        """Keep the evaluations of a run at work, so that another process can continue it."""

    def pause(self, number: int, curve: LearningCurve) -> None:
        """Note that a run is being paused, with its evaluations."""

    def unpause(self, number: int) -> None:
        """Note that a run which was to be paused continues, since it could not be saved."""

    def rewind(self, number: int, curve: LearningCurve) -> None:
        """Note the evaluations that a run continues from: later ones were lost."""


def search_name(trial: int) -> str:
    """Name of the run of a search trial."""
    return f"trial-{trial}"


def confirmation_name(trial: int, round_number: int) -> str:
    """Name of a confirmation run of a trial's configuration."""
    return f"confirm-{trial}-{round_number}"
