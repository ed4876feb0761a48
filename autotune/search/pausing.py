"""The interface of a sampler that pauses and resumes trials, where an Optuna sampler only proposes points."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from autotune.measurement import Evaluation, TrialResult
from autotune.search.stopping import Decision
from autotune.space import Suggestion


@runtime_checkable
class PausingSampler(Protocol):
    """A sampler that pauses and resumes trials; the policy tells it about every trial and evaluation."""

    def propose(self, *, new: bool = True, ending: bool = False) -> Suggestion | int | None:
        """Choose what to train next: a point, if ``new`` trials are wanted, or the number of a paused trial; None if neither pays.

        A point that was trained before is trained again with another seed, since its time to target is a random draw.

        ``ending`` says that no more new trials will be wanted: paused trials that promise nothing need not be resumed.
        """
        ...

    def started(self, number: int, suggestion: Suggestion) -> None:
        """Register a new trial; its point is not always the one that was proposed."""
        ...

    def observe(self, number: int, evaluation: Evaluation, *, new: bool = True, may_pause: bool = True) -> Decision:
        """Decide whether a running trial goes on; it pauses only with ``may_pause``, and for a new point only with ``new``."""
        ...

    def paused(self, number: int, suggestion: Suggestion, evaluations: Sequence[Evaluation]) -> None:
        """Register a trial that an earlier process paused, so that it can be resumed."""
        ...

    def finish(self, result: TrialResult, score: float | None) -> None:
        """Learn from a trial that ended; ``score`` is None unless it reached the target."""
        ...

    def forget(self, number: int) -> None:
        """Drop a trial that the policy withdrew: rejected, interrupted or lost with its machine."""
        ...

    def rejected(self, suggestion: Suggestion) -> None:
        """Learn that no training can run a point."""
        ...

    def restrict_repeats(self, can_repeat: Callable[[Suggestion], bool]) -> None:
        """Restrict repeats to the points for which ``can_repeat`` is true; without this call every point can be repeated."""
        ...

    def expected_scores(self) -> Mapping[int, float]:
        """Expected score of another run of the same configuration, for every trial that reached the target, by trial number."""
        ...

    def to_beat(self, number: int) -> float:
        """Score that a running trial must beat to be expected better than the incumbent; past it the trial need not go on."""
        ...


def pausing_sampler(sampler: object) -> PausingSampler | None:
    """The sampler if it pauses trials, else None."""
    return sampler if isinstance(sampler, PausingSampler) else None
