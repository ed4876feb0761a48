"""What a sampler has that pauses trials and takes them up again, where an Optuna sampler only proposes points."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from autotune.measurement import Evaluation, TrialResult
from autotune.search.stopping import Decision
from autotune.space import Suggestion


@runtime_checkable
class PausingSampler(Protocol):
    """A sampler that pauses trials and takes them up again: it is told of every trial and evaluation."""

    def propose(self, *, new: bool = True, ending: bool = False) -> Suggestion | int | None:
        """What to train next: a point, where ``new`` trials are wanted, or the number of a paused trial; None for neither.

        A point that was trained already is trained again, on another seed: what it needs is a draw.

        ``ending`` says that no new one will be wanted: paused trials that promise nothing may be left where they are.
        """
        ...

    def started(self, number: int, suggestion: Suggestion) -> None:
        """A point is trained; not always the one that was proposed."""
        ...

    def observe(self, number: int, evaluation: Evaluation, *, new: bool = True, may_pause: bool = True) -> Decision:
        """Whether a running trial goes on or pauses; for a ``new`` point only where one may be begun, and never where it may not."""
        ...

    def paused(self, number: int, suggestion: Suggestion, evaluations: Sequence[Evaluation]) -> None:
        """A trial that an earlier process paused waits to be taken up again."""
        ...

    def finish(self, result: TrialResult, score: float | None) -> None:
        """A trial ended; ``score`` where it reached the target."""
        ...

    def forget(self, number: int) -> None:
        """A trial was taken back."""
        ...

    def rejected(self, suggestion: Suggestion) -> None:
        """A point that no training can run."""
        ...

    def repeats_where(self, can_repeat: Callable[[Suggestion], bool]) -> None:
        """Points are trained again only where this says that they can be; else all can."""
        ...

    def expected_scores(self) -> Mapping[int, float]:
        """The expected score of the configuration of every trial that reached the target, if it is trained again, by trial number."""
        ...

    def to_beat(self, number: int) -> float:
        """The score at which a running trial need not go on: what it must beat to be expected better than the incumbent."""
        ...


def pausing_sampler(sampler: object) -> PausingSampler | None:
    """The sampler, where it is one that pauses trials."""
    return sampler if isinstance(sampler, PausingSampler) else None
