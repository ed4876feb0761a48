"""What a freeze-thaw search knows of each trial, and how far its model's chances came true."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from autotune.search.encoding import Array
from autotune.search.expected_scores import Key

_HALF = 0.6
"""Share of a trial's time that counts as half of it: evaluations do not come at even times."""
_STALLED = 0.9
"""Of what a trial lacked at half its time, what it lacks still where it has stalled."""
_FORGETTING = 0.95
"""What an earlier choice counts beside the one after it, in judging how much of the model's chances is to be believed."""


class Seen(NamedTuple):
    """One evaluation of a trial."""

    step: float
    """Steps, or epochs where the search varies the length of the schedule."""
    seconds: float
    """What it has spent so far, in the search's unit of score."""
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
    """What is known of one trial."""

    key: Key
    """The same for trials of one configuration."""
    point: Array
    """Coordinates ``[parameters]``."""
    prior_means: Array
    """What earlier studies expect of it ``[studies]``."""
    log_length: float
    """Logarithm of its schedule's length in epochs; infinite where that is not searched."""
    is_repeat: bool
    """Whether its configuration had reached the target before it began."""
    chosen_as: Origin | None = None
    """As what it was last chosen by its index."""
    curve: list[Seen] = field(default_factory=list)
    best_place: int = 0
    """Of the evaluation nearest to the target."""
    decided_seconds: float = 0.0
    """Where in its training it was last decided whether it goes on."""
    is_paused: bool = False
    has_ended: bool = False
    last_chosen: int = 0
    """The decision that last had it trained."""
    index: float = math.inf
    """What it promised when it was last weighed, since its last evaluation; infinite where it has not been."""
    resume_seconds: float = 0.0
    """What making its training anew takes, apart from its steps."""

    def add(self, seen: Seen) -> None:
        """It was evaluated."""
        self.curve.append(seen)
        self.index = math.inf
        if seen.shortfall < self.curve[self.best_place].shortfall:
            self.best_place = len(self.curve) - 1


class Calibration:
    """What came of the chances that the model gave to those it chose, the more recent ones above all."""

    def __init__(self) -> None:
        self._expected, self._came_true = 0.0, 0.0

    def expects(self, chance: float) -> None:
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


class Share:
    """Says of one in so many decisions, at even distances, that it is not the model's."""

    def __init__(self, share: float) -> None:
        self._share, self._due = share, 0.0

    def is_due(self) -> bool:
        """Whether this decision is one of them."""
        self._due += self._share
        if self._due < 1:
            return False
        self._due -= 1
        return True


def level(seconds: float, first: float) -> int:
    """How often a time has doubled since the first evaluation of any trial."""
    return int(math.log2(max(seconds / first, 1) * 1.0001))


def standing(curve: Sequence[Seen]) -> tuple[bool, float]:
    """Where a trial stands among those to be trained on, the least one first: whether it has stalled, and its shortfall."""
    half = [each.shortfall for each in curve if each.seconds <= curve[-1].seconds * _HALF] or [curve[0].shortfall]
    return len(curve) > 1 and min(each.shortfall for each in curve) > min(half) * _STALLED, curve[-1].shortfall


def telling(trial: KnownTrial) -> list[int]:
    """Places of a trial's curve that say most of it: first, last, and in a long one the middle and the best."""
    last = len(trial.curve) - 1
    return sorted({0, last, (last + 1) // 2, trial.best_place}) if last > 2 else sorted({0, last})
