"""Maps each suggestion of a replayed search to the nearest recorded trial that is not yet used.

If a configuration was recorded several times, suggestions of exactly that point get its trials one
after the other; any other suggestion gets the nearest configuration without a used trial, as long
as there is one.
"""

from collections.abc import Sequence

import numpy as np

from autotune.recording import RecordedTrial
from autotune.search.points import UnitCube
from autotune.space import SearchSpace, Suggestion

_FAR = 1e6
"""Squared distance that two different categories add: more than any points of equal categories
are apart."""


class RecordedPoints:
    """Hands out recorded trials, each once, as a ``PointPlacement``.

    The distance of two points is Euclidean. Every number is scaled to [0, 1]: logarithmically if
    the space says log, and by rank for a choice of numbers. Points that differ in any other choice
    are far apart.

    Args:
        repeats_any: whether any point may be suggested again, as in a live study; else only one of
            which an unused trial is left.
    """

    def __init__(
        self, space: SearchSpace, trials: Sequence[RecordedTrial], *, repeats_any: bool = False
    ) -> None:
        self._repeats_any = repeats_any
        self._outside = next((trial for trial in trials if not trial.suggestion.values), None)
        self._trials = trials = [trial for trial in trials if trial is not self._outside]
        self._cube = UnitCube(space)
        self._encoded = self._cube.encode([trial.suggestion for trial in trials])
        self._is_category = np.array(self._cube.num_options) > 0
        self._is_used = np.zeros(len(trials), dtype=bool)
        self._is_touched = np.zeros(len(trials), dtype=bool)
        """For each trial, whether a trial of its configuration was used ``[trials]``."""
        self.last: RecordedTrial
        """The trial that was handed out last; not set before the first one."""
        self._indices_of: dict[tuple[str, ...], list[int]] = {}
        """Indices of a configuration's trials, by the key of its suggestion."""
        for index, trial in enumerate(trials):
            self._indices_of.setdefault(trial.suggestion.key, []).append(index)

    def __call__(self, suggestion: Suggestion) -> Suggestion | None:
        """Mark the nearest unused trial as used and return its point; None if all trials are used.

        An empty suggestion stands for a baseline that the space does not contain.
        """
        if not suggestion.values and self._outside is not None:
            self.last = self._outside
            return suggestion
        if self._is_used.all():
            return None
        differences = self._encoded - self._cube.encode([suggestion])
        squared = np.where(self._is_category, np.where(differences == 0, 0.0, _FAR), differences**2)
        distances = np.nansum(squared, axis=1)
        if not self._has(suggestion) and not self._is_touched.all():
            distances[self._is_touched] = np.inf
        distances[self._is_used] = np.inf
        nearest = int(distances.argmin())
        self.last = self._trials[nearest]
        self._is_used[nearest] = True
        self._is_touched[self._indices_of[self.last.suggestion.key]] = True
        return self.last.suggestion

    def can_repeat(self, suggestion: Suggestion) -> bool:
        """Whether a point that was trained may be suggested again."""
        return self._repeats_any or self._has(suggestion)

    def _has(self, suggestion: Suggestion) -> bool:
        """Whether an unused trial of exactly this point is left."""
        return any(not self._is_used[index] for index in self._indices_of.get(suggestion.key, ()))
