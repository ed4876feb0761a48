"""Samplers: made from the configuration, the base of those that pause trials, and how Optuna's
study gets along with either.
"""

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna

from autotune.config.build import build
from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Target, TrialResult
from autotune.objective import Objective
from autotune.policy import Decision
from autotune.search.warm_start import EarlierStudy
from autotune.space import SearchSpace, Suggestion


class PausingSampler:
    """Base of samplers that pause and resume trials.

    The scheduler tells it about every trial and evaluation.

    Optuna's samplers have none of this: for them the scheduler uses the base itself, which never
    pauses, and does not ask it for points.
    """

    can_repeat: Callable[[Suggestion], bool] = staticmethod(lambda suggestion: True)
    """Whether a point that was trained may be proposed again."""
    seconds_left: Callable[[], float] = staticmethod(lambda: math.inf)
    """Seconds after which the search ends, with all trials that have not ended by then."""

    def propose(self, *, new: bool = True) -> Suggestion | int | None:
        """Choose what to train next: a point, if ``new`` trials are wanted, or the number of a
        paused trial; None if neither pays.

        A point that was trained before is trained again with another seed, since its time to target
        is a random draw.

        Once no more new trials are wanted, paused trials that promise nothing need not be resumed.
        """

    def started(self, number: int, suggestion: Suggestion) -> None:
        """Register a new trial; its point is not always the one that was proposed."""

    def observe(
        self, number: int, evaluation: Evaluation, *, new: bool = True, may_pause: bool = True
    ) -> Decision:
        """Decide whether a running trial continues.

        It pauses only with ``may_pause``, and for a new point only with ``new``.
        """
        return Decision.CONTINUE

    def paused(
        self, number: int, suggestion: Suggestion, evaluations: Sequence[Evaluation]
    ) -> None:
        """Register a trial that an earlier process began, so that it can be resumed."""

    def resumed(self, number: int) -> None:
        """Note that a paused trial is trained again."""

    def rewound(self, number: int, evaluations: Sequence[Evaluation]) -> None:
        """Take the evaluations that a trial continues from, in place of those that it had: what it
        trained after its last state is lost.
        """

    def finish(self, result: TrialResult, score: float | None) -> None:
        """Learn from a trial that ended; ``score`` is None unless it reached the target."""

    def forget(self, number: int) -> None:
        """Drop a trial that the policy withdrew: rejected, interrupted or lost with its machine."""

    def rejected(self, suggestion: Suggestion) -> None:
        """Learn that no training can run a point."""

    def expected_scores(self) -> dict[int, float]:
        """Expected score of another run of the same configuration, for every trial that reached
        the target, by trial number.
        """
        return {}

    def score_to_beat(self, number: int) -> float:
        """Score that a running trial must beat to be expected better than the incumbent.

        Past it the trial can be capped.
        """
        raise NotImplementedError


def make_sampler(
    node: Mapping[str, Any],
    allowed: Sequence[str],
    *,
    seed: int,
    space: SearchSpace,
    target: Target,
    objective: Objective,
    earlier: Sequence[EarlierStudy] = (),
) -> object:
    """Make the sampler that ``search.sampler`` names.

    Seed, space, target, objective and earlier are passed if its signature has them.

    Raises:
        ConfigError: the sampler cannot be made.
    """
    quiet_optuna()
    return build(
        node,
        allowed,
        "search.sampler",
        seed=seed,
        space=space,
        target=target,
        objective=objective,
        earlier=earlier,
    )


def optuna_sampler(sampler: object) -> optuna.samplers.BaseSampler:
    """The sampler for Optuna's study: the given one, or an unused stand-in if that pauses trials
    and so proposes points itself.
    """
    if isinstance(sampler, PausingSampler):
        return optuna.samplers.RandomSampler()
    if not isinstance(sampler, optuna.samplers.BaseSampler):
        raise ConfigError(
            f"search.sampler: made {type(sampler).__name__}, must be an Optuna sampler"
        )
    return sampler


def reads_no_reports(sampler: optuna.samplers.BaseSampler) -> bool:
    """Whether a sampler of Optuna's never looks at what trials reported on their way."""
    # consider_pruned_trials of CMA-ES, which has it privately, ranks as TPE does
    return type(sampler) in (optuna.samplers.RandomSampler, optuna.samplers.GPSampler) or (
        type(sampler) is optuna.samplers.CmaEsSampler and not sampler._consider_pruned_trials  # noqa: SLF001
    )


def quiet_optuna() -> None:
    """Keep Optuna's log lines and its warnings about new features off the terminal.

    Call it before a sampler is made.
    """
    optuna.logging.disable_default_handler()
    optuna.logging.enable_propagation()
    optuna.logging.set_verbosity(logging.WARNING)
    # CMA-ES logs a line for every parameter that it samples at random
    logging.getLogger("optuna.samplers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"optuna\..*")
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
