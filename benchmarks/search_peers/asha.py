"""Asynchronous successive halving over train seconds, by Ray's own scheduler, and TPE told as
stock Ray Tune tells it.
"""

from types import SimpleNamespace

import optuna
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from autotune.measurement import Evaluation, Target, TrialResult
from autotune.outcome import Outcome
from autotune.policy import Answer, Decision, Done, Run, Start, search_name
from autotune.recording import Recording
from autotune.search.scheduler import PointPlacement
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


class StockSearch:
    """TPE as stock Ray Tune tells it: every trial that ended, however it did, is COMPLETE with its
    elapsed seconds as its value.

    So a trial that was stopped early looks faster than one that reached the target later. It has
    the verbs of ``Scheduler``.

    Source: ray.tune.search.optuna.OptunaSearch.on_trial_complete, with metric=train_seconds and
    mode=min.
    """

    def __init__(
        self,
        recording: Recording,
        sampler: optuna.samplers.BaseSampler,
        stopping: AshaStopping,
        place: PointPlacement,
    ) -> None:
        self._space = recording.space
        self._study = optuna.create_study(sampler=sampler, direction="minimize")
        self._stopping = stopping
        self._place = place
        self._handed_out: list[Run] = []

    def suggest(self) -> Answer:
        """The recorded point nearest to TPE's."""
        asked = self._study.ask()
        placed = self._place(self._space.suggest(asked))
        # what is told is the recorded point, when it has ended
        self._study.tell(asked, state=optuna.trial.TrialState.FAIL)
        if placed is None:
            return Done("exhausted")
        number = len(self._handed_out)
        self._handed_out.append(
            Run(
                number=number,
                name=search_name(number),
                suggestion=placed,
                seed=0,
                cap_seconds=float("inf"),
                is_baseline=False,
            )
        )
        return Start(self._handed_out[number])

    def observe(self, number: int, evaluation: Evaluation) -> Decision:
        """What successive halving decides."""
        return self._stopping.observe(number, evaluation)

    def finish(self, result: TrialResult) -> None:
        """Tell the elapsed seconds, whether or not the target was reached."""
        self._stopping.finish(result, None)
        fixed = optuna.trial.FixedTrial(
            self._space.params_of(self._handed_out[result.trial].suggestion)
        )
        self._space.suggest(fixed)
        elapsed_seconds = result.stopped_at - result.started_at
        self._study.add_trial(
            optuna.create_trial(
                params=fixed.params, distributions=fixed.distributions, value=elapsed_seconds
            )
        )
