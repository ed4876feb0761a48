"""What a freeze-thaw search knows about each trial, and how often the model's predictions of winning came true."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from autotune.search.encoding import Array
from autotune.search.expected_scores import Key

_HALF = 0.6
"""Fraction of a trial's time that counts as its first half: above 0.5, since evaluations do not come at even times."""
_STALLED = 0.9
"""Fraction of its shortfall at half its time that a trial must get below so as not to count as stalled."""
_FORGETTING = 0.95
"""Weight of a choice relative to the next one, in judging how far the model's chances of winning are to be believed."""


class CurvePoint(NamedTuple):
    """One evaluation of a trial."""

    step: float
    """Steps, or epochs where the search varies the length of the schedule."""
    seconds: float
    """Score that the trial has spent so far, in the search's unit: one second of training of the first trial seen."""
    shortfall: float


class Origin(Enum):
    """Where a candidate comes from."""

    CHANCE = auto()
    EARLIER = auto()
    """A good point of an earlier study."""
    WAITING = auto()
    """A paused trial, or the running one beside them."""


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
    chosen_origin: Origin | None = None
    """Origin under which the trial was last chosen for its ``index``; None if it never was."""
    curve: list[CurvePoint] = field(default_factory=list)
    best_index: int = 0
    """Index in ``curve`` of the evaluation nearest to the target."""
    last_decision_seconds: float = 0.0
    """Time of the trial, in the unit of ``CurvePoint.seconds``, at which it was last decided whether it goes on."""
    is_paused: bool = False
    has_ended: bool = False
    last_chosen: int = 0
    """Number of the decision that last chose the trial."""
    index: float = math.inf
    """Logarithm of the expected gain per second when last compared; infinite if not compared since the last evaluation."""
    resume_seconds: float = 0.0
    """Time to build and prepare the training anew when the trial is resumed, in the unit of ``CurvePoint.seconds``."""

    def add(self, seen: CurvePoint) -> None:
        """Append an evaluation to the trial's curve."""
        self.curve.append(seen)
        self.index = math.inf
        if seen.shortfall < self.curve[self.best_index].shortfall:
            self.best_index = len(self.curve) - 1


class Calibration:
    """Compares the chances of winning that the model gave to its choices with how many won, recent choices counting most."""

    def __init__(self) -> None:
        self._expected, self._came_true = 0.0, 0.0

    def add_choice(self, chance: float) -> None:
        """Count a choice that wins with a predicted chance."""
        self._expected = self._expected * _FORGETTING + chance
        self._came_true *= _FORGETTING

    def add_win(self) -> None:
        """Count a choice that won."""
        self._came_true += 1

    @property
    def share(self) -> float:
        """Factor for the model's chances: wins over predicted wins, at most 1, and 1 before there is any experience."""
        return min(1.0, (self._came_true + 1) / (self._expected + 1))


class FixedFraction:
    """Picks a fixed fraction of decisions, at even distances, that are not left to the model."""

    def __init__(self, share: float) -> None:
        self._share, self._due = share, 0.0

    def is_due(self) -> bool:
        """Count a decision, and say whether it is one of the fraction picked."""
        self._due += self._share
        if self._due < 1:
            return False
        self._due -= 1
        return True


def num_doublings(trials: Sequence[KnownTrial]) -> Array:
    """How many times the time of each trial ``[trials]`` has doubled since its first evaluation; each must have one."""
    first, last = (np.array([trial.curve[index].seconds for trial in trials]) for index in (0, -1))
    doublings: Array = np.floor(np.log2(np.maximum(last / first, 1) * 1.0001))
    return doublings


def standing(curve: Sequence[CurvePoint]) -> tuple[bool, float]:
    """Sort key of a trial among those to be trained on, least first: whether it has stalled, and its last shortfall."""
    first_half = [seen.shortfall for seen in curve if seen.seconds <= curve[-1].seconds * _HALF] or [curve[0].shortfall]
    return len(curve) > 1 and min(seen.shortfall for seen in curve) > min(first_half) * _STALLED, curve[-1].shortfall


def representative_indices(trial: KnownTrial) -> list[int]:
    """Indices of the evaluations that describe a trial's curve best: first, last, and in a long curve the middle and the best."""
    last = len(trial.curve) - 1
    return sorted({0, last, (last + 1) // 2, trial.best_index}) if last > 2 else sorted({0, last})
