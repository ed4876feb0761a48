"""The freeze-thaw search: pauses and resumes trials, and trains next what promises the highest gain
per second of training.

A paused trial can be resumed from its checkpoint, so training many configurations for a short time
discards no winner. After each evaluation a model of all learning curves
(``autotune.search.curve_model``) estimates, for every paused trial and for a sample of new points,
how likely it is to reach the target sooner than the incumbent. The candidate with the highest
expected gain (the chance of winning times how much would be won) per second of training that it
still needs is trained next.

Three guards keep the search from trusting a model that has seen too little. The first few points
are drawn at random. Of the trials that have been trained for some time, a fixed share is always
trained on to twice that time, the one with the best metric first, as asynchronous successive
halving does: so the model always has some long curves to learn from. And where schedules differ in
length or curves are flat at first, until a trial has reached the target, the running one is paused
only for one that promises much more.

Source: freeze-thaw Bayesian optimization (Swersky, Snoek and Adams, 2014); asynchronous successive
halving (Li et al., 2020).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, Target, TrialResult
from autotune.objective import BoundedObjective, Objective
from autotune.policy import Decision
from autotune.search.curve_model import use_one_thread
from autotune.search.gain_model import GainModel
from autotune.search.points import Candidates, derived_seed
from autotune.search.samplers import PausingSampler
from autotune.search.trial_history import KnownTrial, TrialHistory
from autotune.search.warm_start import EarlierStudy, WarmStart
from autotune.space import SearchSpace, Suggestion

_NUM_NEAR = 4
"""Number of the best configurations that new points are drawn near."""
_NEAR_FRACTION = 0.25
"""Fraction of decisions in which half of the new points are drawn near the best configurations.
More would refine a poor region for long: near points are surest to gain a little."""
_MAX_LEAD = 1.0
"""Until a trial has reached the target, where schedules differ in length or curves are flat at
first: how far another candidate's expected gain per second, as a logarithm, may be above the
running trial's without its being paused."""
_MIN_GAIN = 1e-3
"""Minimum expected gain of a repeat, as the logarithm of a ratio of scores, once there is no new
point left."""


@dataclass
class _Calibration:
    """Compares the chances of winning that the model gave to one kind of candidates with how
    many won, recent choices counting most.
    """

    expected: float = 0.0
    came_true: float = 0.0

    def add_choice(self, chance: float) -> None:
        """Count a choice that wins with a predicted chance."""
        self.expected = self.expected * 0.95 + chance
        self.came_true *= 0.95

    @property
    def share(self) -> float:
        """Factor for the model's chances: wins over predicted wins, at most 1, and 1 before
        there is any experience.
        """
        return min(1.0, (self.came_true + 1) / (self.expected + 1))


@dataclass
class _FixedFraction:
    """Picks a fixed fraction of decisions, at even distances, that are not left to the model."""

    share: float
    due: float = 0.0

    def is_due(self) -> bool:
        """Count a decision, and say whether it is one of the fraction picked."""
        self.due += self.share
        is_due = self.due >= 1
        self.due -= is_due
        return is_due


class FreezeThawSampler(PausingSampler):
    """Proposes new points and paused trials to resume.

    A policy that pauses trials asks it instead of an Optuna sampler.

    Args:
        num_startup_trials: number of first trials whose points are drawn at random, or taken from
            earlier studies.
        least_chance: chance of winning below which paused trials are not resumed, once no new
            trials will be started and one has reached the target.
        num_candidates: points drawn for each proposal, of which the most promising is trained: in
            one of four proposals half of them near the best configurations, once some have reached
            the target.
        reduction_factor: of the trials trained for some time, one in this many is trained on to at
            least twice that time. None is 2 where the space varies the schedule's length, since
            early metrics say less there, else 4.
        length_key: config key of the schedule's length in epochs; where the space varies it, curves
            are modelled over the fraction of the schedule that is done.
        earlier: earlier studies to learn from.

    Raises:
        ConfigError: a number out of range, or an objective that does not grow with the time a trial
            has spent.
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
        reduction_factor: float | None = None,
        least_chance: float = 0.01,
        length_key: str = "epochs",
        earlier: Sequence[EarlierStudy] = (),
    ) -> None:
        is_positive = min(num_startup_trials, num_candidates) >= 1
        is_reduced = reduction_factor is None or reduction_factor > 1
        if not (is_positive and is_reduced and 0 <= least_chance < 1):
            raise ConfigError(
                f"search.sampler: found num_startup_trials {num_startup_trials}, num_candidates"
                f" {num_candidates}, reduction_factor {reduction_factor}, least_chance"
                f" {least_chance}; use at least 1, at least 1, above 1, 0 to below 1"
            )
        if not isinstance(objective, BoundedObjective):
            raise ConfigError(
                "search.sampler: FreezeThawSampler needs an objective with lower_bound; accepted"
                " with this one is search=tpe"
            )
        self._space = space
        self._num_startup_trials = num_startup_trials
        self._num_candidates = num_candidates
        self._reduction_factor = reduction_factor
        self._least_chance = least_chance
        self._seed = seed
        self._num_draws = 0
        self._candidates = Candidates(space)
        # Errors of the model keep no region from being tried, and no trial from being resumed.
        self._by_chance, self._by_age = _FixedFraction(0.1), _FixedFraction(0.05)
        self._earlier = WarmStart(earlier, space, seed)
        self._history = TrialHistory(
            space,
            target,
            objective,
            length_key,
            lambda point: self.can_repeat(point),  # noqa: PLW0108  # it is set later
        )
        self._trials = self._history.trials
        self._gains = GainModel(self._history, self._earlier)
        self._of_chance, self._of_earlier = _Calibration(), _Calibration()
        self._of_waiting = _Calibration()
        self._proposed_by: _Calibration | None = None
        self._chosen_by: dict[int, _Calibration] = {}
        """For each trial that was chosen for its chance of winning: what that chance was
        calibrated by."""
        self._chosen: int | Suggestion | None = None
        """The point or paused trial's number that a decision preferred to going on with a
        running trial: it is proposed next."""

    def propose(self, *, new: bool = True) -> Suggestion | int | None:
        """Choose what to train next: a point, if ``new`` trials are wanted, or the number of a
        paused trial; None if neither pays.

        A point that has reached the target is trained again where that is worth more than any other
        candidate. Once no more new trials are wanted, paused trials whose chance of winning is
        below ``least_chance`` are not resumed.
        """
        if new and (repeat := self._history.due_repeat()) is not None:
            return repeat
        chosen, self._chosen = self._chosen, None
        if chosen is None or (isinstance(chosen, Suggestion) and not new):
            chosen = self._choose(beside=None, new=new)
        return chosen

    def started(self, number: int, suggestion: Suggestion) -> None:
        """Register a new trial; its point is not always the one that was proposed."""
        features, key = self._history.cube.features([suggestion]), suggestion.key
        self._trials[number] = KnownTrial(
            key=key,
            features=features[0],
            prior_means=self._earlier.prior_means(features)[0],
            log_length=self._history.log_length(suggestion),
            is_repeat=key in self._history.estimates.keys,
            last_chosen=self._num_draws,
        )
        self._history.points[key] = suggestion
        self._earlier.take(suggestion)
        self._candidates.tried(suggestion)
        if self._proposed_by is not None:
            self._chosen_by[number], self._proposed_by = self._proposed_by, None

    def paused(
        self, number: int, suggestion: Suggestion, evaluations: Sequence[Evaluation]
    ) -> None:
        """Register a trial that an earlier process began, so that it can be resumed."""
        self.started(number, suggestion)
        self.rewound(number, evaluations)
        self._trials[number].is_paused = True

    def resumed(self, number: int) -> None:
        """Note that a paused trial is trained again."""
        if number in self._trials:
            self._trials[number].is_paused = False

    def rewound(self, number: int, evaluations: Sequence[Evaluation]) -> None:
        """Take the evaluations that a trial continues from, in place of those that it had."""
        if (trial := self._trials.get(number)) is None:
            return
        trial.curve.clear()
        trial.rungs.clear()
        trial.best_index = 0
        for evaluation in evaluations:
            self._history.add_evaluation(number, evaluation)
        trial.last_decision_seconds = trial.curve[-1].seconds if trial.curve else 0.0

    def observe(
        self, number: int, evaluation: Evaluation, *, new: bool = True, may_pause: bool = True
    ) -> Decision:
        """Decide after an evaluation whether a running trial goes on, or pauses because another
        candidate promises more.
        """
        trial = self._trials[number]
        self._history.add_evaluation(number, evaluation)
        if not may_pause or trial.is_repeat:
            return Decision.CONTINUE
        # One evaluation says little of how a curve rises, and where the start takes most of it, the
        # next come soon; deciding takes time.
        least_seconds = max(trial.curve[0].seconds * 1.5, trial.last_decision_seconds * 1.2)
        if (
            len(trial.curve) < 2
            or trial.curve[-1].seconds < least_seconds
            or trial.position < self._history.informative_position
            or (self._history.rises_late and trial.has_risen)
        ) and self._history.may_win(trial):
            return Decision.CONTINUE
        trial.last_decision_seconds = trial.curve[-1].seconds
        chosen = self._choose(beside=number, new=new)
        if chosen == number:
            return Decision.CONTINUE
        self._chosen = chosen
        trial.is_paused = True
        return Decision.PAUSE

    def finish(self, result: TrialResult, score: float | None) -> None:
        """Learn from a trial that ended; ``score`` is None unless it reached the target."""
        if result.trial not in self._trials and (result.values or not self._space.parameters):
            self.started(result.trial, Suggestion(result.values))
        self._history.finish(result, score)
        calibration = self._chosen_by.pop(result.trial, None)
        if score is not None and calibration is not None:
            calibration.came_true += 1
        if self._chosen == result.trial:
            self._chosen = None

    def forget(self, number: int) -> None:
        """Drop a trial that the policy withdrew: rejected, interrupted or lost with its machine."""
        self._trials.pop(number, None)
        self._chosen_by.pop(number, None)
        if self._chosen == number:
            self._chosen = None

    def rejected(self, suggestion: Suggestion) -> None:
        """Learn that no training can run a point."""
        features = self._history.cube.features([suggestion])[0]
        self._history.feasibility.add(" ".join(suggestion.key), features, is_feasible=False)
        self._candidates.tried(suggestion)

    def expected_scores(self) -> dict[int, float]:
        """Expected score of another run of the same configuration, for every trial that reached
        the target, by trial number.
        """
        by_key, unit = self._history.estimates.by_key(), self._history.unit
        return {number: by_key[key] * unit for number, key in self._history.reached.items()}

    def score_to_beat(self, number: int) -> float:
        """Score that a trial must beat to be expected better than the incumbent.

        A repeat, which is to be measured, 4 times its own.
        """
        history, trial = self._history, self._trials.get(number)
        if math.isinf(history.best):
            return math.inf
        if trial is None or not trial.is_repeat:
            return history.estimates.incumbent * history.unit
        return history.estimates.by_key()[trial.key] * 4.0 * history.unit

    def _choose(self, *, beside: int | None, new: bool) -> Suggestion | int | None:
        """Choose the point to train next, a paused trial, or the running trial ``beside`` (both
        by number); None if nothing pays.
        """
        rng = np.random.default_rng(derived_seed(self._seed, f"draw {self._num_draws}"))
        self._num_draws += 1
        chosen = self._best(rng, beside=beside, new=new)
        if isinstance(chosen, int):
            self._trials[chosen].last_chosen = self._num_draws
        elif chosen is not None:
            # not only when it starts, since another point may be trained in its place
            self._earlier.take(chosen)
        return chosen

    @property
    def _is_ending(self) -> bool:
        """Whether less is left than the best configuration needs: no time for what is not left to
        the model.
        """
        left, best = self._history.score_of(self.seconds_left()), self._history.best
        return math.isfinite(best) and left < best

    def _best(
        self, rng: np.random.Generator, *, beside: int | None, new: bool
    ) -> Suggestion | int | None:
        may_repeat, new = new, new and not self._candidates.is_exhausted
        waiting = [
            number
            for number, trial in self._trials.items()
            if trial.curve and (trial.is_paused or number == beside)
        ]
        seen = self._history.seen
        if new and (len(self._trials) < self._num_startup_trials or len(seen) < 3):
            return self._earlier.startup_point(self._candidates)
        use_one_thread()
        if not seen or not (new or waiting):
            return self._history.repeat(_MIN_GAIN) if may_repeat else None
        reduction_factor = self._reduction_factor or (2 if self._history.has_lengths else 4)
        if (
            not self._is_ending
            and (promoted := self._history.promoted(waiting, reduction_factor)) is not None
        ):
            return promoted
        self._gains.learn(rng)
        return self._most_promising(
            _shortlist(waiting, self._trials, rng),
            rng,
            beside=beside,
            new=new,
            may_repeat=may_repeat,
        )

    def _most_promising(
        self,
        waiting: Sequence[int],
        rng: np.random.Generator,
        *,
        beside: int | None,
        new: bool,
        may_repeat: bool,
    ) -> Suggestion | int | None:
        """The new point, waiting trial or repeat with the highest expected gain per second, but
        for the shares by chance and by age.
        """
        least_gain = 0.0 if new else _MIN_GAIN
        drawn = []
        if new:
            is_near = rng.random() < _NEAR_FRACTION
            near = self._history.best_points(_NUM_NEAR) if is_near else []
            drawn = self._candidates.draw(rng, self._num_candidates, near)
        calibrations = [self._of_chance] * len(drawn)
        if new and self._gains.uses_prior_means:
            drawn = drawn + self._earlier.points
            calibrations += [self._of_earlier] * len(self._earlier.points)
        calibrations += [self._of_waiting] * len(waiting)
        log_gains, soon, ever = self._gains.log_gains(
            drawn, waiting, beside, self._history.score_of(self.seconds_left())
        )
        for number, log_gain in zip(waiting, log_gains[len(drawn) :], strict=True):
            self._trials[number].log_gain = float(log_gain)
        if not new and math.isfinite(self._history.best) and ever.max() < self._least_chance:
            return self._history.repeat(least_gain) if may_repeat else None
        log_gains += np.log([calibration.share for calibration in calibrations])
        best = int(log_gains.argmax())
        if beside in waiting and self._history.may_all_miss:
            running = len(drawn) + waiting.index(beside)
            if log_gains[best] - log_gains[running] <= _MAX_LEAD:
                return beside
        if (
            may_repeat
            and (repeat := self._history.repeat(least_gain, better_than=float(log_gains[best])))
            is not None
        ):
            return repeat
        if best < len(drawn):
            if self._by_chance.is_due() and not self._is_ending:
                best = self._history.random_index(drawn, rng)
            else:
                self._proposed_by = calibrations[best]
                calibrations[best].add_choice(float(soon[best]))
            return drawn[best]
        chosen = waiting[best - len(drawn)]
        if (
            chosen != beside
            and self._by_age.is_due()
            and not self._is_ending
            and (
                oldest := min(
                    (
                        number
                        for number in waiting
                        if number != beside and self._history.may_win(self._trials[number])
                    ),
                    key=lambda number: self._trials[number].last_chosen,
                    default=None,
                )
            )
            is not None
        ):
            return oldest
        self._chosen_by[chosen] = self._of_waiting
        self._of_waiting.add_choice(float(soon[best]))
        return chosen


def _shortlist(
    waiting: list[int], trials: Mapping[int, KnownTrial], rng: np.random.Generator
) -> list[int]:
    """At most 128 of the waiting trials, as one decision compares: three quarters those that
    promised most when last compared, others at random.
    """
    most = 128
    if len(waiting) <= most:
        return waiting
    order = sorted(waiting, key=lambda number: -trials[number].log_gain)
    best, rest = order[: most * 3 // 4], order[most * 3 // 4 :]
    return best + [int(number) for number in rng.choice(rest, most - len(best), replace=False)]
