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
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Outcome, Target, TrialResult
from autotune.objective import AmortisedTime, BoundedObjective, Objective
from autotune.search.chance import Chance
from autotune.search.curve_model import CurveModel, Indices, RateModel, goodness, one_thread
from autotune.search.earlier_trials import EarlierStudy
from autotune.search.encoding import Array, UnitCube
from autotune.search.seeds import derived_seed
from autotune.search.stopping import Decision
from autotune.search.warm_start import WarmStart
from autotune.space import SearchSpace, Suggestion

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
_HALF = 0.6
"""Share of a trial's time that counts as half of it: evaluations do not come at even times."""
_STALLED = 0.9
"""Of what a trial lacked at half its time, what it lacks still where it has stalled."""
_NUM_TIMES = 6
"""Times by which a trial may have reached the target that are weighed against each other."""
_WIN = 0.97
"""Share of the best time so far that a winner must beat."""
_FORGETTING = 0.95
"""What an earlier choice counts beside the one after it, in judging how much of the model's chances is to be believed."""
_KNOWN_RATE = 0.02
"""Standard deviation of the logarithm of a step's seconds, for a trial that has been measured."""


class _Seen(NamedTuple):
    """One evaluation of a trial."""

    step: float
    seconds: float
    shortfall: float


@dataclass
class _Trial:
    """What is known of one trial."""

    point: Array
    """Coordinates ``[parameters]``."""
    merits: Array
    """What earlier studies expect of it ``[studies]``."""
    curve: list[_Seen] = field(default_factory=list)
    best_place: int = 0
    """Of the evaluation nearest to the target."""
    decided_seconds: float = 0.0
    """Where in its training it was last decided whether it goes on."""
    is_paused: bool = False
    hoped_as: "_Origin | None" = None
    """As what it was last chosen by its index."""
    index: float = math.inf
    """What it promised when it was last weighed, since its last evaluation; infinite where it has not been."""
    resume_seconds: float = 0.0
    """What making its training anew takes, apart from its steps."""


class FreezeThawSampler:
    """Proposes new points and paused trials to go on with; a policy that pauses asks it instead of an Optuna sampler.

    Args:
        space, target, objective, seed: of the study.
        num_startup_trials: points drawn by chance at first, or taken from earlier studies.
        least_chance: of winning, below which paused trials are left where they are, once no new ones will be begun and one has
            reached the target.
        num_candidates: points drawn by chance for each proposal, of which the most promising is trained.
        reduction_factor: of trials trained for some time, one in so many is trained on to twice that time at least.
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
        self._trials: dict[int, _Trial] = {}
        self._best = math.inf
        self._earlier = WarmStart(earlier, space, seed)
        self._curves = CurveModel(self._cube.num_features)
        self._rates = RateModel(self._cube.num_features)
        self._num_learnt_of = 0
        self._hoped_as: _Origin | None = None
        self._least_gap = 1.0
        self._hopes = {each: _Hopes() for each in _Origin}
        self._chosen: int | Suggestion | None = None
        """What a decision about a running trial found to be better than going on with it."""

    def propose(self, *, new: bool = True, ending: bool = False) -> Suggestion | int | None:
        """What to train next: a new point, where ``new`` ones are wanted, or the number of a paused trial; None for neither.

        ``ending`` says that no new one will be wanted: then paused trials with less than ``least_chance`` are left where they are.
        """
        chosen, self._chosen = self._chosen, None
        if chosen is None or (isinstance(chosen, Suggestion) and not new):
            with one_thread():
                chosen = self._choose(beside=None, new=new, ending=ending)
        if isinstance(chosen, int):
            self._trials[chosen].is_paused = False
        return chosen

    def started(self, number: int, suggestion: Suggestion) -> None:
        """A new point is trained; not always the one that was proposed."""
        point = self._cube.encode([suggestion])
        self._trials[number] = _Trial(point[0], self._earlier.merits(point)[0], hoped_as=self._hoped_as)
        self._earlier.take(suggestion)
        self._hoped_as = None

    def paused(self, number: int, suggestion: Suggestion, evaluations: Sequence[Evaluation]) -> None:
        """A trial that an earlier process paused waits to be taken up again."""
        self.started(number, suggestion)
        trial = self._trials[number]
        for evaluation in evaluations:
            self._note(trial, evaluation)
        trial.is_paused = True
        trial.decided_seconds = trial.curve[-1].seconds if trial.curve else 0.0

    def observe(self, number: int, evaluation: Evaluation, *, new: bool = True, may_pause: bool = True) -> Decision:
        """Whether a running trial goes on, or pauses because another one promises more."""
        trial = self._trials[number]
        self._note(trial, evaluation)
        if not may_pause:
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
        trial = self._trials.get(result.trial)
        if trial is None:
            if not result.values and self._space.parameters:
                return  # a baseline that the space does not contain
            self.started(result.trial, Suggestion(result.values))
            trial = self._trials[result.trial]
        for evaluation in result.evaluations[len(trial.curve) :]:
            self._note(trial, evaluation)
        trial.is_paused = False
        if score is not None:
            self._best = min(self._best, score / self._unit)
            if trial.hoped_as is not None:
                self._hopes[trial.hoped_as].came_true()
        if self._chosen == result.trial:
            self._chosen = None

    def forget(self, number: int) -> None:
        """A trial was taken back."""
        self._trials.pop(number, None)
        if self._chosen == number:
            self._chosen = None

    def _note(self, trial: _Trial, evaluation: Evaluation) -> None:
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
            trial.curve.append(_Seen(max(evaluation.step, 0.5), seconds, shortfall))
            trial.index = math.inf
            if trial.curve[-1].shortfall < trial.curve[trial.best_place].shortfall:
                trial.best_place = len(trial.curve) - 1

    def _dearness(self, evaluation: Evaluation) -> float:
        """How many times as much a second of this trial counts as one of the first trial seen; 1 where seconds are what counts."""
        if self._is_time:
            return 1.0
        longest = self._target.max_train_seconds
        score = self._objective.lower_bound(evaluation.extrapolated(longest))
        self._unit = self._unit or max(score / longest, 1e-12)
        self._limit = max(self._limit, score / self._unit)
        return score / self._unit / longest

    def _next_seconds(self, trial: _Trial) -> float:
        """The soonest that the trial's next evaluation is to be expected, as a second evaluation came after a first one so far."""
        return trial.curve[-1].seconds + self._least_gap * trial.curve[0].seconds if trial.curve else 0.0

    def _choose(self, *, beside: int | None, new: bool, ending: bool) -> Suggestion | int | None:
        """A new point, or the number of a paused trial or of the running one ``beside`` them."""
        rng = np.random.default_rng(derived_seed(self._seed, f"draw {self._num_draws}"))
        self._num_draws += 1
        waiting = [number for number, trial in self._trials.items() if (trial.is_paused or number == beside) and trial.curve]
        seen = [trial for trial in self._trials.values() if trial.curve]
        if new and (len(self._trials) < self._num_startup_trials or len(seen) < _LEAST_CURVES):
            return self._proposed(self._started_with())
        if not seen or not (new or waiting):
            return None
        promoted = self._promoted(waiting, seen) if new or ending else None
        if promoted is not None:
            return promoted
        self._learn(seen, rng)
        waiting = self._worth_weighing(waiting, rng)
        smallest = min(trial.curve[0].step for trial in seen)
        drawn = self._draw(rng, self._num_candidates) if new else []
        origins = [_Origin.CHANCE] * len(drawn)
        if new and self._curves.uses_merits:
            drawn = drawn + self._earlier.points
            origins += [_Origin.EARLIER] * len(self._earlier.points)
        origins += [_Origin.WAITING] * len(waiting)
        points = np.concatenate([self._cube.encode(drawn), *(self._trials[number].point[None] for number in waiting)])
        indices, soon, ever = self._indices(points, [-1] * len(drawn) + waiting, smallest, beside)
        for number, index in zip(waiting, indices[len(drawn) :], strict=True):
            self._trials[number].index = float(index)
        if ending and math.isfinite(self._best) and ever.max() < self._least_chance:
            return None
        indices += np.log([self._hopes[each].share for each in origins])
        best = int(indices.argmax())
        self._hopes[origins[best]].was_raised(float(soon[best]))
        if best < len(drawn):
            self._hoped_as = origins[best]
            return self._proposed(drawn[best])
        chosen = waiting[best - len(drawn)]
        self._trials[chosen].hoped_as = _Origin.WAITING
        return chosen

    def _started_with(self) -> Suggestion:
        """A point of an earlier study and one drawn by chance, in turns; the latter are those that a search without studies draws."""
        self._is_earlier_next = not self._is_earlier_next
        if not self._is_earlier_next and (known := self._earlier.first()) is not None:
            return known
        self._num_by_chance += 1
        return self._draw(np.random.default_rng(derived_seed(self._seed, f"start {self._num_by_chance}")), 1)[0]

    def _proposed(self, point: Suggestion) -> Suggestion:
        self._earlier.take(point)  # here, since another one may be trained in its place
        return point

    def _draw(self, rng: np.random.Generator, count: int) -> list[Suggestion]:
        by_chance = Chance(rng)
        return [self._space.suggest(by_chance) for _ in range(count)]

    def _promoted(self, waiting: Sequence[int], seen: Sequence[_Trial]) -> int | None:
        """A waiting trial that is due to be trained on to twice its time, because too few have been; the longest trained first.

        The one nearest to the target is, but one that has stalled only where all have: where most trials stall just short of the
        target, the nearest ones are those that will never reach it.
        """
        first = min(trial.curve[0].seconds for trial in seen)
        horizon = min(self._best, self._limit)
        highest = _level(horizon, first)
        levels = np.sort([_level(trial.curve[-1].seconds, first) for trial in seen])
        numbers = len(levels) - np.searchsorted(levels, np.arange(highest + 2))
        for level in range(highest - 1, -1, -1):
            if numbers[level + 1] < numbers[level] / self._reduction_factor - 1:
                here = [number for number in waiting if _level(self._trials[number].curve[-1].seconds, first) == level]
                if here:
                    return min(here, key=lambda number: _standing(self._trials[number].curve))
        return None

    def _worth_weighing(self, waiting: list[int], rng: np.random.Generator) -> list[int]:
        """At most so many waiting trials as a decision has time for: those that promised most, and of the others some by chance."""
        if len(waiting) <= _MOST_WAITING:
            return waiting
        order = sorted(waiting, key=lambda number: -self._trials[number].index)
        best, rest = order[:_MOST_PROMISING], order[_MOST_PROMISING:]
        return best + [int(each) for each in rng.choice(rest, _MOST_WAITING - _MOST_PROMISING, replace=False)]

    def _learn(self, seen: Sequence[_Trial], rng: np.random.Generator) -> None:
        """Condition both models on what has been seen."""
        rows = [(index, *trial.curve[place]) for index, trial in enumerate(seen) for place in _telling(trial)]
        index, steps, _, shortfalls = (np.array(each) for each in zip(*rows, strict=True))
        values = self._goodness(shortfalls, np.array([trial.curve[trial.best_place].shortfall for trial in seen]))
        most = self._most_rows(seen)
        kept = _some(values, most, rng)
        features = self._cube.features(np.array([trial.point for trial in seen]))
        numbers = np.array([number for number, trial in self._trials.items() if trial.curve], dtype=float)
        grown = len(seen) >= _LEARN_ON * self._num_learnt_of
        if grown:
            self._num_learnt_of = len(seen)
        merits = np.array([trial.merits for trial in seen])
        picked = index[kept].astype(int)
        self._curves.fit(
            features[picked],
            np.log(steps[kept]),
            numbers[picked],
            values[kept],
            merits=merits[picked],
            learn=_sample(len(kept), _MOST_ROWS_TO_LEARN, rng) if grown else None,
        )
        rates = np.array([math.log(trial.curve[-1].seconds / trial.curve[-1].step) for trial in seen])
        recent = np.arange(len(rates))[-most:]
        self._rates.fit(features[recent], rates[recent], learn=_sample(len(recent), _MOST_ROWS_TO_LEARN, rng) if grown else None)

    def _most_rows(self, seen: Sequence[_Trial]) -> int:
        """How many evaluations the model is conditioned on: what a decision takes must be little beside what it decides on."""
        return _MOST_ROWS if fmean(trial.curve[-1].seconds for trial in seen) >= _QUICK_SECONDS else _MOST_ROWS_OF_QUICK

    def _goodness(self, shortfalls: Array, least: Array) -> Array:
        return goodness(shortfalls, least)

    def _indices(self, points: Array, numbers: Sequence[int], smallest_step: float, running: int | None) -> tuple[Array, Array, Array]:
        """Of each point or waiting trial: the logarithm of what is expected to be won a second, the chances to win soon, and ever."""
        features = self._cube.features(points)
        merits = np.concatenate(
            [self._earlier.merits(points[np.array(numbers) < 0]), *(self._trials[number].merits[None] for number in numbers if number >= 0)]
        )
        log_rates, deviations = self._rates.predict(features)
        spent, soonest, resuming = np.zeros(len(points)), np.zeros(len(points)), np.zeros(len(points))
        for row, number in enumerate(numbers):
            if number >= 0:
                step, spent[row], _ = self._trials[number].curve[-1]
                soonest[row] = self._next_seconds(self._trials[number])
                resuming[row] = 0.0 if number == running else self._trials[number].resume_seconds
                log_rates[row], deviations[row] = math.log(spent[row] / step), _KNOWN_RATE
        has_best = math.isfinite(self._best)
        best = min(self._best, self._limit)
        last = best * _WIN if has_best else best
        first = last * 0.1 if has_best else max(last * 0.01, min(last * 0.02, float(np.exp(log_rates.min()))))
        times = np.geomspace(first, last, _NUM_TIMES)
        log_steps = np.log(times)[:, None] - log_rates  # [times, points]
        steps, of_trial = np.maximum(log_steps, math.log(smallest_step)), np.array(numbers, dtype=float)
        means, spreads = self._curves.predict(features, steps, of_trial, merits=merits)
        by_then = log_ndtr(means / spreads)
        evaluated = log_ndtr((log_steps - math.log(smallest_step) + 0.05) / (deviations + 0.05))
        won = np.log(best / times) + 0.05 if has_best else np.ones(_NUM_TIMES)
        cost = np.maximum(times[:, None] - spent, np.exp(log_rates) * smallest_step * 0.5) + resuming
        index = by_then + evaluated + np.log(won)[:, None] - np.log(cost)
        counts = (times[:, None] > spent * 1.001) & (times[:, None] >= soonest * 0.999)
        chances = np.exp(by_then + evaluated)
        soon = chances[counts.argmax(axis=0), np.arange(len(points))]
        ever = np.where(counts, chances, 0.0).max(axis=0)
        return np.where(counts, index, -np.inf).max(axis=0), np.where(counts.any(axis=0), soon, 0.0), ever


class _Origin(Enum):
    """Where a candidate comes from."""

    CHANCE = auto()
    EARLIER = auto()
    """A good point of an earlier study."""
    WAITING = auto()
    """A paused trial, or the running one beside them."""


class _Hopes:
    """What came of the chances that the model gave to those it chose, the more recent ones above all."""

    def __init__(self) -> None:
        self._expected, self._came_true = 0.0, 0.0

    def was_raised(self, chance: float) -> None:
        """One was chosen that would win with this chance."""
        self._expected = self._expected * _FORGETTING + chance
        self._came_true *= _FORGETTING

    def came_true(self) -> None:
        """One of them won."""
        self._came_true += 1

    @property
    def share(self) -> float:
        """How much of its chances is to be believed: what came true of what was expected, one before there is any experience."""
        return min(1.0, (self._came_true + 1) / (self._expected + 1))


def _level(seconds: float, first: float) -> int:
    """How often a time has doubled since the first evaluation of any trial."""
    return int(math.log2(max(seconds / first, 1) * 1.0001))


def _standing(curve: Sequence[_Seen]) -> tuple[bool, float]:
    """Where a trial stands among those to be trained on, the least one first: whether it has stalled, and its shortfall."""
    half = [each.shortfall for each in curve if each.seconds <= curve[-1].seconds * _HALF] or [curve[0].shortfall]
    return len(curve) > 1 and min(each.shortfall for each in curve) > min(half) * _STALLED, curve[-1].shortfall


def _telling(trial: _Trial) -> list[int]:
    """Places of a trial's curve that say most of it: first, last, and in a long one the middle and the best."""
    last = len(trial.curve) - 1
    return sorted({0, last, (last + 1) // 2, trial.best_place}) if last > 2 else sorted({0, last})


def _some(values: Array, most: int, rng: np.random.Generator) -> Indices:
    """Indices of at most so many rows: the better half of them the best, the others by chance."""
    if len(values) <= most:
        return np.arange(len(values))
    order = np.argsort(-values)
    best, rest = order[: most // 2], order[most // 2 :]
    return np.concatenate([best, rng.choice(rest, most - len(best), replace=False)])


def _sample(count: int, most: int, rng: np.random.Generator) -> Indices:
    return np.arange(count) if count <= most else rng.choice(count, most, replace=False)
