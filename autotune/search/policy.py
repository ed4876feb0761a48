"""The search policy: what to try next, and what becomes of each trial.

Four verbs, ``suggest``, ``reject``, ``observe`` and ``finish``, are all that an execution (live or replayed) needs of it. All
state lives in the Optuna study, so a policy made anew over the same study goes on where the earlier one stood.

How outcomes are told to Optuna: REACHED is complete with its score. A censored trial is pruned, with its last metric's distance
from the target as its one report, because samplers rank pruned trials by it; the seconds it took are never told as its value,
since slow configurations would then look fast. OUT_OF_MEMORY and DIVERGED violate a constraint: samplers forget failed trials
and would propose them for ever. Only ERRORED, a fault in user code, is a failure.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import optuna
from optuna.trial import TrialState

from autotune.errors import AutotuneError, ConfigError, WorkerError
from autotune.measurement import Evaluation, Target, TrialResult
from autotune.objective import Objective, device_of, unmeasured
from autotune.outcome import Outcome
from autotune.search.expected_scores import running_times
from autotune.search.pausing import PausingSampler
from autotune.search.seeds import derived_seed
from autotune.search.stopping import Decision, StoppingRule
from autotune.space import SearchSpace, Suggestion

_INFEASIBLE = "infeasible"
_BASELINE = "autotune:baseline"
_REJECTED = "autotune:rejected"
_RESULT = "autotune:result"
_RETRY_OF = "autotune:retry_of"
_PAUSED = "autotune:paused"
_NUM_LOST = "autotune:num_lost"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One point handed out to be trained."""

    number: int
    suggestion: Suggestion
    seed: int
    cap_seconds: float
    """Warm seconds after which it cannot win; infinite where nothing caps it."""
    is_baseline: bool
    """The configuration as the experiment states it, nothing varied."""
    retry_of: int | None = None
    """The trial of the same point that was lost, or interrupted, before this one."""


class Place(Protocol):
    """The points that can be trained, where that is not all of the space."""

    def __call__(self, suggestion: Suggestion) -> Suggestion | None:
        """The point that is trained in place of a suggestion; None where there is none left."""
        ...

    def has(self, suggestion: Suggestion) -> bool:
        """Whether exactly this point can be trained."""
        ...


class SearchPolicy:
    """Decides what to try next over one Optuna study.

    Args:
        study: minimises the objective; may hold earlier trials, and then its sampler needs another seed than at first.
        space: what may vary.
        baseline: the point that the experiment itself stands for, None where the space does not contain it.
        has_baseline: whether the first trial is the baseline.
        first: points that a new study tries before its sampler is asked, after the baseline; a pausing one has its own.
        pausing: proposes points in place of the study's sampler, and pauses trials; None: trials run without a pause.
        place: where only some points can be trained, the one for a suggestion; what is told is that one.
        is_kept: whether a trial that an earlier process paused can be taken up again; else its point is proposed again.
        seed: of the study; every trial's own is made from it.
        num_trials: trials to end in all, earlier ones included; None for no limit.
        max_errors_in_a_row: ERRORED trials in a row after which no more is suggested and ``error`` is set.
    """

    def __init__(
        self,
        *,
        study: optuna.Study,
        space: SearchSpace,
        baseline: Suggestion | None,
        stopping: StoppingRule,
        objective: Objective,
        target: Target,
        seed: int,
        num_trials: int | None,
        max_errors_in_a_row: int,
        has_baseline: bool = True,
        first: Sequence[Suggestion] = (),
        pausing: PausingSampler | None = None,
        place: Place | None = None,
        is_kept: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self._study = study
        self._space = space
        self._baseline = baseline
        self._stopping = stopping
        self._objective = objective
        self._target = target
        self._seed = seed
        self._num_trials = num_trials
        self._max_errors = max_errors_in_a_row
        self._pausing = pausing
        self._place = place
        self._running: dict[int, optuna.Trial] = {}
        self._handed_out: dict[int, Trial] = {}
        self._errors: list[TrialResult] = []
        self.error: AutotuneError | None = None
        """Set once too many trials in a row failed in user code, or a worker did not measure what the objective needs."""
        _take_up(study, objective, lambda number: pausing is not None and is_kept(number))
        self.results = finished_results(study)
        """Results of all ended trials, by trial number."""
        if pausing is not None and place is not None:
            pausing.repeats_where(place.has)
        for result in self.results.values():
            self._learn(result)
        if pausing is not None:
            for suggestion in self._rejected_before():
                pausing.rejected(suggestion)
        self._errors, self.error = [], None  # what failed in an earlier run may be mended by now
        self.paused = tuple(self._paused_before(frozen) for frozen in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]))
        """Trials that an earlier process paused, with their evaluations: they are suggested again when their turn comes."""
        is_new = not study.get_trials(deepcopy=False)
        if has_baseline and not any(_BASELINE in trial.user_attrs for trial in study.get_trials(deepcopy=False)):
            study.enqueue_trial(space.params_of(baseline) if baseline else {}, user_attrs={_BASELINE: True})
        for point in first if is_new and pausing is None else ():
            study.enqueue_trial(space.params_of(point))

    @property
    def num_trials_left(self) -> int | None:
        """Trials that may still be handed out, running ones taken off; None for no limit."""
        if self._num_trials is None:
            return None
        return max(0, self._num_trials - len(self.results) - len(self._running))

    @property
    def baseline_trial(self) -> int:
        """Number of the baseline's trial: its last one, where an earlier one was interrupted."""
        return max(trial.number for trial in self._study.get_trials(deepcopy=False) if _BASELINE in trial.user_attrs)

    @property
    def scores(self) -> dict[int, float]:
        """The objective of every trial that REACHED the target, by trial number."""
        return {number: self._objective.score(each) for number, each in self.results.items() if each.outcome is Outcome.REACHED}

    @property
    def expected_scores(self) -> dict[int, float]:
        """The score to expect of each trial that REACHED the target if its configuration is trained again, by trial number.

        Trials of one configuration have the same: by the sampler's model, where it has one, else the configuration's own expected running
        time, which is what all its runs spent over the number that reached the target.
        """
        own = running_times(self.results, self._objective)
        modelled = self._pausing.expected_scores() if self._pausing is not None else {}
        return {number: modelled.get(number, score) for number, score in own.items()}

    def suggest(self) -> Trial | None:
        """The next point to train, or a paused trial to go on with; None where the budget is spent or errors ended the search.

        Raises:
            ConfigError: the sampler fails at its own settings.
        """
        if self.error is not None:
            return None
        may_start = self.num_trials_left != 0
        if self._pausing is None or (may_start and self._is_waiting):
            return self._ask() if may_start else None
        chosen = self._pausing.propose(new=may_start, ending=not may_start)
        if isinstance(chosen, Suggestion):
            placed = chosen if self._place is None else self._place(chosen)
            if placed is not None:
                self._study.enqueue_trial(self._space.params_of(placed))
                return self._ask(is_placed=True)
            chosen = self._pausing.propose(new=False)
            assert not isinstance(chosen, Suggestion), "no new point was wanted"
        return None if chosen is None else replace(self._handed_out[chosen], cap_seconds=self._cap_seconds(chosen))

    def pause(self, number: int, evaluations: Sequence[Evaluation]) -> None:
        """Keep in the storage that a trial is paused, so that another process can take it up again."""
        self._running[number].set_user_attr(_PAUSED, [each.as_dict() for each in evaluations])

    @property
    def _is_waiting(self) -> bool:
        """Whether a point stands in line: the baseline, or one that was interrupted."""
        return bool(self._study.get_trials(deepcopy=False, states=[TrialState.WAITING]))

    def _ask(self, *, is_placed: bool = False) -> Trial | None:
        """The study's next point."""
        try:
            trial = self._study.ask()
            is_baseline = _BASELINE in trial.user_attrs
            suggestion = Suggestion({}) if is_baseline and self._baseline is None else self._space.suggest(trial)
        except (TypeError, ValueError) as error:
            sampler = type(self._study.sampler).__name__
            raise ConfigError(f"search.sampler: {sampler} cannot propose with its settings: {' '.join(str(error).split())}") from error
        if self._place is not None and not is_placed:
            placed = self._place(suggestion)
            if placed is None:
                self._study.tell(trial, state=TrialState.FAIL)
                return None
            if placed != suggestion:
                trial, suggestion = self._moved(trial, placed), placed
        if self._pausing is not None and suggestion.values:
            self._pausing.started(trial.number, suggestion)
        return self._hand_out(trial, suggestion, is_baseline=is_baseline)

    def _hand_out(self, trial: optuna.Trial, suggestion: Suggestion, *, is_baseline: bool) -> Trial:
        self._running[trial.number] = trial
        self._handed_out[trial.number] = Trial(
            number=trial.number,
            suggestion=suggestion,
            seed=derived_seed(self._seed, f"trial {trial.number}"),
            cap_seconds=math.inf if is_baseline else self._cap_seconds(trial.number),
            is_baseline=is_baseline,
            retry_of=trial.user_attrs.get(_RETRY_OF),
        )
        return self._handed_out[trial.number]

    def _paused_before(self, frozen: optuna.trial.FrozenTrial) -> tuple[Trial, tuple[Evaluation, ...]]:
        """Wait with a trial that an earlier process paused, as if this one had."""
        assert self._pausing is not None, "only a policy that pauses takes paused trials up"
        trial = optuna.Trial(self._study, frozen._trial_id)  # noqa: SLF001  # there is no other way to a trial of another process
        evaluations = tuple(Evaluation.from_dict(each) for each in frozen.user_attrs[_PAUSED])
        suggestion = self._space.suggest(trial)
        self._pausing.paused(frozen.number, suggestion, evaluations)
        return self._hand_out(trial, suggestion, is_baseline=_BASELINE in frozen.user_attrs), evaluations

    def _rejected_before(self) -> Iterator[Suggestion]:
        """Points that an earlier process rejected."""
        for frozen in self._study.get_trials(deepcopy=False, states=[TrialState.PRUNED]):
            if _REJECTED in frozen.user_attrs and frozen.params:
                yield self._space.suggest(optuna.trial.FixedTrial(frozen.params))

    def _moved(self, trial: optuna.Trial, placed: Suggestion) -> optuna.Trial:
        """A trial at another point in place of one, which the sampler forgets."""
        self._study.tell(trial, state=TrialState.FAIL)
        self._study.enqueue_trial(self._space.params_of(placed))
        sampler, self._study.sampler = self._study.sampler, optuna.samplers.RandomSampler()  # its point is known: nothing is sampled
        try:
            moved = self._study.ask()
            self._space.suggest(moved)
        finally:
            self._study.sampler = sampler
        return moved

    def _cap_seconds(self, number: int) -> float:
        self._measure_by_sampler(number)
        cap = getattr(self._stopping, "cap_seconds", None)
        return cap(number) if cap is not None else math.inf

    def _measure_by_sampler(self, number: int) -> None:
        """Tell the stopping rule what a trial must beat by now, where the sampler has a model of that."""
        must_beat = getattr(self._stopping, "must_beat", None)
        if must_beat is not None and self._pausing is not None:
            must_beat(number, self._pausing.to_beat(number))

    def reject(self, number: int, reason: str) -> None:
        """Take back a point that no training can run: the sampler learns it as infeasible, and it costs no budget."""
        trial, suggestion = self._running.pop(number), self._handed_out.pop(number).suggestion
        if self._pausing is not None:
            self._pausing.forget(number)
            if suggestion.values:
                self._pausing.rejected(suggestion)
        trial.set_user_attr(_REJECTED, reason)
        trial.set_constraint(_INFEASIBLE, 1.0)
        self._study.tell(trial, state=TrialState.PRUNED)

    def observe(self, number: int, evaluation: Evaluation, *, may_pause: bool = True) -> Decision:
        """Whether a running trial goes on after an evaluation; a paused one is suggested again when its turn comes."""
        if not self._is_measured(evaluation):
            return Decision.STOP
        self._measure_by_sampler(number)
        decision = self._stopping.observe(number, evaluation)
        trial = self._handed_out[number]
        if trial.is_baseline:  # what it needs is what all else is compared with, and what confirmation is planned by
            return Decision.CONTINUE
        if decision is Decision.CONTINUE and self._pausing is not None and trial.suggestion.values:
            decision = self._pausing.observe(number, evaluation, new=self.num_trials_left != 0, may_pause=may_pause)
        return decision

    def finish(self, result: TrialResult) -> float | None:
        """Tell what became of a trial.

        Returns:
            Its score, None unless it REACHED the target.
        """
        if not all(map(self._is_measured, result.evaluations)):
            self.interrupt(result.trial)
            return None
        trial = self._running.pop(result.trial)
        del self._handed_out[result.trial]
        _note(trial, result, self._target)
        trial.set_user_attr(_RESULT, result.as_dict())  # from here on a process that dies loses nothing: _take_up tells it
        _tell(self._study, trial.number, result, self._objective)
        self.results[result.trial] = result
        return self._learn(result)

    def _is_measured(self, evaluation: Evaluation) -> bool:
        """Whether the objective has all it needs of an evaluation; where not, as on another machine of a cluster, the search ends."""
        missing = unmeasured(self._objective, device_of(evaluation, "a worker"))
        if missing is not None:
            self.error = ConfigError(f"objective: {missing}")
        return missing is None

    def interrupt(self, number: int) -> None:
        """Give up a trial that says nothing about its configuration.

        On resuming it goes on from where it was last paused, if it was; else its point is proposed again.
        """
        del self._handed_out[number]
        if self._pausing is not None:
            self._pausing.forget(number)
        trial = self._running.pop(number)
        if _PAUSED not in trial.user_attrs:
            _interrupt(self._study, trial.number)

    def retry(self, number: int, *, most: int) -> bool:
        """Give up a trial that was lost with its machine; its point is next.

        Args:
            most: times that a point is tried again.

        Returns:
            False where it was tried again as often: nothing has changed then.
        """
        trial = self._running[number]
        num_lost = trial.user_attrs.get(_NUM_LOST, 0) + 1
        if num_lost > most:
            return False
        del self._handed_out[number]
        if self._pausing is not None:
            self._pausing.forget(number)
        _interrupt(self._study, self._running.pop(number).number, num_lost=num_lost)
        return True

    def _learn(self, result: TrialResult) -> float | None:
        score = self._objective.score(result) if result.outcome is Outcome.REACHED else None
        finish = getattr(self._stopping, "finish", None)
        if finish is not None:
            finish(result, score)
        if self._pausing is not None:
            self._pausing.finish(result, score)
        self._errors = [*self._errors, result] if result.outcome is Outcome.ERRORED else []
        if len(self._errors) >= self._max_errors:
            first = self._errors[0]
            self.error = WorkerError(
                f"{len(self._errors)} trials in a row failed; the first was trial {first.trial}", first.error or "no traceback"
            )
        return score


def finished_results(study: optuna.Study) -> dict[int, TrialResult]:
    """The results of all trials of a study that ended, by trial number."""
    return {
        trial.number: TrialResult.from_dict(trial.user_attrs[_RESULT])
        for trial in study.get_trials(deepcopy=False)
        if _RESULT in trial.user_attrs and trial.state.is_finished()
    }


def _take_up(study: optuna.Study, objective: Objective, is_kept: Callable[[int], bool]) -> None:
    """Bring trials that an earlier process left running to an end: told where their result was known, else proposed again.

    Those that were paused and can go on stay as they are.
    """
    for frozen in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        known = frozen.user_attrs.get(_RESULT)
        if known is not None:
            _tell(study, frozen.number, TrialResult.from_dict(known), objective)
        elif _PAUSED not in frozen.user_attrs or not is_kept(frozen.number):
            _interrupt(study, frozen.number)


def _interrupt(study: optuna.Study, number: int, *, num_lost: int | None = None) -> None:
    """Give up a trial and put its point in line; ``num_lost`` times it was lost so far, None: as it stands."""
    study.tell(number, state=TrialState.FAIL)
    frozen = study.trials[number]
    kept = {key: frozen.user_attrs[key] for key in (_BASELINE, _NUM_LOST) if key in frozen.user_attrs}
    if num_lost is not None:
        kept[_NUM_LOST] = num_lost
    study.enqueue_trial(frozen.params, user_attrs={**kept, _RETRY_OF: number})


def _note(trial: optuna.Trial, result: TrialResult, target: Target) -> None:
    """What samplers are to know of a trial besides its state and score."""
    if result.outcome.is_infeasible:
        trial.set_constraint(_INFEASIBLE, 1.0)
    elif result.outcome.is_censored and result.last is not None and math.isfinite(result.last.metric):
        trial.report(target.shortfall(result.last.metric), step=1)


def _tell(study: optuna.Study, number: int, result: TrialResult, objective: Objective) -> None:
    if result.outcome is Outcome.REACHED:
        study.tell(number, objective.score(result))
    else:
        study.tell(number, state=TrialState[result.outcome.traits.optuna_state])
