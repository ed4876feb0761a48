"""The freeze-thaw search: trials are paused after a while, and what is trained next is what the model thinks pays most a second.

A trial that is paused can be taken up again from its checkpoint, so looking at many configurations for a short time throws no
winner away. After each evaluation a model of all learning curves (``autotune.search.curve_model``) says of every paused trial and
of a sample of new points how likely it is to reach the target by some time before the best so far; the highest chance of winning,
weighed by how much would be won, for each second that it still takes is trained next.

Two guards keep it from trusting a model that has seen too little. The first few points are drawn by chance. And of the trials that
have been trained for some time, a fixed share is always trained on to twice that time, the one with the best metric first, as
asynchronous successive halving does: so there are always some long curves to learn from.

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
from autotune.search.curve_model import CurveModel, Indices, RateModel, goodness, one_thread
from autotune.search.earlier_trials import EarlierStudy
from autotune.search.encoding import Array, UnitCube
from autotune.search.expected_scores import ExpectedScores, Key, spent_by
from autotune.search.feasibility import FeasibilityModel
from autotune.search.known_trials import Calibration, KnownTrial, Origin, Seen, Share, level, standing, telling
from autotune.search.seeds import derived_seed
from autotune.search.stopping import Decision
from autotune.search.warm_start import WarmStart
from autotune.space import Choice, SearchSpace, Suggestion

_LEAST_EVALUATIONS = 2
"""Evaluations of a trial before it may be paused: one alone says little of how its curve rises."""
_DECIDE_AGAIN = 1.2
"""Growth of a trial's time after which it is decided again whether it goes on: a curve of many evaluations would take long."""
_LEAST_CURVES = 3
"""Trials with an evaluation below which there is nothing to model."""
_MOST_ROWS = 300
"""Evaluations that the model is conditioned on."""
_QUICK_SECONDS = 0.25
"""Of a trial's training, on average: below it a decision takes about as long, and the model is conditioned on fewer."""
_MOST_ROWS_OF_QUICK = 80
_MOST_ROWS_TO_LEARN = 160
"""Evaluations that its hyperparameters are learnt of."""
_LEARN_ON = 1.06
"""Growth in the number of trials after which hyperparameters are learnt a little further."""
_MOST_WAITING = 128
"""Waiting trials that are weighed against each other and new points in one decision."""
_MOST_PROMISING = 96
"""Of those, the ones that promised most when they were last weighed; the others are drawn by chance."""
_NUM_TIMES = 6
"""Times by which a trial may have reached the target that are weighed against each other."""
_WIN = 0.97
"""Share of the best time so far that a winner must beat."""
_BY_CHANCE = 0.1
"""Share of new points that are drawn by chance, whatever the model says: where it errs no region starves."""
_BY_AGE = 0.05
"""Share of goings-on that the trial gets which has waited longest."""
_MOST_OF_REPEAT = 4.0
"""What a repeat may spend, of what its configuration is expected to need: what it needs is to be measured, not cut short."""
_MOST_CHALLENGES = 2
"""Trials by which a point may be run again to become the incumbent: those of a broken one all end in errors."""
_LEAST_GAIN = 1e-3
"""What a repeat must be expected to win, as the logarithm of a ratio, once there is no new point left."""
_KNOWN_RATE = 0.02
"""Standard deviation of the logarithm of a step's seconds, for a trial that has been measured."""


class FreezeThawSampler:
    """Proposes new points and paused trials to go on with; a policy that pauses asks it instead of an Optuna sampler.

    Args:
        space, target, objective, seed: of the study.
        num_startup_trials: points drawn by chance at first, or taken from earlier studies.
        least_chance: of winning, below which paused trials are left where they are, once no new ones will be begun and one has
            reached the target.
        num_candidates: points drawn by chance for each proposal, of which the most promising is trained.
        reduction_factor: of trials trained for some time, one in so many is trained on to twice that time at least.
        length_key: config key of the schedule's length in epochs; where the space varies it a curve is a function of progress too.
        earlier: studies to learn from.

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
        """What the objective counts a second of training as, of the first one seen: all scores are divided by it."""
        self._limit = target.max_train_seconds if self._is_time else 0.0
        """What no trial can take, as scores are told here: the target's limit on seconds, of the dearest trial seen."""
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
        self._by_chance, self._by_age = Share(_BY_CHANCE), Share(_BY_AGE)
        self._best = math.inf
        """The score by which one run of a new configuration makes it the incumbent."""
        self._earlier = WarmStart(earlier, space, seed)
        self._curves = CurveModel(self._cube.num_features, has_lengths=self._length_key is not None)
        self._rates = RateModel(self._cube.num_features)
        self._num_learnt_of = 0
        self._proposed_as: Origin | None = None
        self._least_gap = 1.0
        self._calibration = {each: Calibration() for each in Origin}
        self._chosen: int | Suggestion | None = None
        """What a decision about a running trial found to be better than going on with it."""

    def propose(self, *, new: bool = True, ending: bool = False) -> Suggestion | int | None:
        """What to train next: a point, where ``new`` trials are wanted, or the number of a paused trial; None for neither.

        A point that has reached the target is trained again where that is worth more than all else. ``ending`` says that no new one will
        be wanted: then paused trials with less than ``least_chance`` are left where they are.
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
        """A new point is trained; not always the one that was proposed."""
        point, key = self._cube.encode([suggestion]), suggestion.key
        self._trials[number] = KnownTrial(
            key=key,
            point=point[0],
            prior_means=self._earlier.prior_means(point)[0],
            log_length=self._log_length(suggestion),
            is_repeat=self._expected.has_reached(key),
            chosen_as=self._proposed_as,
            last_chosen=self._num_draws,
        )
        self._points[key] = suggestion
        self._earlier.take(suggestion)
        self._candidates.tried(suggestion)
        self._proposed_as = None

    def paused(self, number: int, suggestion: Suggestion, evaluations: Sequence[Evaluation]) -> None:
        """A trial that an earlier process paused waits to be taken up again."""
        self.started(number, suggestion)
        trial = self._trials[number]
        for evaluation in evaluations:
            self._note(number, evaluation)
        trial.is_paused = True
        trial.decided_seconds = trial.curve[-1].seconds if trial.curve else 0.0

    def observe(self, number: int, evaluation: Evaluation, *, new: bool = True, may_pause: bool = True) -> Decision:
        """Whether a running trial goes on, or pauses because another one promises more."""
        trial = self._trials[number]
        self._note(number, evaluation)
        if not may_pause or trial.is_repeat:
            return Decision.CONTINUE
        is_hopeless = self._next_seconds(trial) > self._best * _WIN
        is_early = len(trial.curve) < _LEAST_EVALUATIONS or trial.curve[-1].seconds < trial.decided_seconds * _DECIDE_AGAIN
        if is_early and not is_hopeless:
            return Decision.CONTINUE
        trial.decided_seconds = trial.curve[-1].seconds
        with one_thread():
            chosen = self._choose(beside=number, new=new, ending=not new)
        if chosen == number:
            return Decision.CONTINUE
        self._chosen = chosen
        trial.is_paused = True
        return Decision.PAUSE

    def finish(self, result: TrialResult, score: float | None) -> None:
        """A trial ended; ``score`` where it reached the target."""
        if result.trial not in self._trials and (result.values or not self._space.parameters):
            self.started(result.trial, Suggestion(result.values))
        trial = self._trials.get(result.trial)
        if trial is None:  # a baseline that the space does not contain
            for evaluation in result.evaluations:
                self._dearness(evaluation)
        else:
            for evaluation in result.evaluations[len(trial.curve) :]:
                self._note(result.trial, evaluation)
            trial.is_paused, trial.has_ended = False, True
            if result.outcome.is_infeasible:
                self._feasibility.add(str(result.trial), self._cube.features(trial.point[None])[0], is_feasible=False)
            if score is not None and trial.chosen_as is not None:
                self._calibration[trial.chosen_as].came_true()
        if self._unit:
            key, features = ((), None) if trial is None else (trial.key, self._cube.features(trial.point[None])[0])
            spent = (spent_by(result, self._objective) if score is None else score) / self._unit
            can_repeat = key in self._points and self._can_repeat(self._points[key])
            self._expected.add(key, features, result.outcome, spent, can_repeat=can_repeat)
            self._best = self._expected.winning_draw
            if score is not None:
                self._reached[result.trial] = key
        if self._chosen == result.trial:
            self._chosen = None

    def forget(self, number: int) -> None:
        """A trial was taken back."""
        self._trials.pop(number, None)
        if self._chosen == number:
            self._chosen = None

    def rejected(self, suggestion: Suggestion) -> None:
        """A point that no training can run."""
        features = self._cube.features(self._cube.encode([suggestion]))[0]
        self._feasibility.add(" ".join(suggestion.key), features, is_feasible=False)
        self._candidates.tried(suggestion)

    def repeats_where(self, can_repeat: Callable[[Suggestion], bool]) -> None:
        """Points are trained again only where this says that they can be."""
        self._can_repeat = can_repeat

    def expected_scores(self) -> dict[int, float]:
        """The expected score of the configuration of every trial that reached the target, if it is trained again, by trial number."""
        by_key = self._expected.by_key()
        return {number: by_key[key] * self._unit for number, key in self._reached.items()}

    def to_beat(self, number: int) -> float:
        """The score that a trial must beat to be expected better than the incumbent; a repeat may take a few times what is expected."""
        trial = self._trials.get(number)
        if math.isinf(self._best):
            return math.inf
        if trial is None or not trial.is_repeat:
            return self._expected.incumbent * self._unit
        return self._expected.by_key()[trial.key] * _MOST_OF_REPEAT * self._unit

    def _note(self, number: int, evaluation: Evaluation) -> None:
        trial = self._trials[number]
        dearness = self._dearness(evaluation)
        if not trial.curve:
            trial.resume_seconds = (evaluation.build_seconds + evaluation.prepare_seconds) * dearness
        seconds = max(self._objective.lower_bound(evaluation) / self._unit, 1e-6)
        if math.isfinite(evaluation.metric):
            if len(trial.curve) == 1:
                self._least_gap = min(self._least_gap, seconds / trial.curve[0].seconds - 1)
            shortfall = self._target.shortfall(evaluation.metric)
            if evaluation.outcome is not Outcome.REACHED:
                shortfall = max(shortfall, 0.0)  # before a model is pruned, none at the target counts
            if not trial.curve:
                self._feasibility.add(str(number), self._cube.features(trial.point[None])[0], is_feasible=True)
                if evaluation.epoch <= 0 < evaluation.step:
                    self._length_key = None  # this training does not tell its epochs
                    self._curves = CurveModel(self._cube.num_features)
                    for each in self._trials.values():
                        each.log_length = math.inf
            step = evaluation.step if self._length_key is None else evaluation.epoch
            trial.add(Seen(max(step, 0.5) if self._length_key is None else max(step, 1e-3), seconds, shortfall))

    def _dearness(self, evaluation: Evaluation) -> float:
        """How many times as much a second of this trial counts as one of the first trial seen; 1 where seconds are what counts."""
        if self._is_time:
            return 1.0
        longest = self._target.max_train_seconds
        score = self._objective.lower_bound(evaluation.extrapolated(longest))
        self._unit = self._unit or max(score / longest, 1e-12)
        self._limit = max(self._limit, score / self._unit)
        return score / self._unit / longest

    def _next_seconds(self, trial: KnownTrial) -> float:
        """The soonest that the trial's next evaluation is to be expected, as a second evaluation came after a first one so far."""
        return trial.curve[-1].seconds + self._least_gap * trial.curve[0].seconds if trial.curve else 0.0

    def _choose(self, *, beside: int | None, new: bool, ending: bool) -> Suggestion | int | None:
        """A point to train, or the number of a paused trial or of the running one ``beside`` them."""
        rng = np.random.default_rng(derived_seed(self._seed, f"draw {self._num_draws}"))
        self._num_draws += 1
        may_start, is_exhausted = new, self._candidates.are_exhausted
        new, ending = new and not is_exhausted, ending or is_exhausted
        waiting = [number for number, trial in self._trials.items() if _is_waiting(trial, is_running=number == beside)]
        seen = [trial for trial in self._trials.values() if trial.curve]
        if new and (len(self._trials) < self._num_startup_trials or len(seen) < _LEAST_CURVES):
            return self._proposed(self._started_with())
        if not seen or not (new or waiting):
            return self._repeat(_LEAST_GAIN) if may_start else None
        promoted = self._promoted(waiting, seen) if new or ending else None
        if promoted is not None:
            return self._trained_on(promoted)
        self._learn(seen, rng)
        return self._weighed(seen, self._worth_weighing(waiting, rng), rng, beside=beside, new=new, may_start=may_start, ending=ending)

    def _weighed(
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
        """What promises most a second of new points, waiting trials and repeats, or whose turn it is whatever they promise."""
        least_gain = _LEAST_GAIN if ending else 0.0
        smallest = min(trial.curve[0].step for trial in seen)
        drawn = self._candidates.draw(rng, self._num_candidates) if new else []
        origins = [Origin.CHANCE] * len(drawn)
        if new and self._curves.uses_prior_means:
            drawn = drawn + self._earlier.points
            origins += [Origin.EARLIER] * len(self._earlier.points)
        origins += [Origin.WAITING] * len(waiting)
        indices, soon, ever = self._indices(drawn, waiting, smallest, beside)
        for number, index in zip(waiting, indices[len(drawn) :], strict=True):
            self._trials[number].index = float(index)
        if ending and math.isfinite(self._best) and ever.max() < self._least_chance:
            return self._repeat(least_gain) if may_start else None
        indices += np.log([self._calibration[each].share for each in origins])
        best = int(indices.argmax())
        if may_start and (repeat := self._repeat(least_gain, better_than=float(indices[best]))) is not None:
            return repeat
        if best < len(drawn):
            if self._by_chance.is_due():
                best = self._drawn_by_chance(drawn, rng)
            else:
                self._proposed_as = origins[best]
                self._calibration[origins[best]].expects(float(soon[best]))
            return self._proposed(drawn[best])
        chosen = waiting[best - len(drawn)]
        if chosen != beside and self._by_age.is_due() and (oldest := self._longest_waiting(waiting, beside)) is not None:
            return self._trained_on(oldest)
        self._trials[chosen].chosen_as = Origin.WAITING
        self._calibration[Origin.WAITING].expects(float(soon[best]))
        return self._trained_on(chosen)

    def _trained_on(self, number: int) -> int:
        self._trials[number].last_chosen = self._num_draws
        return number

    def _longest_waiting(self, waiting: Sequence[int], running: int | None) -> int | None:
        """Of the paused trials that may still win, the one that was not chosen for longest."""
        may_win = [number for number in waiting if number != running and self._next_seconds(self._trials[number]) <= self._best * _WIN]
        return min(may_win, key=lambda number: self._trials[number].last_chosen, default=None)

    def _drawn_by_chance(self, drawn: Sequence[Suggestion], rng: np.random.Generator) -> int:
        """The place of one of the points, each as likely as it is feasible."""
        chances = np.exp(self._feasibility.log_chances(self._cube.features(self._cube.encode(drawn))))
        return int(rng.choice(len(drawn), p=chances / chances.sum()))

    def _challenger(self) -> Suggestion | None:
        """The point that would be the incumbent if its first run is to be believed, unless it is run again at the moment or in vain."""
        key = self._expected.challenger
        if key is None or not self._can_repeat(self._points[key]):
            return None
        runs = [trial for trial in self._trials.values() if trial.key == key]
        is_tried = len(runs) > _MOST_CHALLENGES or any(not trial.has_ended for trial in runs)
        return None if is_tried else self._points[key]

    def _repeat(self, least_gain: float, *, better_than: float = -math.inf) -> Suggestion | None:
        """The point that is most worth training again, where that is expected to win more than so much a second."""
        running = {trial.key for trial in self._trials.values() if trial.is_repeat and not trial.has_ended}
        gains = self._expected.log_gains_of_repeats(least_gain)
        for key in sorted(gains, key=lambda key: -gains[key]):
            if gains[key] <= better_than:
                break
            if key not in running and self._can_repeat(self._points[key]):
                return self._points[key]
        return None

    def _started_with(self) -> Suggestion:
        """A point of an earlier study and one drawn by chance, in turns; the latter are those that a search without studies draws."""
        self._is_earlier_next = not self._is_earlier_next
        if not self._is_earlier_next and (known := self._earlier.first()) is not None:
            return known
        self._num_by_chance += 1
        return self._candidates.draw(np.random.default_rng(derived_seed(self._seed, f"start {self._num_by_chance}")), 1)[0]

    def _proposed(self, point: Suggestion) -> Suggestion:
        self._earlier.take(point)  # here, since another one may be trained in its place
        return point

    def _promoted(self, waiting: Sequence[int], seen: Sequence[KnownTrial]) -> int | None:
        """A waiting trial that is due to be trained on to twice its time, because too few have been; the longest trained first.

        The one nearest to the target is, but one that has stalled only where all have: where most trials stall just short of the
        target, the nearest ones are those that will never reach it.
        """
        first = min(trial.curve[0].seconds for trial in seen)
        horizon = min(self._best, self._limit)
        highest = level(horizon, first)
        levels = np.sort([level(trial.curve[-1].seconds, first) for trial in seen])
        numbers = len(levels) - np.searchsorted(levels, np.arange(highest + 2))
        for low in range(highest - 1, -1, -1):
            if numbers[low + 1] < numbers[low] / self._reduction_factor - 1:
                here = [number for number in waiting if level(self._trials[number].curve[-1].seconds, first) == low]
                if here:
                    return min(here, key=lambda number: standing(self._trials[number].curve))
        return None

    def _worth_weighing(self, waiting: list[int], rng: np.random.Generator) -> list[int]:
        """At most so many waiting trials as a decision has time for: those that promised most, and of the others some by chance."""
        if len(waiting) <= _MOST_WAITING:
            return waiting
        order = sorted(waiting, key=lambda number: -self._trials[number].index)
        best, rest = order[:_MOST_PROMISING], order[_MOST_PROMISING:]
        return best + [int(each) for each in rng.choice(rest, _MOST_WAITING - _MOST_PROMISING, replace=False)]

    def _learn(self, seen: Sequence[KnownTrial], rng: np.random.Generator) -> None:
        """Condition both models on what has been seen."""
        rows = [(index, *trial.curve[place]) for index, trial in enumerate(seen) for place in telling(trial)]
        index, steps, _, shortfalls = (np.array(each) for each in zip(*rows, strict=True))
        values = self._goodness(shortfalls, np.array([trial.curve[trial.best_place].shortfall for trial in seen]))
        most = self._most_rows(seen)
        kept = _some(values, most, rng)
        features = self._cube.features(np.array([trial.point for trial in seen]))
        numbers = np.array([number for number, trial in self._trials.items() if trial.curve], dtype=float)
        grown = len(seen) >= _LEARN_ON * self._num_learnt_of
        if grown:
            self._num_learnt_of = len(seen)
        prior_means = np.array([trial.prior_means for trial in seen])
        picked = index[kept].astype(int)
        self._curves.fit(
            features[picked],
            np.log(steps[kept]),
            numbers[picked],
            values[kept],
            prior_means=prior_means[picked],
            log_lengths=np.array([trial.log_length for trial in seen])[picked],
            learn=_sample(len(kept), _MOST_ROWS_TO_LEARN, rng) if grown else None,
        )
        rates = np.array([math.log(trial.curve[-1].seconds / trial.curve[-1].step) for trial in seen])
        recent = np.arange(len(rates))[-most:]
        self._rates.fit(features[recent], rates[recent], learn=_sample(len(recent), _MOST_ROWS_TO_LEARN, rng) if grown else None)

    def _most_rows(self, seen: Sequence[KnownTrial]) -> int:
        """How many evaluations the model is conditioned on: what a decision takes must be little beside what it decides on."""
        return _MOST_ROWS if fmean(trial.curve[-1].seconds for trial in seen) >= _QUICK_SECONDS else _MOST_ROWS_OF_QUICK

    def _goodness(self, shortfalls: Array, least: Array) -> Array:
        return goodness(shortfalls, least)

    def _indices(
        self, drawn: Sequence[Suggestion], waiting: Sequence[int], smallest_step: float, running: int | None
    ) -> tuple[Array, Array, Array]:
        """Of each point and waiting trial: the logarithm of what is expected to be won a second, the chances to win soon, and ever."""
        trials = [self._trials[number] for number in waiting]
        points = np.concatenate([self._cube.encode(drawn), *(trial.point[None] for trial in trials)])
        features = self._cube.features(points)
        prior_means = np.concatenate([self._earlier.prior_means(points[: len(drawn)]), *(trial.prior_means[None] for trial in trials)])
        log_lengths = np.array([self._log_length(point) for point in drawn] + [trial.log_length for trial in trials])
        log_rates, deviations = self._rates.predict(features)
        spent, soonest, resuming = np.zeros(len(points)), np.zeros(len(points)), np.zeros(len(points))
        for row, (number, trial) in enumerate(zip(waiting, trials, strict=True), start=len(drawn)):
            step, spent[row], _ = trial.curve[-1]
            soonest[row] = self._next_seconds(trial)
            resuming[row] = 0.0 if number == running else trial.resume_seconds
            log_rates[row], deviations[row] = math.log(spent[row] / step), _KNOWN_RATE
        has_best = math.isfinite(self._best)
        best = min(self._best, self._limit)
        last = best * _WIN if has_best else best
        first = last * 0.1 if has_best else max(last * 0.01, min(last * 0.02, float(np.exp(log_rates.min()))))
        # No trial goes on past the end of its schedule: what is not won by then is not.
        times = np.minimum(np.geomspace(first, last, _NUM_TIMES)[:, None], np.exp(log_rates + log_lengths))  # [times, points]
        log_steps = np.log(times) - log_rates
        steps, of_trial = np.maximum(log_steps, math.log(smallest_step)), np.array([-1.0] * len(drawn) + list(waiting))
        means, spreads = self._curves.predict(features, steps, of_trial, prior_means=prior_means, log_lengths=log_lengths)
        by_then = log_ndtr(means / spreads)
        evaluated = log_ndtr((log_steps - math.log(smallest_step) + 0.05) / (deviations + 0.05))
        won = self._expected.weight_of_run * np.log(best / times) + 0.05 if has_best else np.ones(times.shape)
        cost = np.maximum(times - spent, np.exp(log_rates) * smallest_step * 0.5) + resuming
        index = by_then + evaluated + np.log(won) - np.log(cost)
        counts = (times > spent * 1.001) & (times >= soonest * 0.999)
        chances = np.exp(by_then + evaluated)
        soon = chances[counts.argmax(axis=0), np.arange(len(points))]
        ever = np.where(counts, chances, 0.0).max(axis=0)
        indices = np.where(counts, index, -np.inf).max(axis=0)
        indices[: len(drawn)] += self._feasibility.log_chances(features[: len(drawn)])
        return indices, np.where(counts.any(axis=0), soon, 0.0), ever

    def _log_length(self, point: Suggestion) -> float:
        """Logarithm of the length of a point's schedule in epochs; infinite where the space does not vary it."""
        return math.inf if self._length_key is None else math.log(point.values[self._length_key])


def _is_length(space: SearchSpace, key: str) -> bool:
    """Whether the space always varies a number above 0 by this key."""
    parameter = space.parameters.get(key)
    if parameter is None:
        return False
    values = [value for value, _ in parameter.options] if isinstance(parameter, Choice) else list(parameter.ends())
    return all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values)


def _is_waiting(trial: KnownTrial, *, is_running: bool) -> bool:
    """Whether a trial may go on: a paused one, or the one that a decision is about."""
    return bool(trial.curve) and (trial.is_paused or is_running)


def _some(values: Array, most: int, rng: np.random.Generator) -> Indices:
    """Indices of at most so many rows: the better half of them the best, the others by chance."""
    if len(values) <= most:
        return np.arange(len(values))
    order = np.argsort(-values)
    best, rest = order[: most // 2], order[most // 2 :]
    return np.concatenate([best, rng.choice(rest, most - len(best), replace=False)])


def _sample(count: int, most: int, rng: np.random.Generator) -> Indices:
    return np.arange(count) if count <= most else rng.choice(count, most, replace=False)
