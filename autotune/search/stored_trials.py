"""What a search policy keeps in the Optuna study: trials with their results, and the points that
are next in line.

How outcomes are told to Optuna: REACHED is complete with its score. A censored trial is pruned,
with its last metric's distance from the target as its only report, because samplers rank pruned
trials by it: with its seconds slow configurations would look fast. OUT_OF_MEMORY and DIVERGED
violate a constraint: samplers forget failed trials and would propose them for ever. Only ERRORED, a
fault in user code, is a failure.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import optuna
from optuna.trial import TrialState

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Target, TrialResult
from autotune.objective import Objective
from autotune.outcome import Outcome
from autotune.space import SearchSpace, Suggestion

_INFEASIBLE = "infeasible"
_BASELINE = "autotune:baseline"
_REJECTED = "autotune:rejected"
_RESULT = "autotune:result"
_RETRY_OF = "autotune:retry_of"
_PAUSED = "autotune:paused"
_NUM_LOST = "autotune:num_lost"
_ENDED_FOR = "autotune:ended_for_trainings"


def finished_results(study: optuna.Study) -> dict[int, TrialResult]:
    """The results of all trials of a study that ended, by trial number."""
    return {
        trial.number: TrialResult.from_dict(trial.user_attrs[_RESULT])
        for trial in study.get_trials(deepcopy=False)
        if _RESULT in trial.user_attrs and trial.state.is_finished()
    }


def end_for_trainings(study: optuna.Study, num_trainings: int) -> None:
    """Note in the study that no further trial is worth its cost, if what was found is trained so
    many times.
    """
    study.set_user_attr(_ENDED_FOR, num_trainings)


def ended_for_trainings(study: optuna.Study) -> int | None:
    """The number of trainings for which no further trial is worth its cost.

    None if that was not noted.
    """
    number: int | None = study.user_attrs.get(_ENDED_FOR)
    return number


def end_abandoned_trials(
    study: optuna.Study, objective: Objective, is_kept: Callable[[int], bool]
) -> None:
    """End the trials that an earlier process left running: tell a stored result, else enqueue the
    point again.

    Paused trials that can be resumed stay as they are.
    """
    for frozen in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        stored = frozen.user_attrs.get(_RESULT)
        if stored is not None:
            _tell(study, frozen.number, TrialResult.from_dict(stored), objective)
        elif _PAUSED not in frozen.user_attrs or not is_kept(frozen.number):
            interrupt_trial(study, frozen.number)


def interrupt_trial(study: optuna.Study, number: int, *, num_lost: int | None = None) -> None:
    """Fail a trial and enqueue its point.

    ``num_lost`` is how often the point was lost so far, None to leave that count as it is.
    """
    study.tell(number, state=TrialState.FAIL)
    frozen = study.get_trials(deepcopy=False)[number]
    kept = {
        key: frozen.user_attrs[key] for key in (_BASELINE, _NUM_LOST) if key in frozen.user_attrs
    }
    if num_lost is not None:
        kept[_NUM_LOST] = num_lost
    study.enqueue_trial(frozen.params, user_attrs={**kept, _RETRY_OF: number})


def tell_result(
    study: optuna.Study,
    trial: optuna.Trial,
    result: TrialResult,
    objective: Objective,
    target: Target,
) -> None:
    """Store the result of a trial, with what samplers need of it: a constraint if infeasible,
    the shortfall if censored; then end it.
    """
    if result.outcome.is_infeasible:
        trial.set_constraint(_INFEASIBLE, 1.0)
    elif (
        result.outcome.is_censored and result.last is not None and math.isfinite(result.last.metric)
    ):
        trial.report(result.last.shortfall(target), step=1)
    # if the process dies from here on, end_abandoned_trials tells the result
    trial.set_user_attr(_RESULT, result.as_dict())
    _tell(study, trial.number, result, objective)


def _tell(study: optuna.Study, number: int, result: TrialResult, objective: Objective) -> None:
    score = objective.score(result) if result.outcome is Outcome.REACHED else None
    study.tell(number, score, state=TrialState[result.outcome.traits.optuna_state])


def reject_trial(study: optuna.Study, trial: optuna.Trial, reason: str) -> None:
    """End a trial whose point no training can run."""
    trial.set_user_attr(_REJECTED, reason)
    trial.set_constraint(_INFEASIBLE, 1.0)
    study.tell(trial, state=TrialState.PRUNED)


def rejected_points(study: optuna.Study, space: SearchSpace) -> Iterator[Suggestion]:
    """The points of rejected trials."""
    for frozen in study.get_trials(deepcopy=False, states=[TrialState.PRUNED]):
        if _REJECTED in frozen.user_attrs and frozen.params:
            yield space.suggest(optuna.trial.FixedTrial(frozen.params))


def ask_trial(
    study: optuna.Study,
    space: SearchSpace,
    baseline: Suggestion | None,
    place: Callable[[Suggestion], Suggestion | None] | None,
) -> tuple[optuna.Trial, Suggestion, bool] | None:
    """Ask a study for a new trial.

    Return it with its point and whether it trains the baseline, None if no point is left to train.

    Args:
        baseline: point of the baseline, without values if the space does not contain it; None for
            no baseline.
        place: gives the point to train in place of a suggestion, None if no point is left; without
            it suggestions stay as they are.

    Raises:
        ConfigError: the sampler raises an error because of its settings.
    """
    try:
        trial = study.ask()
        is_baseline = is_of_baseline(trial)
        suggestion = (
            baseline if is_baseline and baseline and not baseline.values else space.suggest(trial)
        )
    except (TypeError, ValueError) as error:
        sampler = type(study.sampler).__name__
        raise ConfigError(
            f"search.sampler: {sampler} cannot propose with its settings:"
            f" {' '.join(str(error).split())}"
        ) from error
    placed = suggestion if place is None else place(suggestion)
    if placed is None:
        study.tell(trial, state=TrialState.FAIL)
        return None
    if placed != suggestion:
        study.tell(trial, state=TrialState.FAIL)  # which the sampler then ignores
        trial, suggestion = create_trial_at(study, space, placed)
    return trial, suggestion, is_baseline


def create_trial_at(
    study: optuna.Study, space: SearchSpace, point: Suggestion
) -> tuple[optuna.Trial, Suggestion]:
    """Create a trial at a point that no sampler need propose, with all of its parameters in one
    operation of the storage.
    """
    fixed = optuna.trial.FixedTrial(space.params_of(point))
    suggestion = space.suggest(fixed)
    template = optuna.trial.create_trial(
        state=TrialState.RUNNING, params=fixed.params, distributions=fixed.distributions
    )
    # Study.add_trial, which does not return it
    trial_id = study._storage.create_new_trial(study._study_id, template)  # noqa: SLF001
    return optuna.Trial(study, trial_id), suggestion


def enqueue_baseline(study: optuna.Study, space: SearchSpace, baseline: Suggestion) -> None:
    """Make the baseline the next trial."""
    params = space.params_of(baseline) if baseline.values else {}
    study.enqueue_trial(params, user_attrs={_BASELINE: True})


def baseline_number(study: optuna.Study) -> int | None:
    """Number of the baseline's trial: the last one, if an earlier one was interrupted.

    None if there is none.
    """
    return max(
        (trial.number for trial in study.get_trials(deepcopy=False) if is_of_baseline(trial)),
        default=None,
    )


def is_of_baseline(trial: optuna.Trial | optuna.trial.FrozenTrial) -> bool:
    """Whether a trial trains the baseline."""
    return _BASELINE in trial.user_attrs


def retried_number(trial: optuna.Trial | optuna.trial.FrozenTrial) -> int | None:
    """Number of the lost or interrupted trial that a trial repeats; None if it repeats none."""
    return trial.user_attrs.get(_RETRY_OF)


def num_losses(trial: optuna.Trial) -> int:
    """How often the point of a trial was lost with its machine."""
    return int(trial.user_attrs.get(_NUM_LOST, 0))


def is_paused(trial: optuna.Trial) -> bool:
    """Whether a trial was paused, so that another process can resume it."""
    return _PAUSED in trial.user_attrs


def store_evaluations(trial: optuna.Trial, evaluations: Sequence[Evaluation]) -> None:
    """Store the evaluations of a trial that is paused."""
    trial.set_user_attr(_PAUSED, [evaluation.as_dict() for evaluation in evaluations])


def paused_trials(
    study: optuna.Study, space: SearchSpace
) -> Iterator[tuple[optuna.Trial, Suggestion, tuple[Evaluation, ...]]]:
    """The trials that an earlier process paused, with their points and evaluations.

    Call ``end_abandoned_trials`` before.
    """
    for frozen in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        # Optuna has no public way to another process's trial
        trial = optuna.Trial(study, frozen._trial_id)  # noqa: SLF001
        yield (
            trial,
            space.suggest(trial),
            tuple(map(Evaluation.from_dict, frozen.user_attrs[_PAUSED])),
        )
