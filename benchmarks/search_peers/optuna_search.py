"""Optuna's samplers told in other ways than autotune tells them: as stock Ray Tune does, with
Optuna's own pruner, or with a value for what did not reach the target.
"""

import math
from collections.abc import Callable

import optuna
from optuna.trial import TrialState

from autotune.measurement import Evaluation, Target, TrialResult
from autotune.outcome import Outcome
from autotune.policy import Answer, Decision, Done
from autotune.recording import Recording
from autotune.search.scheduler import PointPlacement
from autotune.search.stopping import NeverStop, StoppingRule
from autotune.search.study import create_trial_at
from benchmarks.replay.simulation import started
from benchmarks.search_peers.asha import NUM_HALVINGS, REDUCTION_FACTOR

ValueOf = Callable[[TrialResult], float | None]
"""The value that a trial is told with; None tells it as pruned."""


def elapsed_seconds(result: TrialResult) -> float:
    """A trial's elapsed seconds, however it ended, as stock Ray Tune tells them: one that was
    stopped early looks faster than one that reached the target later.

    Source: ray.tune.search.optuna.OptunaSearch.on_trial_complete, with metric=train_seconds and
    mode=min.
    """
    return result.stopped_at - result.started_at


def seconds_to_target(result: TrialResult) -> float | None:
    """A trial's seconds to the target; None if it did not reach it."""
    return elapsed_seconds(result) if result.outcome is Outcome.REACHED else None


def seconds_or_shortfall(target: Target) -> ValueOf:
    """A trial's seconds to the target, or its time limit, longer by what its best metric lacked of
    the target, where it did not reach it.
    """

    def value_of(result: TrialResult) -> float:
        least = min(
            (
                evaluation.shortfall(target)
                for evaluation in result.evaluations
                if math.isfinite(evaluation.metric)
            ),
            default=math.inf,
        )
        missing = min(least / max(abs(target.value), 1e-12), 1.0)
        return seconds_to_target(result) or target.max_train_seconds * (1 + missing)

    return value_of


def hyperband() -> optuna.pruners.HyperbandPruner:
    """Optuna's Hyperband with the rungs that ``AshaStopping`` has."""
    return optuna.pruners.HyperbandPruner(
        min_resource=1,
        max_resource=REDUCTION_FACTOR**NUM_HALVINGS,
        reduction_factor=REDUCTION_FACTOR,
    )


class OptunaSearch:
    """A sampler of Optuna's by ask and tell, with the verbs of ``Scheduler``.

    Args:
        value_of: what a trial that has ended is told with.
        stopping: stops trials.
        pruner: stops trials, too, told the shortfall at whole 64ths of ``max_train_seconds``.
        is_capped: whether a trial ends at the best time so far.
    """

    def __init__(
        self,
        recording: Recording,
        sampler: optuna.samplers.BaseSampler,
        place: PointPlacement,
        *,
        value_of: ValueOf,
        stopping: StoppingRule | None = None,
        pruner: optuna.pruners.BasePruner | None = None,
        is_capped: bool = False,
    ) -> None:
        self._space, self._target, self._place = recording.space, recording.target, place
        # Hyperband draws a trial's bracket from the study's name
        self._study = optuna.create_study(
            sampler=sampler, pruner=pruner or optuna.pruners.NopPruner(), study_name="search"
        )
        self._value_of, self._stopping = value_of, stopping or NeverStop()
        self._is_capped, self._best_seconds = is_capped, math.inf
        self._trials: list[optuna.Trial] = []

    def suggest(self) -> Answer:
        """The recorded point nearest to the sampler's."""
        asked = self._study.ask()
        placed = self._place(self._space.suggest(asked))
        # what is told is the recorded point, when it has ended
        self._study.tell(asked, state=TrialState.FAIL)
        if placed is None:
            return Done("exhausted")
        number = len(self._trials)
        self._trials.append(create_trial_at(self._study, self._space, placed)[0])
        cap_seconds = self._best_seconds if self._is_capped else math.inf
        return started(number, placed, cap_seconds=cap_seconds)

    def observe(self, number: int, evaluation: Evaluation) -> Decision:
        """What the stopping rule or the pruner decides."""
        trial = self._trials[number]
        share = evaluation.train_seconds / self._target.max_train_seconds
        step = int(share * REDUCTION_FACTOR**NUM_HALVINGS)
        if step >= 1 and math.isfinite(evaluation.metric):
            trial.report(evaluation.shortfall(self._target), step)
            if trial.should_prune():
                return Decision.STOP
        return self._stopping.observe(number, evaluation)

    def finish(self, result: TrialResult) -> None:
        """Tell how a trial ended."""
        self._stopping.finish(result, None)
        if (seconds := seconds_to_target(result)) is not None:
            self._best_seconds = min(self._best_seconds, seconds)
        value = self._value_of(result)
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        self._study.tell(self._trials[result.trial], value, state=state)
