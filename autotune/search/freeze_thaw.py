"""The freeze-thaw search: pauses and resumes trials, and trains next what promises the highest gain per second of training.

A paused trial can be resumed from its checkpoint, so training many configurations for a short time discards no winner. After each
evaluation a model of all learning curves (``autotune.search.curve_model``) estimates, for every paused trial and for a sample of new
points, how likely it is to reach the target sooner than the incumbent. The candidate with the highest expected gain (the chance of
winning times how much would be won) per second of training that it still needs is trained next.

Two guards keep the search from trusting a model that has seen too little. The first few points are drawn at random. And of the trials
that have been trained for some time, a fixed share is always trained on to twice that time, the one with the best metric first, as
asynchronous successive halving does: so the model always has some long curves to learn from.

Source: freeze-thaw Bayesian optimization (Swersky, Snoek and Adams, 2014); asynchronous successive halving (Li et al., 2020).
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np
from scipy.special import log_ndtr

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Target, TrialResult
from autotune.objective import AmortisedTime, BoundedObjective, Objective
from autotune.outcome import Outcome
from autotune.search.candidates import Candidates
from autotune.search.curve_model import CurveModel, Indices, RateModel, one_thread, scaled_shortfalls
from autotune.search.earlier_trials import EarlierStudy
from autotune.search.encoding import Array, UnitCube
from autotune.search.expected_scores import ExpectedScores, Key, spent_by
from autotune.search.feasibility import FeasibilityModel
from autotune.search.known_trials import (
    Calibration,
    CurvePoint,
    FixedFraction,
    KnownTrial,
    Origin,
    num_doublings,
    representative_indices,
    standing,
)
from autotune.search.seeds import derived_seed
from autotune.search.stopping import Decision
from autotune.search.warm_start import WarmStart
from autotune.space import Choice, SearchSpace, Suggestion

_LEAST_EVALUATIONS = 2
"""Evaluations that a trial needs before it may be paused: a single one says little about how its curve rises."""
_DECIDE_AGAIN = 1.2
"""Factor by which a trial's time grows between two decisions on pausing it: to decide at each of many evaluations would take long."""
_LEAST_CURVES = 3
"""Minimum number of trials with an evaluation; with fewer there is nothing to model."""
_MOST_ROWS = 300
"""Maximum number of evaluations that the model is conditioned on."""
_QUICK_SECONDS = 0.25
"""Mean training seconds of a trial below which a decision takes about as long as a trial, so that it uses fewer evaluations."""
_MOST_ROWS_OF_QUICK = 80
_MOST_ROWS_TO_LEARN = 160
"""Maximum number of evaluations that the model's hyperparameters are learnt from."""
_LEARN_ON = 1.06
"""Factor by which the number of trials grows before hyperparameters are learnt a little further."""
_MOST_WAITING = 128
"""Maximum number of waiting trials that one decision compares with each other and with new points."""
_MOST_PROMISING = 96
"""How many of the ``_MOST_WAITING`` trials are those that promised most when last compared; the others are drawn at random."""
_NUM_TIMES = 6
"""Number of candidate times to target at which a trial's chance of winning is computed."""
_WIN = 0.97
"""Fraction of the best score so far that a winner must reach the target within."""
_BY_CHANCE = 0.1
"""Fraction of new points drawn at random, whatever the model says, so that its errors keep no region from being tried."""
_BY_AGE = 0.05
"""Fraction of decisions to resume a trial that go to the one that has waited longest."""
_MOST_OF_REPEAT = 4.0
"""Upper limit on a repeat's score, as a multiple of its configuration's expected score: a repeat is to be measured, not cut short."""
_MOST_CHALLENGES = 2
"""Maximum number of repeats by which a point may become the incumbent: those of a broken configuration all end in errors."""
_LEAST_GAIN = 1e-3
"""Minimum expected gain of a repeat, as the logarithm of a ratio of scores, once there is no new point left."""
_KNOWN_RATE = 0.02
"""Standard deviation of the logarithm of seconds per step, for a trial whose steps have been timed."""


class FreezeThawSampler:
    """Proposes new points and paused trials to resume; a policy that pauses trials asks it instead of an Optuna sampler.

    Args:
        num_startup_trials: number of first trials whose points are drawn at random, or taken from earlier studies.
        least_chance: chance of winning below which paused trials are not resumed, once no new trials will be started and one has
            reached the target.
        num_candidates: points drawn at random for each proposal, of which the most promising is trained.
        reduction_factor: of the trials trained for some time, one in this many is trained on to at least twice that time.
        length_key: config key of the schedule's length in epochs; where the space varies it, curves are modelled over the fraction of
            the schedule that is done.
        earlier: earlier studies to learn from.

    Raises:
        ConfigError: a number out of range, or an objective that does not grow with the time a trial has spent.
    """

    def __init__(
        self,
        *,
        space: SearchSpace,
        target: Target,
        objective: Objective,
        seed: int,
        num_startup_trials: int = 6,
        num_candidates: int = 128,
        reduction_factor: float = 4,
        least_chance: float = 0.01,
        length_key: str = "epochs",
        earlier: Sequence[EarlierStudy] = (),
    ) -> None:
        if num_startup_trials < 1 or num_candidates < 1 or not reduction_factor > 1 or not 0 <= least_chance < 1:
            raise ConfigError(
                f"search.sampler: found num_startup_trials {num_startup_trials}, num_candidates {num_candidates}, reduction_factor "
                f"{reduction_factor}, least_chance {least_chance}; accepted are at least 1, at least 1, above 1, 0 to below 1"
            )
        if not isinstance(objective, BoundedObjective):
            raise ConfigError("search.sampler: FreezeThawSampler needs an objective with lower_bound; accepted with this one is search=tpe")
        self._space = space
        self._target = target
        self._objective = objective
        self._is_time = isinstance(objective, AmortisedTime)
        self._unit = 1.0 if self._is_time else 0.0
        """Score of a second of training, of the first trial seen (0 before it): all scores are divided by it."""
        self._limit = target.max_train_seconds if self._is_time else 0.0
        """Upper bound on any trial's score, divided by ``_unit``: what ``max_train_seconds`` of the costliest trial seen cost."""
        self._num_startup_trials = num_startup_trials
        self._num_candidates = num_candidates
        self._reduction_factor = reduction_factor
        self._least_chance = least_chance
        self._seed = seed
        self._num_draws = 0
        self._num_by_chance = 0
        self._is_earlier_next = True
        self._cube = UnitCube(space)
        self._trials: dict[int, KnownTrial] = {}
        self._length_key = length_key if _is_length(space, length_key) else None
        self._candidates = Candidates(space)
        self._feasibility = FeasibilityModel(self._cube.num_features)
        self._expected = ExpectedScores()
        self._reached: dict[int, Key] = {}
        self._points: dict[Key, Suggestion] = {}
        self._can_repeat: Callable[[Suggestion], bool] = lambda point: True
        self._by_chance, self._by_age = FixedFraction(_BY_CHANCE), FixedFraction(_BY_AGE)
        self._best = math.inf
        """Score that a new configuration's first run must beat to make it the incumbent, divided by ``_unit``; infinite without one."""
        self._earlier = WarmStart(earlier, space, seed)
        self._curves = CurveModel(self._cube.num_features, has_lengths=self._length_key is not None)
        self._rates = RateModel(self._cube.num_features)
        self._num_learnt_of = 0
        self._proposed_as: Origin | None = None
        self._least_gap = 1.0
        self._calibration = {origin: Calibration() for origin in Origin}
        self._chosen: int | Suggestion | None = None
        """The point or paused trial's number that a decision preferred to going on with a running trial: it is proposed next."""

    def propose(self, *, new: bool = True, ending: bool = False) -> Suggestion | int | None:
        """Choose what to train next: a point, if ``new`` trials are wanted, or the number of a paused trial; None if neither pays.

        A point that has reached the target is trained again where that is worth more than any other candidate. ``ending`` says that no
        more new trials will be wanted: then paused trials whose chance of winning is below ``least_chance`` are not resumed.
        """
        if new and (challenger := self._challenger()) is not None:
            return challenger
        chosen, self._chosen = self._chosen, None
        if chosen is None or (isinstance(chosen, Suggestion) and not new):
            with one_thread():
                chosen = self._choose(beside=None, new=new, ending=ending)
        if isinstance(chosen, int):
            self._trials[chosen].is_paused = False
        return chosen

    def started(self, number: int, suggestion: Suggestion) -> None:
        """Register a new trial; its point is not always the one that was proposed."""
        point, key = self._cube.encode([suggestion]), suggestion.key
        self._trials[number] = KnownTrial(
            key=key,
            point=point[0],
            prior_means=self._earlier.prior_means(point)[0],
            log_length=self._log_length(suggestion),
            is_repeat=self._expected.has_reached(key),
            chosen_origin=self._proposed_as,
            last_chosen=self._num_draws,
        )
        self._points[key] = suggestion
        self._earlier.take(suggestion)
        self._candidates.tried(suggestion)
        self._proposed_as = None

    def paused(self, number: int, suggestion: Suggestion, evaluations: Sequence[Evaluation]) -> None:
        """Register a trial that an earlier process paused, so that it can be resumed."""
        self.started(number, suggestion)
        trial = self._trials[number]
        for evaluation in evaluations:
            self._add_evaluation(number, evaluation)
        trial.is_paused = True
        trial.last_decision_seconds = trial.curve[-1].seconds if trial.curve else 0.0

    def observe(self, number: int, evaluation: Evaluation, *, new: bool = True, may_pause: bool = True) -> Decision:
        """Decide after an evaluation whether a running trial goes on, or pauses because another candidate promises more."""
        trial = self._trials[number]
        self._add_evaluation(number, evaluation)
        if not may_pause or trial.is_repeat:
            return Decision.CONTINUE
        is_hopeless = self._next_seconds(trial) > self._best * _WIN
        is_early = len(trial.curve) < _LEAST_EVALUATIONS or trial.curve[-1].seconds < trial.last_decision_seconds * _DECIDE_AGAIN
        if is_early and not is_hopeless:
            return Decision.CONTINUE
        trial.last_decision_seconds = trial.curve[-1].seconds
        with one_thread():
            chosen = self._choose(beside=number, new=new, ending=not new)
        if chosen == number:
            return Decision.CONTINUE
        self._chosen = chosen
        trial.is_paused = True
        return Decision.PAUSE

    def finish(self, result: TrialResult, score: float | None) -> None:
        """Learn from a trial that ended; ``score`` is None unless it reached the target."""
        if result.trial not in self._trials and (result.values or not self._space.parameters):
            self.started(result.trial, Suggestion(result.values))
        trial = self._trials.get(result.trial)
        if trial is None:  # a baseline that the space does not contain
            for evaluation in result.evaluations:
                self._relative_cost(evaluation)
        else:
            for evaluation in result.evaluations[len(trial.curve) :]:
                self._add_evaluation(result.trial, evaluation)
            trial.is_paused, trial.has_ended = False, True
            if result.outcome.is_infeasible:
                self._feasibility.add(str(result.trial), self._cube.features(trial.point[None])[0], is_feasible=False)
            if score is not None and trial.chosen_origin is not None:
                self._calibration[trial.chosen_origin].add_win()
        if self._unit:
            key, features = ((), None) if trial is None else (trial.key, self._cube.features(trial.point[None])[0])
            spent = (spent_by(result, self._objective) if score is None else score) / self._unit
            can_repeat = key in self._points and self._can_repeat(self._points[key])
            self._expected.add(key, features, result.outcome, spent, can_repeat=can_repeat)
            self._best = self._expected.first_run_to_win
            if score is not None:
                self._reached[result.trial] = key
        if self._chosen == result.trial:
            self._chosen = None

    def forget(self, number: int) -> None:
        """Drop a trial that the policy withdrew: rejected, interrupted or lost with its machine."""
        self._trials.pop(number, None)
        if self._chosen == number:
            self._chosen = None

    def rejected(self, suggestion: Suggestion) -> None:
        """Learn that no training can run a point."""
        features = self._cube.features(self._cube.encode([suggestion]))[0]
        self._feasibility.add(" ".join(suggestion.key), features, is_feasible=False)
        self._candidates.tried(suggestion)

    def restrict_repeats(self, can_repeat: Callable[[Suggestion], bool]) -> None:
        """Restrict repeats to the points for which ``can_repeat`` is true."""
        self._can_repeat = can_repeat

    def expected_scores(self) -> dict[int, float]:
        """Expected score of another run of the same configuration, for every trial that reached the target, by trial number."""
        by_key = self._expected.by_key()
        return {number: by_key[key] * self._unit for number, key in self._reached.items()}

    def to_beat(self, number: int) -> float:
        """Score that a trial must beat to be expected better than the incumbent; for a repeat, a few times its expected score."""
        trial = self._trials.get(number)
        if math.isinf(self._best):
            return math.inf
        if trial is None or not trial.is_repeat:
            return self._expected.incumbent * self._unit
        return self._expected.by_key()[trial.key] * _MOST_OF_REPEAT * self._unit

    def _add_evaluation(self, number: int, evaluation: Evaluation) -> None:
        trial = self._trials[number]
        relative_cost = self._relative_cost(evaluation)
        if not trial.curve:
            trial.resume_seconds = (evaluation.build_seconds + evaluation.prepare_seconds) * relative_cost
        seconds = max(self._objective.lower_bound(evaluation) / self._unit, 1e-6)
        if math.isfinite(evaluation.metric):
            if len(trial.curve) == 1:
                self._least_gap = min(self._least_gap, seconds / trial.curve[0].seconds - 1)
            shortfall = self._target.shortfall(evaluation.metric)
            if evaluation.outcome is not Outcome.REACHED:
                shortfall = max(shortfall, 0.0)  # at the target, but a model not yet pruned does not count
            if not trial.curve:
                self._feasibility.add(str(number), self._cube.features(trial.point[None])[0], is_feasible=True)
                if evaluation.epoch <= 0 < evaluation.step:
                    self._length_key = None  # the training does not report its epochs
                    self._curves = CurveModel(self._cube.num_features)
                    for other in self._trials.values():
                        other.log_length = math.inf
            step = evaluation.step if self._length_key is None else evaluation.epoch
            trial.add(CurvePoint(max(step, 0.5) if self._length_key is None else max(step, 1e-3), seconds, shortfall))

    def _relative_cost(self, evaluation: Evaluation) -> float:
        """Score of a second of this trial relative to one of the first trial seen; 1 where the objective is time."""
        if self._is_time:
            return 1.0
        longest = self._target.max_train_seconds
        score = self._objective.lower_bound(evaluation.extrapolated(longest))
        self._unit = self._unit or max(score / longest, 1e-12)
        self._limit = max(self._limit, score / self._unit)
        return score / self._unit / longest

    def _next_seconds(self, trial: KnownTrial) -> float:
        """Earliest time of a trial's next evaluation, by the smallest gap between the first two of any trial, relative to the first."""
        return trial.curve[-1].seconds + self._least_gap * trial.curve[0].seconds if trial.curve else 0.0

    def _choose(self, *, beside: int | None, new: bool, ending: bool) -> Suggestion | int | None:
        """Choose the point to train next, a paused trial, or the running trial ``beside`` (both by number); None if nothing pays."""
        rng = np.random.default_rng(derived_seed(self._seed, f"draw {self._num_draws}"))
        self._num_draws += 1
        may_start, is_exhausted = new, self._candidates.is_exhausted
        new, ending = new and not is_exhausted, ending or is_exhausted
        waiting = [number for number, trial in self._trials.items() if _is_waiting(trial, is_running=number == beside)]
        seen = [trial for trial in self._trials.values() if trial.curve]
        if new and (len(self._trials) < self._num_startup_trials or len(seen) < _LEAST_CURVES):
            return self._mark_proposed(self._startup_point())
        if not seen or not (new or waiting):
            return self._repeat(_LEAST_GAIN) if may_start else None
        promoted = self._promoted(waiting, seen) if new or ending else None
        if promoted is not None:
            return self._mark_chosen(promoted)
        self._learn(seen, rng)
        return self._most_promising(seen, self._shortlist(waiting, rng), rng, beside=beside, new=new, may_start=may_start, ending=ending)

    def _most_promising(
        self,
        seen: Sequence[KnownTrial],
        waiting: Sequence[int],
        rng: np.random.Generator,
        *,
        beside: int | None,
        new: bool,
        may_start: bool,
        ending: bool,
    ) -> Suggestion | int | None:
        """The new point, waiting trial or repeat with the highest expected gain per second, but for the shares by chance and by age."""
        least_gain = _LEAST_GAIN if ending else 0.0
        smallest = min(trial.curve[0].step for trial in seen)
        drawn = self._candidates.draw(rng, self._num_candidates) if new else []
        origins = [Origin.CHANCE] * len(drawn)
        if new and self._curves.uses_prior_means:
            drawn = drawn + self._earlier.points
            origins += [Origin.EARLIER] * len(self._earlier.points)
        origins += [Origin.WAITING] * len(waiting)
        log_gains, soon, ever = self._log_gains(drawn, waiting, smallest, beside)
        for number, log_gain in zip(waiting, log_gains[len(drawn) :], strict=True):
            self._trials[number].index = float(log_gain)
        if ending and math.isfinite(self._best) and ever.max() < self._least_chance:
            return self._repeat(least_gain) if may_start else None
        log_gains += np.log([self._calibration[origin].share for origin in origins])
        best = int(log_gains.argmax())
        if may_start and (repeat := self._repeat(least_gain, better_than=float(log_gains[best]))) is not None:
            return repeat
        if best < len(drawn):
            if self._by_chance.is_due():
                best = self._random_index(drawn, rng)
            else:
                self._proposed_as = origins[best]
                self._calibration[origins[best]].add_choice(float(soon[best]))
            return self._mark_proposed(drawn[best])
        chosen = waiting[best - len(drawn)]
        if chosen != beside and self._by_age.is_due() and (oldest := self._longest_waiting(waiting, beside)) is not None:
            return self._mark_chosen(oldest)
        self._trials[chosen].chosen_origin = Origin.WAITING
        self._calibration[Origin.WAITING].add_choice(float(soon[best]))
        return self._mark_chosen(chosen)

    def _mark_chosen(self, number: int) -> int:
        self._trials[number].last_chosen = self._num_draws
        return number

    def _longest_waiting(self, waiting: Sequence[int], running: int | None) -> int | None:
        """The paused trial, among those that may still win, that was last chosen the longest ago."""
        may_win = [number for number in waiting if number != running and self._next_seconds(self._trials[number]) <= self._best * _WIN]
        return min(may_win, key=lambda number: self._trials[number].last_chosen, default=None)

    def _random_index(self, drawn: Sequence[Suggestion], rng: np.random.Generator) -> int:
        """Draw the index of one of the points, with probability proportional to its chance of being feasible."""
        chances = np.exp(self._feasibility.log_chances(self._cube.features(self._cube.encode(drawn))))
        return int(rng.choice(len(drawn), p=chances / chances.sum()))

    def _challenger(self) -> Suggestion | None:
        """The point expected to be the best by its first run alone, unless a run of it has not ended or its repeats are used up."""
        key = self._expected.challenger
        if key is None or not self._can_repeat(self._points[key]):
            return None
        runs = [trial for trial in self._trials.values() if trial.key == key]
        is_tried = len(runs) > _MOST_CHALLENGES or any(not trial.has_ended for trial in runs)
        return None if is_tried else self._points[key]

    def _repeat(self, least_gain: float, *, better_than: float = -math.inf) -> Suggestion | None:
        """The point most worth training again; None if none gains ``least_gain`` in all and more than ``better_than`` per second."""
        running = {trial.key for trial in self._trials.values() if trial.is_repeat and not trial.has_ended}
        gains = self._expected.log_gains_of_repeats(least_gain)
        for key in sorted(gains, key=lambda key: -gains[key]):
            if gains[key] <= better_than:
                break
            if key not in running and self._can_repeat(self._points[key]):
                return self._points[key]
        return None

    def _startup_point(self) -> Suggestion:
        """In turns a random point, the same as in a search without earlier studies, and a good point of an earlier study."""
        self._is_earlier_next = not self._is_earlier_next
        if not self._is_earlier_next and (point := self._earlier.first()) is not None:
            return point
        self._num_by_chance += 1
        return self._candidates.draw(np.random.default_rng(derived_seed(self._seed, f"start {self._num_by_chance}")), 1)[0]

    def _mark_proposed(self, point: Suggestion) -> Suggestion:
        self._earlier.take(point)  # not only when it starts, since another point may be trained in its place
        return point

    def _promoted(self, waiting: Sequence[int], seen: Sequence[KnownTrial]) -> int | None:
        """A waiting trial to train on to twice its time, because too few trials have been; None if enough have been.

        Trials with the most training come first, and of these the one nearest to the target, but a stalled one only where all have
        stalled: where most trials stall just short of the target, the nearest ones are those that will never reach it.
        """
        first = min(trial.curve[0].seconds for trial in seen)
        horizon = min(self._best, self._limit)
        highest = num_doublings(horizon, first)
        levels = np.sort([num_doublings(trial.curve[-1].seconds, first) for trial in seen])
        num_at_least = len(levels) - np.searchsorted(levels, np.arange(highest + 2))  # trials that reached each num_doublings
        for low in range(highest - 1, -1, -1):
            if num_at_least[low + 1] < num_at_least[low] / self._reduction_factor - 1:
                due = [number for number in waiting if num_doublings(self._trials[number].curve[-1].seconds, first) == low]
                if due:
                    return min(due, key=lambda number: standing(self._trials[number].curve))
        return None

    def _shortlist(self, waiting: list[int], rng: np.random.Generator) -> list[int]:
        """At most ``_MOST_WAITING`` of the waiting trials: those that promised most when last compared, and others at random."""
        if len(waiting) <= _MOST_WAITING:
            return waiting
        order = sorted(waiting, key=lambda number: -self._trials[number].index)
        best, rest = order[:_MOST_PROMISING], order[_MOST_PROMISING:]
        return best + [int(number) for number in rng.choice(rest, _MOST_WAITING - _MOST_PROMISING, replace=False)]

    def _learn(self, seen: Sequence[KnownTrial], rng: np.random.Generator) -> None:
        """Condition the models of curves and of seconds per step on the evaluations of trials seen so far."""
        rows = [(index, *trial.curve[place]) for index, trial in enumerate(seen) for place in representative_indices(trial)]
        trial_indices, steps, _, shortfalls = (np.array(column) for column in zip(*rows, strict=True))
        values = self._goodness(shortfalls, np.array([trial.curve[trial.best_index].shortfall for trial in seen]))
        most = _MOST_ROWS if fmean(trial.curve[-1].seconds for trial in seen) >= _QUICK_SECONDS else _MOST_ROWS_OF_QUICK
        kept = _best_and_random(values, most, rng)
        features = self._cube.features(np.array([trial.point for trial in seen]))
        numbers = np.array([number for number, trial in self._trials.items() if trial.curve], dtype=float)
        has_grown = len(seen) >= _LEARN_ON * self._num_learnt_of
        if has_grown:
            self._num_learnt_of = len(seen)
        prior_means = np.array([trial.prior_means for trial in seen])
        picked = trial_indices[kept].astype(int)
        self._curves.fit(
            features[picked],
            np.log(steps[kept]),
            numbers[picked],
            values[kept],
            prior_means=prior_means[picked],
            log_lengths=np.array([trial.log_length for trial in seen])[picked],
            learn=_sample(len(kept), _MOST_ROWS_TO_LEARN, rng) if has_grown else None,
        )
        rates = np.array([math.log(trial.curve[-1].seconds / trial.curve[-1].step) for trial in seen])
        recent = np.arange(len(rates))[-most:]
        self._rates.fit(features[recent], rates[recent], learn=_sample(len(recent), _MOST_ROWS_TO_LEARN, rng) if has_grown else None)

    def _goodness(self, shortfalls: Array, least: Array) -> Array:
        return scaled_shortfalls(shortfalls, least)

    def _log_gains(
        self, drawn: Sequence[Suggestion], waiting: Sequence[int], smallest_step: float, running: int | None
    ) -> tuple[Array, Array, Array]:
        """For each point and waiting trial: the logarithm of its expected gain per second, its chance to win soon, and to win ever."""
        trials = [self._trials[number] for number in waiting]
        points = np.concatenate([self._cube.encode(drawn), *(trial.point[None] for trial in trials)])
        features = self._cube.features(points)
        prior_means = np.concatenate([self._earlier.prior_means(points[: len(drawn)]), *(trial.prior_means[None] for trial in trials)])
        log_lengths = np.array([self._log_length(point) for point in drawn] + [trial.log_length for trial in trials])
        log_rates, rate_deviations = self._rates.predict(features)
        spent, soonest, resume_seconds = np.zeros(len(points)), np.zeros(len(points)), np.zeros(len(points))
        for row, (number, trial) in enumerate(zip(waiting, trials, strict=True), start=len(drawn)):
            step, spent[row], _ = trial.curve[-1]
            soonest[row] = self._next_seconds(trial)
            resume_seconds[row] = 0.0 if number == running else trial.resume_seconds
            log_rates[row], rate_deviations[row] = math.log(spent[row] / step), _KNOWN_RATE
        has_best = math.isfinite(self._best)
        best = min(self._best, self._limit)
        last = best * _WIN if has_best else best
        first = last * 0.1 if has_best else max(last * 0.01, min(last * 0.02, float(np.exp(log_rates.min()))))
        # No trial is trained past the end of its schedule, so the chance of winning is not counted at later times.
        times = np.minimum(np.geomspace(first, last, _NUM_TIMES)[:, None], np.exp(log_rates + log_lengths))  # [times, points]
        log_steps = np.log(times) - log_rates
        steps, numbers = np.maximum(log_steps, math.log(smallest_step)), np.array([-1.0] * len(drawn) + list(waiting))
        means, deviations = self._curves.predict(features, steps, numbers, prior_means=prior_means, log_lengths=log_lengths)
        log_reached = log_ndtr(means / deviations)
        log_evaluated = log_ndtr((log_steps - math.log(smallest_step) + 0.05) / (rate_deviations + 0.05))
        gains = self._expected.first_run_weight * np.log(best / times) + 0.05 if has_best else np.ones(times.shape)
        cost = np.maximum(times - spent, np.exp(log_rates) * smallest_step * 0.5) + resume_seconds
        log_gains = log_reached + log_evaluated + np.log(gains) - np.log(cost)
        is_possible = (times > spent * 1.001) & (times >= soonest * 0.999)
        chances = np.exp(log_reached + log_evaluated)
        soon = chances[is_possible.argmax(axis=0), np.arange(len(points))]
        ever = np.where(is_possible, chances, 0.0).max(axis=0)
        best_log_gains = np.where(is_possible, log_gains, -np.inf).max(axis=0)
        best_log_gains[: len(drawn)] += self._feasibility.log_chances(features[: len(drawn)])
        return best_log_gains, np.where(is_possible.any(axis=0), soon, 0.0), ever

    def _log_length(self, point: Suggestion) -> float:
        """Logarithm of the length of a point's schedule in epochs; infinite where curves are not modelled over it."""
        return math.inf if self._length_key is None else math.log(point.values[self._length_key])


def _is_length(space: SearchSpace, key: str) -> bool:
    """Whether every point of the space has a parameter with this key and all its values are numbers above 0."""
    parameter = space.parameters.get(key)
    if parameter is None:
        return False
    values = [value for value, _ in parameter.options] if isinstance(parameter, Choice) else list(parameter.ends())
    return all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values)


def _is_waiting(trial: KnownTrial, *, is_running: bool) -> bool:
    """Whether a trial that has been evaluated may go on: it is paused, or the running one that a decision is about."""
    return bool(trial.curve) and (trial.is_paused or is_running)


def _best_and_random(values: Array, most: int, rng: np.random.Generator) -> Indices:
    """Indices of at most ``most`` rows: one half those with the highest values, the other half drawn at random from the rest."""
    if len(values) <= most:
        return np.arange(len(values))
    order = np.argsort(-values)
    best, rest = order[: most // 2], order[most // 2 :]
    return np.concatenate([best, rng.choice(rest, most - len(best), replace=False)])


def _sample(count: int, most: int, rng: np.random.Generator) -> Indices:
    return np.arange(count) if count <= most else rng.choice(count, most, replace=False)
