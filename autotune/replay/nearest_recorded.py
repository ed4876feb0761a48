"""The recorded trials as all the points there are: a suggestion is taken as the nearest one not yet used.

Where a configuration was recorded several times, a suggestion of exactly that point gets its trials one after the other; any other one gets
the nearest configuration of which no trial was used, as long as there is one.
"""

from collections.abc import Sequence

import numpy as np

from autotune.recording import RecordedTrial
from autotune.search.encoding import UnitCube
from autotune.space import SearchSpace, Suggestion

_FAR = 1e6
"""Squared distance of two points with different categories: further than any with the same ones."""


class RecordedPoints:
    """Hands out recorded trials, each once.

    The distance is Euclidean, with every number scaled to [0, 1] (in log where the space says log, a choice of numbers by its
    rank); any other choice is far unless it is the same.
    """

    def __init__(self, space: SearchSpace, trials: Sequence[RecordedTrial]) -> None:
        self._outside = next((each for each in trials if not each.suggestion.values), None)
        self._trials = trials = [each for each in trials if each is not self._outside]
        self._cube = UnitCube(space)
        self._encoded = self._cube.encode([each.suggestion for each in trials])
        self._is_category = np.array(self._cube.num_options) > 0
        self._is_used = np.zeros(len(trials), dtype=bool)
        self._is_touched = np.zeros(len(trials), dtype=bool)
        """Of which configurations a trial was used."""
        self._taken: list[RecordedTrial] = []
        self._places_of: dict[tuple[str, ...], list[int]] = {}
        for place, each in enumerate(trials):
            self._places_of.setdefault(each.suggestion.key, []).append(place)

    def __call__(self, suggestion: Suggestion) -> Suggestion | None:
        """The point of the nearest trial not yet used, which is used from now on; None where all are.

        An empty suggestion is the baseline that the space does not contain.
        """
        if not suggestion.values and self._outside is not None:
            self._taken.append(self._outside)
            return suggestion
        if self._is_used.all():
            return None
        away = self._encoded - self._cube.encode([suggestion])
        squared = np.where(self._is_category, np.where(away == 0, 0.0, _FAR), away**2)
        distances = np.nansum(squared, axis=1)
        if not self.has(suggestion) and not self._is_touched.all():
            distances[self._is_touched] = np.inf
        distances[self._is_used] = np.inf
        nearest = int(distances.argmin())
        self._is_used[nearest] = True
        self._is_touched[self._places_of[self._trials[nearest].suggestion.key]] = True
        self._taken.append(self._trials[nearest])
        return self._trials[nearest].suggestion

    def has(self, suggestion: Suggestion) -> bool:
        """Whether a trial of exactly this point is not yet used."""
        key = suggestion.key
        return any(not self._is_used[place] for place in self._places_of.get(key, ()))

    def release(self, trial: RecordedTrial) -> None:
        """Hand a trial out again."""
        for place, each in enumerate(self._trials):
            if each.number == trial.number:
                self._is_used[place] = False
                own = self._places_of[each.suggestion.key]
                self._is_touched[own] = self._is_used[own].any()

    @property
    def last(self) -> RecordedTrial:
        """The trial whose point was handed out last."""
        return self._taken[-1]
