"""What a freeze-thaw search has seen: its trials in scores of one unit, and what their
configurations are expected to need.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from autotune.measurement import Evaluation, Target, TrialResult
from autotune.objective import AmortisedTime, BoundedObjective
from autotune.outcome import Outcome
from autotune.search.curve_model import GaussianProcess
from autotune.search.expected_scores import Estimates, ExpectedScores, Key, spent_by
from autotune.search.points import Array, UnitCube, is_ranked
from autotune.space import Choice, SearchSpace, Suggestion

WIN = 0.97
"""Fraction of the best score so far that a winner must reach the target within."""
_LEAST_PROGRESS = 0.1
"""Fraction of a schedule before which a metric says little of its end, where schedules differ in
length."""
_RISEN = 0.9
"""Fraction of its first shortfall from which on a curve has risen."""
_PAST_FLAT = 1.25
"""How far a trial is trained before it may be paused, relative to the flat start of others."""


class CurvePoint(NamedTuple):
    """One evaluation of a trial."""

    step: float
    """Steps, or epochs where the search varies the length of the schedule."""
    seconds: float
    """Score that the trial has spent so far, in the search's unit: one second of training of the
    first trial seen."""
    shortfall: float
    num_steps: float
    """Steps, whatever ``step`` counts."""


@dataclass
class KnownTrial:
    """What the search knows about one trial."""

    key: Key
    """Identifies the trial's configuration, the same for its repeats."""
    features: Array
    """Features of the trial's point ``[features]``, as ``UnitCube.features``."""
    prior_means: Array
    """What each earlier study expects of the trial's point ``[studies]``, higher is better."""
    log_length: float
    """Logarithm of the schedule's length in epochs; infinite where the search does not vary it."""
    is_repeat: bool
    """Whether the configuration had reached the target before this trial began."""
    curve: list[CurvePoint] = field(default_factory=list)
    rungs: list[float] = field(default_factory=list)
    """Shortfall at the first evaluation, and when the time since the start had doubled once, twice
    and so on."""
    best_index: int = 0
    """Index in ``curve`` of the evaluation nearest to the target."""
    is_paused: bool = False
    has_ended: bool = False
    last_decision_seconds: float = 0.0
    """Time of the trial, in the unit of ``CurvePoint.seconds``, at which it was last decided
    whether it continues."""
    last_chosen: int = 0
    """Number of the decision that last chose the trial."""
    log_gain: float = math.inf
    """Logarithm of the expected gain per second when last compared; infinite if not compared
    since the last evaluation."""
    resume_seconds: float = 0.0
    """Time to build and prepare the training anew when the trial is resumed, in the unit of
    ``CurvePoint.seconds``."""

    def add(self, evaluation: CurvePoint) -> None:
        """Append an evaluation to the trial's curve."""
        self.curve.append(evaluation)
        self.log_gain = math.inf
        if evaluation.shortfall < self.curve[self.best_index].shortfall:
            self.best_index = len(self.curve) - 1
        num_doublings = math.log2(max(evaluation.seconds / self.curve[0].seconds, 1) * 1.0001)
        while len(self.rungs) <= num_doublings:
            self.rungs.append(evaluation.shortfall)

    @property
    def least_shortfall(self) -> float:
        """Least distance from the target so far; infinite before the first evaluation."""
        return self.curve[self.best_index].shortfall if self.curve else math.inf

    @property
    def position(self) -> float:
        """Logarithm of the trial's last step, or of the fraction of its schedule that is done."""
        return self._position_of(self.curve[-1])

    @property
    def flat_position(self) -> float | None:
        """Position of the last evaluation before a trial had lost a tenth of the shortfall that it
        lost in all; None if it did not lose half of its shortfall.
        """
        first, least = self.curve[0].shortfall, self.least_shortfall
        if least > first / 2:
            return None
        risen = first - (first - least) / 10
        flat = takewhile(lambda seen: seen.shortfall > risen, self.curve)
        return self._position_of([self.curve[0], *flat][-1])

    def _position_of(self, evaluation: CurvePoint) -> float:
        length = self.log_length if math.isfinite(self.log_length) else 0.0
        return math.log(evaluation.step) - length

    @property
    def has_risen(self) -> bool:
        """Whether the trial has lost a tenth of its first shortfall."""
        return self.least_shortfall <= self.curve[0].shortfall * _RISEN

    @property
    def promotion_order(self) -> tuple[bool, float]:
        """Sort key of a trial among those to be trained on, least first: whether it has stalled,
        and its last shortfall.

        A trial has stalled that did not lose a tenth of its shortfall in the second half of its
        time.
        """
        # The first half ends at 0.6, since evaluations do not come at even times.
        first_half = [
            seen.shortfall for seen in self.curve if seen.seconds <= self.curve[-1].seconds * 0.6
        ] or [self.curve[0].shortfall]
        return (
            len(self.curve) > 1 and self.least_shortfall > min(first_half) * 0.9,
            self.curve[-1].shortfall,
        )

    @property
    def representative_indices(self) -> list[int]:
        """Indices of the evaluations that describe the trial's curve best: first, last, and in a
        long curve the middle and the best.
        """
        last = len(self.curve) - 1
        return (
            sorted({0, last, (last + 1) // 2, self.best_index}) if last > 2 else sorted({0, last})
        )


class TrialHistory:
    """The trials of a search, in scores of one unit: a second of training of the first trial seen,
    whatever the objective.

    Args:
        length_key: config key of the schedule's length in epochs; curves are functions of it where
            every point of the space has it.
        can_repeat: whether a point may be trained again.
    """

    def __init__(
        self,
        space: SearchSpace,
        target: Target,
        objective: BoundedObjective,
        length_key: str,
        can_repeat: Callable[[Suggestion], bool],
    ) -> None:
        self._target = target
        self._objective = objective
        self._is_time = isinstance(objective, AmortisedTime)
        self._length_key = length_key if _is_length(space, length_key) else None
        self.reached: dict[int, Key] = {}
        """The configuration of every trial that reached the target."""
        self._least_gap = 1.0
        self._past_flat = -math.inf
        """Position somewhat past the median flat start of the trials that reached the target, or
        before any did of those that ended."""
        self.unit = 1.0 if self._is_time else 0.0
        """Score of a second of training, of the first trial seen (0 before it): all scores are
        divided by it."""
        self.limit = target.max_train_seconds if self._is_time else 0.0
        """Upper bound on any trial's score, divided by ``unit``: what ``max_train_seconds`` of
        the costliest trial seen cost."""
        self.cube = UnitCube(space)
        self.trials: dict[int, KnownTrial] = {}
        self.points: dict[Key, Suggestion] = {}
        """The point of every configuration that was trained."""
        self._can_repeat = can_repeat
        self._scores = ExpectedScores()
        self.feasibility = FeasibilityModel(self.cube.num_features)

    @property
    def estimates(self) -> Estimates:
        """What configurations are expected to need, divided by ``unit``."""
        return self._scores.estimates

    @property
    def best(self) -> float:
        """Score that a new configuration's first run must beat to make it the incumbent, divided
        by ``unit``; infinite without one.
        """
        return self.estimates.first_run_to_win

    @property
    def seen(self) -> list[KnownTrial]:
        """The trials that have been evaluated."""
        return [trial for trial in self.trials.values() if trial.curve]

    @property
    def pending(self) -> dict[int, KnownTrial]:
        """The running trials of new points that have not been evaluated yet, by number."""
        return {
            number: trial
            for number, trial in self.trials.items()
            if not (trial.curve or trial.has_ended or trial.is_paused or trial.is_repeat)
        }

    @property
    def has_lengths(self) -> bool:
        """Whether curves are functions of epochs, in schedules of several lengths, and not of
        steps.
        """
        return self._length_key is not None

    @property
    def informative_position(self) -> float:
        """Position up to which curves say little: they may be flat at first, and metrics improve as
        the schedule ends.
        """
        least = math.log(_LEAST_PROGRESS) - 1e-9 if self.has_lengths else -math.inf  # rounding
        return max(self._past_flat, least)

    @property
    def may_all_miss(self) -> bool:
        """Whether one trial after another could be left before it would have reached the target:
        none has reached it yet, and first metrics say little.

        First metrics say little where schedules differ in length, and where most of the trials that
        were trained for four times as long as until their first evaluation had not risen by then.
        """
        early = [trial.rungs for trial in self.seen if len(trial.rungs) > 2]
        has_flat_start = sum(rungs[2] > rungs[0] * _RISEN for rungs in early) > len(early) / 2
        return math.isinf(self.best) and (self.has_lengths or has_flat_start)

    @property
    def rises_late(self) -> bool:
        """Whether no trial has reached the target yet, and some that ended came half way to
        it after a flat start: a curve that has begun to rise may reach it, however little it has
        risen so far.
        """
        return self.may_all_miss and not self.has_lengths and math.isfinite(self._past_flat)

    def finish(self, result: TrialResult, score: float | None) -> None:
        """Take the result of a trial; ``score`` is None unless it reached the target."""
        trial = self.trials.get(result.trial)
        key, features = ((), None) if trial is None else (trial.key, trial.features)
        if trial is None:  # a baseline that the space does not contain
            for evaluation in result.evaluations:
                self.relative_cost(evaluation)
        else:
            for evaluation in result.evaluations[len(trial.curve) :]:
                self.add_evaluation(result.trial, evaluation)
            trial.is_paused, trial.has_ended = False, True
            self._learn_flat_start()
            if result.outcome.is_infeasible:
                self.feasibility.add(str(result.trial), trial.features, is_feasible=False)
        if self.unit:
            spent = (spent_by(result, self._objective) if score is None else score) / self.unit
            is_repeatable = key in self.points and self._can_repeat(self.points[key])
            self._scores.add(key, features, result.outcome, spent, can_repeat=is_repeatable)
            if score is not None:
                self.reached[result.trial] = key

    def _learn_flat_start(self) -> None:
        ended = [trial for trial in self.seen if trial.has_ended]
        ended = [trial for trial in ended if trial.least_shortfall <= 0] or ended
        flat = [trial.flat_position for trial in ended]
        if known := [position for position in flat if position is not None]:
            self._past_flat = float(np.median(known)) + math.log(_PAST_FLAT)

    def best_points(self, count: int) -> list[Suggestion]:
        """The points that are expected to reach the target soonest, of those that reached it."""
        by_key = self.estimates.by_key()
        inside = [key for key in by_key if key in self.points]
        return [self.points[key] for key in sorted(inside, key=by_key.__getitem__)[:count]]

    def due_repeat(self) -> Suggestion | None:
        """The point expected to be the best, if it is to be trained again now.

        None if not, or while a run of it has not ended.

        A point that is the best by its first run alone is due at once. The incumbent is due again
        after every eight trials, until it has been run four times.

        Source: intensification in SMAC (Hutter, Hoos and Leyton-Brown, 2011), where the incumbent
        is run again as the search goes on.
        """
        key = self.estimates.best
        if key is None or key not in self.points or not self._can_repeat(self.points[key]):
            return None
        runs = [number for number, trial in self.trials.items() if trial.key == key]
        if not runs or any(not self.trials[number].has_ended for number in runs):
            return None
        is_due = (
            len(runs) <= 2  # repeats of a broken configuration all end in errors
            if key == self.estimates.challenger
            else len(runs) < 4 and max(self.trials) - max(runs) >= 8
        )
        return self.points[key] if is_due else None

    def repeat(self, least_gain: float, *, better_than: float = -math.inf) -> Suggestion | None:
        """The point most worth training again.

        None if none gains ``least_gain`` in all and more than ``better_than`` per second.
        """
        running = {
            trial.key for trial in self.trials.values() if trial.is_repeat and not trial.has_ended
        }
        for key, log_gain in self.estimates.log_gains_of_repeats(least_gain):
            if log_gain <= better_than:
                break
            if key not in running and self._can_repeat(self.points[key]):
                return self.points[key]
        return None

    def promoted(self, waiting: Sequence[int], reduction_factor: float) -> int | None:
        """A waiting trial to train on to twice its time, because too few of those that were trained
        as long have been; None if enough have.

        Where schedules differ in length: one of the best of those, whatever others did.

        Time counts in doublings of a trial's own first evaluation, since the first one of a slow
        trial takes as long as many of a fast one. Trials with the most doublings come first, and of
        these the one nearest to the target, but a stalled one only where all have stalled: where
        most trials stall just short of the target, the nearest ones are those that will never reach
        it.

        Source: asynchronous successive halving (Li et al., 2020). Its quota is filled slowly where
        early metrics say enough for the model: one trial in ``reduction_factor``, less one.
        """
        # While all curves are flat, nothing is known of any, so one of them is trained to its end.
        is_flat = not any(trial.has_ended or trial.has_risen for trial in self.seen)
        of_waiting = set(waiting)
        most = max((len(self.trials[number].rungs) for number in waiting), default=0)
        for rung in range(most - 1, -1, -1):
            best = sorted(
                (trial.rungs[rung], number)
                for number, trial in self.trials.items()
                if len(trial.rungs) > rung
            )
            quota = len(best) / reduction_factor
            if self.has_lengths:
                best = best[: max(int(quota), is_flat)]
            elif sum(len(self.trials[number].rungs) > rung + 1 for _, number in best) >= max(
                quota - 1, is_flat
            ):
                continue
            due = [
                number
                for _, number in best
                if number in of_waiting
                and len(self.trials[number].rungs) == rung + 1
                and self.may_win(self.trials[number])
            ]
            if due:
                return min(due, key=lambda number: self.trials[number].promotion_order)
        return None

    def add_evaluation(self, number: int, evaluation: Evaluation) -> None:
        """Append an evaluation to a trial's curve."""
        trial = self.trials[number]
        relative_cost = self.relative_cost(evaluation)
        if not trial.curve:
            trial.resume_seconds = (
                evaluation.spent_build_seconds + evaluation.prepare_seconds
            ) * relative_cost
        seconds = max(self._objective.lower_bound(evaluation) / self.unit, 1e-6)
        if math.isfinite(evaluation.metric):
            if len(trial.curve) == 1:
                self._least_gap = min(self._least_gap, seconds / trial.curve[0].seconds - 1)
            shortfall = evaluation.shortfall(self._target)
            if evaluation.outcome is not Outcome.REACHED:
                # at the target, but a model not yet pruned does not count
                shortfall = max(shortfall, 0.0)
            if not trial.curve:
                self.feasibility.add(str(number), trial.features, is_feasible=True)
            is_beyond = evaluation.epoch > 1.01 * math.exp(trial.log_length)
            if is_beyond or evaluation.epoch <= 0 < evaluation.step:
                self._forget_lengths()
            num_steps = max(evaluation.step, 0.5)
            step = num_steps if self._length_key is None else max(evaluation.epoch, 1e-3)
            trial.add(CurvePoint(step, seconds, shortfall, num_steps))

    def _forget_lengths(self) -> None:
        """Take curves as functions of steps: the training does not report its epochs, or the length
        is not in epochs.
        """
        self._length_key = None
        for trial in self.trials.values():
            trial.log_length = math.inf
            trial.curve = [point._replace(step=point.num_steps) for point in trial.curve]
        self._learn_flat_start()

    def relative_cost(self, evaluation: Evaluation) -> float:
        """Score of a second of this trial relative to one of the first trial seen; 1 where the
        objective is time.
        """
        if self._is_time:
            return 1.0
        longest = self._target.max_train_seconds
        score = self._objective.lower_bound(evaluation.extrapolated(longest))
        self.unit = self.unit or max(score / longest, 1e-12)
        self.limit = max(self.limit, score / self.unit)
        return score / self.unit / longest

    def score_of(self, seconds: float) -> float:
        """Score, divided by ``unit``, of so many seconds of the costliest trial seen."""
        return seconds * self.limit / self._target.max_train_seconds

    def random_index(self, drawn: Sequence[Suggestion], rng: np.random.Generator) -> int:
        """Draw the index of one of the points, with probability proportional to its chance of
        being feasible.
        """
        chances = np.exp(self.feasibility.log_chances(self.cube.features(drawn)))
        return int(rng.choice(len(drawn), p=chances / chances.sum()))

    def may_win(self, trial: KnownTrial) -> bool:
        """Whether the trial could still be evaluated before it has spent more than a winner may."""
        return self.next_seconds(trial) <= self.best * WIN

    def next_seconds(self, trial: KnownTrial) -> float:
        """Earliest time of a trial's next evaluation, by the smallest gap between the first two
        of any trial, relative to the first.
        """
        return (
            trial.curve[-1].seconds + self._least_gap * trial.curve[0].seconds
            if trial.curve
            else 0.0
        )

    def log_length(self, point: Suggestion) -> float:
        """Logarithm of the length of a point's schedule in epochs.

        Infinite where curves are not modelled over it.
        """
        return math.inf if self._length_key is None else math.log(point.values[self._length_key])


def _is_length(space: SearchSpace, key: str) -> bool:
    """Whether every point of the space has a parameter with this key and all its values are
    numbers above 0.
    """
    parameter = space.parameters.get(key)
    if isinstance(parameter, Choice):
        return is_ranked(parameter) and all(value > 0 for value, _ in parameter.options)
    return parameter is not None and parameter.low > 0


class FeasibilityModel:
    """The chance that a configuration can be trained, over its features: a Gaussian process of the
    labels 1 and -1.

    Until both a feasible and an infeasible point are known, every point counts as feasible and
    nothing is computed.

    Source: Rasmussen and Williams, "Gaussian processes for machine learning" (2006), section 6.5,
    least-squares classification; for weighing an acquisition by it, Gelbart, Snoek and Adams,
    "Bayesian optimization with unknown constraints" (2014).
    """

    def __init__(self, num_features: int) -> None:
        self._process = GaussianProcess(num_features)
        self._points: dict[str, tuple[Array, bool]] = {}
        self._num_learnt_of = 0
        self._is_fitted = False

    def add(self, name: str, features: Array, *, is_feasible: bool) -> None:
        """Set the label of a point ``[features]``.

        A new label for the same name replaces it, since a trial may still diverge.
        """
        self._points[name] = features, is_feasible
        self._is_fitted = False

    def log_chances(self, features: Array) -> Array:
        """Logarithms ``[points]`` of the chance that each of the points ``[points, features]``
        can be trained.
        """
        feasible, infeasible = (
            [point for point, label in self._points.values() if label is known][-100:]
            for known in (True, False)
        )
        if not (len(features) and feasible and infeasible):
            return np.zeros(len(features))
        if not self._is_fitted:
            labels = np.array([-1.0] * len(infeasible) + [1.0] * len(feasible))
            has_grown = len(labels) >= 1.06 * self._num_learnt_of
            if has_grown:
                self._num_learnt_of = len(labels)
            self._process.fit(
                np.array([*infeasible, *feasible]),
                labels,
                learn=np.arange(len(labels)) if has_grown else None,
            )
            self._is_fitted = True
        means, deviations = self._process.predict(features)
        # An error of the model never rules a region out.
        # SciPy says Any
        return np.log(np.clip(ndtr(means / deviations), 0.02, 1.0))  # type: ignore[no-any-return]
