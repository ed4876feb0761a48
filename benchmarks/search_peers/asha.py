"""Asynchronous successive halving over train seconds, by Ray's own scheduler."""

from types import SimpleNamespace

from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from autotune.measurement import Evaluation, Target, TrialResult
from autotune.outcome import Outcome
from autotune.policy import Decision
from autotune.search.stopping import StoppingRule

REDUCTION_FACTOR = 4
"""Ray's own: of the trials that come to a rung, the better one in so many goes on."""
NUM_HALVINGS = 3
"""Rungs below ``max_train_seconds``, so that the first one, Ray's ``grace_period``, lies at a
64th of it."""


class AshaStopping(StoppingRule):
    """A stopping rule that asks Ray's ``ASHAScheduler``: the target's metric decides, at rungs of
    train seconds.

    A trial that was stopped is not taken up again.

    Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020), as
    ray.tune.schedulers.ASHAScheduler.
    """

    def __init__(self, target: Target) -> None:
        self._scheduler = ASHAScheduler(
            time_attr="train_seconds",
            metric="metric",
            mode=target.mode,
            max_t=target.max_train_seconds,
            grace_period=target.max_train_seconds / REDUCTION_FACTOR**NUM_HALVINGS,
            reduction_factor=REDUCTION_FACTOR,
        )
        self._added: dict[int, SimpleNamespace] = {}

    def observe(self, trial: int, evaluation: Evaluation) -> Decision:
        """Stop a trial that is not among the better ones of the rung that it has come to."""
        decision = self._scheduler.on_trial_result(
            None, self._as_ray(trial), _as_ray_result(evaluation)
        )
        return Decision.STOP if decision == TrialScheduler.STOP else Decision.CONTINUE

    def finish(self, result: TrialResult, score: float | None) -> None:
        """Learn the last evaluation of a trial that ended by itself."""
        if result.last is not None and result.outcome not in (Outcome.STOPPED, Outcome.DIVERGED):
            self._scheduler.on_trial_complete(
                None, self._as_ray(result.trial), _as_ray_result(result.last)
            )

    def _as_ray(self, number: int) -> SimpleNamespace:
        if number not in self._added:
            self._added[number] = SimpleNamespace(trial_id=str(number))
            self._scheduler.on_trial_add(None, self._added[number])
        return self._added[number]


def _as_ray_result(evaluation: Evaluation) -> dict[str, float]:
    return {"train_seconds": evaluation.train_seconds, "metric": evaluation.metric}
