"""The scheduler: which trial to train next, and how each trial continues and ends.

Whoever trains (an execution, or a replay of recorded curves) asks ``suggest`` what to do and
reports by ``observe`` and ``finish``. All state lives in the Optuna study, so a new scheduler over
the same study continues where the earlier one stopped.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import optuna

from autotune.errors import AutotuneError, ConfigError, WorkerError
from autotune.measurement import Evaluation, LearningCurve, Target, TrialResult
from autotune.objective import Objective, device_of, unmeasured
from autotune.outcome import Outcome
from autotune.policy import Answer, Decision, Done, Policy, Resume, Run, Start, Wait, search_name
from autotune.search.expected_scores import running_times
from autotune.search.outlook import NUM_AHEAD, Outlook, outlook
from autotune.search.points import Candidates, derived_seed
from autotune.search.samplers import PausingSampler, reads_no_reports
from autotune.search.stopping import StoppingRule
from autotune.search.storage import is_any_waiting, written_together
from autotune.search.study import (
    BASELINE,
    ENDED_FOR,
    NUM_LOST,
    PAUSED,
    RETRY_OF,
    ask_trial,
    attributes_of,
    baseline_number,
    create_trial_at,
    cut_evaluations,
    end_ended_trials,
    finished_results,
    reject_trial,
    rejected_points,
    store_evaluations,
    store_result,
    tell_result,
    try_again,
    unfinished_trials,
)
from autotune.space import SearchSpace, Suggestion


class PointPlacement(Protocol):
    """Maps suggestions to the points that can be trained, where these are only a part of the
    search space.
    """

    def __call__(self, suggestion: Suggestion) -> Suggestion | None:
        """The point to train in place of a suggestion; None if no point is left."""
        ...

    def can_repeat(self, suggestion: Suggestion) -> bool:
        """Whether a point that was trained may be suggested again."""
        ...


@dataclass(kw_only=True, eq=False)
class SearchSettings:
    """What a search is over, and how long it may go on."""

    study: optuna.Study
    """Minimises the objective; may hold earlier trials, and then its sampler needs another seed
    than at first."""
    space: SearchSpace
    baseline: Suggestion | None
    """Point of the experiment's own configuration, which the first trial trains; without values if
    the space does not contain it; None for no baseline."""
    stopping: StoppingRule
    objective: Objective
    target: Target
    seed: int
    """Seed of the study, from which every trial's seed is derived."""
    num_trials: int | None
    """Trials to end in all, earlier ones included; None means no limit."""
    max_errors_in_a_row: int
    """ERRORED trials in a row after which the search ends with ``error``."""
    expected_trainings: int | None = None
    """Trainings that the result will be used for: the search ends when further trials are expected
    to cost more than they save over those; None never ends it so."""
    first: Sequence[Suggestion] = ()
    """Points that a new study tries after the baseline, before an Optuna sampler is asked."""
    sampler: PausingSampler | None = None
    """Proposes points in place of the study's sampler, and pauses trials."""
    place: PointPlacement | None = None
    """Gives the point to train, and to tell to Optuna, in place of a suggestion."""
    may_repeat: bool = False
    """Whether Optuna's samplers may try a point of a finite space again, without ``place``."""


@dataclass(kw_only=True, eq=False)
class Scheduler(SearchSettings, Policy):
    """Decides over one Optuna study which trial to run next."""

    def __post_init__(self) -> None:
        study, space, place = self.study, self.space, self.place
        self._ended_for: int | None = study.user_attrs.get(ENDED_FOR)
        self._pauses = self.sampler is not None
        self._sampler = self.sampler or PausingSampler()
        self._reports_all = self._pauses or reads_no_reports(study.sampler)
        self.stopping.score_to_beat = (
            self._sampler.score_to_beat if self._pauses else self._score_to_beat
        )
        self._expected_scores: dict[int, float] | None = None
        is_repeated = self._pauses or place is not None or self.may_repeat
        self._candidates = Candidates(space, may_repeat=is_repeated)
        self._unfinished: dict[int, Run] = {}
        """Running and paused trials, by number."""
        self._stored: dict[int, optuna.Trial] = {}
        """The same trials in the study's storage."""
        self._paused: set[int] = set()
        self._interrupted: list[int] = []
        """Those of the paused trials that were trained until their worker, or the process that
        decided, was gone: they are resumed before anything else."""
        self._num_stored: dict[int, int] = {}
        """Number of evaluations that are stored of each unfinished trial."""
        self._last: dict[int, Evaluation] = {}
        """The last evaluation of every trial that has been evaluated."""
        self._errors: list[TrialResult] = []
        self.is_everywhere: Callable[[Collection[str | None]], bool] = lambda devices: True
        """Whether trials that failed on these devices would fail on any: told by who knows the
        devices."""
        self.error: AutotuneError | None = None
        """Why the search ended early: too many trials in a row ERRORED, or a worker lacked a
        reading for the objective; else None."""
        end_ended_trials(study, self.objective)
        self.results = finished_results(study)
        """Results of all ended trials, by trial number."""
        if place is not None:
            self._sampler.can_repeat = place.can_repeat
        # a policy is told its own later
        self._sampler.seconds_left = lambda: self.seconds_left()  # noqa: PLW0108
        for result in self.results.values():
            self._learn(result)
        for suggestion in rejected_points(study, space):
            self._sampler.rejected(suggestion)
            self._mark_tried(suggestion)
        self._errors, self.error = [], None  # the cause of earlier errors may be fixed by now
        self.begun: list[tuple[Run, LearningCurve]] = []
        """Trials that an earlier process began and did not end, with their evaluations."""
        self._take_up_unfinished()
        is_new = not study.get_trials(deepcopy=False)
        if self.baseline is not None and baseline_number(study) is None:
            params = space.params_of(self.baseline) if self.baseline.values else {}
            study.enqueue_trial(params, user_attrs={BASELINE: True})
        for point in self.first if is_new and not self._pauses else ():
            study.enqueue_trial(space.params_of(point))

    def _take_up_unfinished(self) -> None:
        """Register the trials that an earlier process began and did not end."""
        for stored, suggestion, curve in unfinished_trials(self.study, self.space, self.baseline):
            number = stored.number
            if suggestion.values:
                self._sampler.paused(number, suggestion, curve.evaluations)
            self._paused.add(number)
            if not (self._pauses and PAUSED in stored.user_attrs):
                self._interrupted.append(number)
            if curve.last is not None:
                self._last[number] = curve.last
            self._num_stored[number] = curve.num_evaluations
            is_baseline = BASELINE in stored.user_attrs
            self.begun.append((self._add(stored, suggestion, is_baseline=is_baseline), curve))

    @property
    def num_trials_left(self) -> int | None:
        """Number of trials that may still be started; None means no limit."""
        if self._is_not_worth_more:
            return 0
        if self.num_trials is None:
            return None
        return max(0, self.num_trials - len(self.results) - len(self._unfinished))

    @property
    def has_unfinished(self) -> bool:
        """Whether a trial that was started has not ended, such as one that was paused earlier."""
        return bool(self._unfinished)

    @property
    def outlook(self) -> Outlook | None:
        """What further trials are expected to bring and to cost; None while that cannot be told."""
        return outlook(self.objective, self._last, self.scores)

    @property
    def _is_not_worth_more(self) -> bool:
        """Whether further trials cost more than they save, as this or an earlier process found."""
        return (
            self.expected_trainings is not None
            and self._ended_for is not None
            and self.expected_trainings <= self._ended_for
        )

    @property
    def baseline_trial(self) -> int:
        """Number of the baseline's trial: the last one, if an earlier one was interrupted."""
        number = baseline_number(self.study)
        assert number is not None, "the first trial is the baseline"
        return number

    @property
    def scores(self) -> dict[int, float]:
        """The score of every trial that REACHED the target, by trial number."""
        return {
            number: self.objective.score(result)
            for number, result in self.results.items()
            if result.outcome is Outcome.REACHED
        }

    @property
    def expected_scores(self) -> dict[int, float]:
        """Expected score of another run of each trial that REACHED the target, by trial number.

        All trials of a configuration have the same expected score: that of the sampler's model, if
        it has one, else the configuration's expected running time, which is the total score of its
        runs divided by the number of runs that reached the target.
        """
        if self._expected_scores is None:
            times = running_times(self.results, self.objective)
            self._expected_scores = times | self._sampler.expected_scores()
        return self._expected_scores

    def _score_to_beat(self, number: int) -> float:
        return min(self.expected_scores.values(), default=math.inf)

    def suggest(self) -> Answer:
        """What a free worker does next.

        Raises:
            ConfigError: the sampler raises an error because of its settings.
        """
        if self.error is not None:
            return Done("error")
        if self._interrupted:
            return self._resumed(self._interrupted.pop(0))
        may_start = self.num_trials_left != 0
        if (answer := self._next(may_start=may_start)) is not None:
            return answer
        if len(self._unfinished) > len(self._paused):
            return Wait()
        if may_start:
            return Done("exhausted")
        return Done("not worth" if self._is_not_worth_more else "budget")

    def _next(self, *, may_start: bool) -> Start | Resume | None:
        # the baseline, or an interrupted point
        if may_start and is_any_waiting(self.study):
            return self._ask(self.place)
        if not self._pauses:
            may_start = may_start and not self._candidates.is_exhausted
            return self._ask(self.place or self._untried) if may_start else None
        chosen = self._sampler.propose(new=may_start)
        if isinstance(chosen, Suggestion):
            placed = chosen if self.place is None else self.place(chosen)
            if placed is not None:
                return self._start(
                    *create_trial_at(self.study, self.space, placed), is_baseline=False
                )
            chosen = self._sampler.propose(new=False)
            assert not isinstance(chosen, Suggestion), "no new point was wanted"
        return None if chosen is None else self._resumed(chosen)

    def _resumed(self, number: int) -> Resume:
        self.unpause(number)
        trial = self._unfinished[number]
        cap_seconds = math.inf if trial.is_baseline else self.stopping.cap_seconds(number)
        return Resume(replace(trial, cap_seconds=cap_seconds))

    def _ask(self, place: Callable[[Suggestion], Suggestion | None] | None) -> Start | None:
        asked = ask_trial(self.study, self.space, self.baseline, place)
        return None if asked is None else self._start(*asked)

    def _untried(self, suggestion: Suggestion) -> Suggestion:
        rng = np.random.default_rng(derived_seed(self.seed, f"in place of {suggestion.key}"))
        return self._candidates.in_place_of(suggestion, rng)

    def _start(self, stored: optuna.Trial, suggestion: Suggestion, is_baseline: bool) -> Start:
        if suggestion.values:
            self._sampler.started(stored.number, suggestion)
        return Start(self._add(stored, suggestion, is_baseline=is_baseline))

    def _add(self, stored: optuna.Trial, suggestion: Suggestion, *, is_baseline: bool) -> Run:
        self._mark_tried(suggestion)
        self._stored[stored.number] = stored
        self._unfinished[stored.number] = Run(
            number=stored.number,
            name=search_name(stored.number),
            trial=stored.number,
            suggestion=suggestion,
            overrides=tuple(suggestion.as_overrides()),
            seed=derived_seed(self.seed, f"trial {stored.number}"),
            cap_seconds=math.inf if is_baseline else self.stopping.cap_seconds(stored.number),
            is_baseline=is_baseline,
            retry_of=attributes_of(stored).get(RETRY_OF),
        )
        return self._unfinished[stored.number]

    def _mark_tried(self, suggestion: Suggestion) -> None:
        # without any, it is a baseline that the space does not contain
        if suggestion.values:
            self._candidates.tried(suggestion)

    def observe(self, number: int, evaluation: Evaluation, *, may_pause: bool = True) -> Decision:
        """Decide whether a running trial continues after an evaluation.

        One that is paused is suggested again when it is to be resumed.
        """
        if not self._is_measured(evaluation):
            return Decision.STOP
        self._last[number] = evaluation
        decision = self.stopping.observe(number, evaluation)
        trial = self._unfinished[number]
        # all trials are compared with its result, and confirmation is planned by it
        if trial.is_baseline:
            return Decision.CONTINUE
        if decision is Decision.CONTINUE and trial.suggestion.values:
            decision = self._sampler.observe(
                number, evaluation, new=self.num_trials_left != 0, may_pause=may_pause
            )
        if decision is Decision.PAUSE:
            self._paused.add(number)
        return decision

    def store(self, number: int, curve: LearningCurve) -> None:
        """Append the evaluations of an unfinished trial that are not stored yet, so that another
        process can continue it.
        """
        first = self._num_stored.get(number, 0)
        new = {at: each for at, each in curve.numbered.items() if at >= first}
        if new:
            first_to_report = first if self._reports_all else math.inf
            store_evaluations(self._stored[number], new, first_to_report=first_to_report)
        self._num_stored[number] = curve.num_evaluations

    def pause(self, number: int, curve: LearningCurve) -> None:
        """Note in the study that a trial is paused, with its evaluations; see ``store``."""
        stored = self._stored[number]
        with written_together(stored.storage):
            self.store(number, curve)
            if PAUSED not in attributes_of(stored):
                stored.set_user_attr(PAUSED, True)

    def unpause(self, number: int) -> None:
        """Note that a trial which was to be paused continues, since it could not be saved."""
        self._paused.discard(number)
        self._sampler.resumed(number)

    def rewind(self, number: int, curve: LearningCurve) -> None:
        """Note the evaluations that a trial continues from: later ones were lost."""
        self._num_stored[number] = cut_evaluations(self._stored[number], curve)
        if self._unfinished[number].suggestion.values:
            self._sampler.rewound(number, curve.evaluations)

    def finish(self, result: TrialResult, curve: LearningCurve | None = None) -> float | None:
        """Record how a trial ended, and return its score; None unless it REACHED the target.

        Args:
            curve: the result's evaluations with their numbers, of a trial that had more than are
                kept.
        """
        if not all(map(self._is_measured, result.evaluations)):
            self.interrupt(result.trial)
            return None
        stored = self._stored[result.trial]
        with written_together(stored.storage):
            self.store(result.trial, curve or LearningCurve(dict(enumerate(result.evaluations))))
            store_result(stored, result, None if self._reports_all else self.target)
        self._pop(result.trial)
        tell_result(self.study, result, self.objective)
        self.results[result.trial] = result
        score = self._learn(result)
        trainings = self.expected_trainings
        if trainings is not None and len(self.results) >= NUM_AHEAD and not self._is_not_worth_more:
            expected = self.outlook
            if expected is not None and expected.num_trainings > trainings:
                self.study.set_user_attr(ENDED_FOR, trainings)
                self._ended_for = trainings
        return score

    def _is_measured(self, evaluation: Evaluation) -> bool:
        """Whether an evaluation has all that the objective needs.

        If not, as on another machine of a cluster, the search ends.
        """
        missing = unmeasured(self.objective, device_of(evaluation, "a worker"))
        if missing is not None:
            self.error = ConfigError(f"objective: {missing}")
        return missing is None

    def reject(self, number: int, reason: str) -> None:
        """Withdraw a trial whose point no training can run: the sampler learns that it is
        infeasible, and it costs no budget.
        """
        suggestion = self._unfinished[number].suggestion
        stored = self._withdraw(number)
        reject_trial(self.study, stored, reason)
        self._mark_tried(suggestion)  # which the withdrawal took back
        if suggestion.values:
            self._sampler.rejected(suggestion)

    def interrupt(self, number: int) -> None:
        """Leave a trial as it is; when the study is resumed, it continues from its last state."""
        self._withdraw(number)

    def lost(self, number: int, *, most: int, has_progressed: bool) -> bool:
        """Have a trial that was lost with its worker resumed.

        Return False if it was already resumed ``most`` times in a row without progress.
        """
        stored = self._stored[number]
        num_lost = 1 if has_progressed else attributes_of(stored).get(NUM_LOST, 0) + 1
        if num_lost > most:
            return False
        stored.set_user_attr(NUM_LOST, num_lost)
        self._paused.add(number)
        self._interrupted.append(number)
        return True

    def retry(self, number: int, *, most: int) -> bool:
        """Give up a trial whose times were spoilt, and enqueue its point.

        Return False if the point was already tried again ``most`` times: nothing has changed then.
        """
        num_tried = attributes_of(self._stored[number]).get(NUM_LOST, 0) + 1
        if num_tried > most:
            return False
        self._withdraw(number)
        try_again(self.study, number, num_tried=num_tried)
        return True

    def _withdraw(self, number: int) -> optuna.Trial:
        """Take an unfinished trial away, without a result to learn from."""
        trial, stored = self._pop(number)
        self._candidates.forget(trial.suggestion)
        self._sampler.forget(number)
        return stored

    def _pop(self, number: int) -> tuple[Run, optuna.Trial]:
        self._paused.discard(number)
        self._num_stored.pop(number, None)
        return self._unfinished.pop(number), self._stored.pop(number)

    def _learn(self, result: TrialResult) -> float | None:
        score = self.objective.score(result) if result.outcome is Outcome.REACHED else None
        self.stopping.finish(result, score)
        self._mark_tried(Suggestion(result.values))
        if result.last is not None:
            self._last[result.trial] = result.last
        self._sampler.finish(result, score)
        self._expected_scores = None
        self._errors = [*self._errors, result] if result.outcome is Outcome.ERRORED else []
        self._check_errors()
        return score

    def _check_errors(self) -> None:
        """End the search once enough configurations in a row ERRORED, wherever they were trained;
        where the space has fewer, once they did three times as often.
        """
        most, num_errors = self.max_errors_in_a_row, len(self._errors)
        num_points = len({Suggestion(result.values) for result in self._errors})
        is_enough = num_points >= most or num_errors >= 3 * most
        if is_enough and self.is_everywhere({result.device for result in self._errors}):
            first = self._errors[0]
            self.error = WorkerError(
                f"{num_errors} trials in a row failed; the first was trial {first.trial}:"
                f" {first.error_line}",
                first.error or "no traceback",
            )
