"""Trials of an earlier study, translated to a new search space by matching config keys.

A parameter that only the earlier study has is left out. A parameter that only the new space has is
unknown for every earlier trial: models get no value for it, and where such a point is tried again
its value is drawn. A trial with a value that the new space does not have (outside a range, none of
a choice's options) is left out as a whole: moved to the range's end it would be a point nobody
trained.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.errors import ConfigError
from autotune.measurement import Target
from autotune.recording import RecordedTrial, Recording
from autotune.search.randomness import RandomTrial, derived_seed
from autotune.space import Choice, Float, Int, SearchSpace, Suggestion

_SAME = 1e-9
"""Fraction of a range by which a value may lie past its end and still count as the end: a
rounding error."""


@dataclass(frozen=True, kw_only=True)
class EarlierStudy:
    """An earlier study's trials, as far as their values are in the new search space."""

    name: str
    target: Target
    trials: tuple[RecordedTrial, ...]
    """Trials whose suggestions hold only values of the new space, and not always a value for
    each of its parameters."""
    summary: str
    """One line for the user on which trials and parameters were taken and left out."""


def earlier_study(name: str, recording: Recording, space: SearchSpace) -> EarlierStudy:
    """The trials of a recording that fit a search space and have an evaluation.

    Raises:
        ConfigError: no trial fits.
    """
    kept, misfits = [], Counter[str]()
    for trial in recording.trials:
        values, misfit = _fitting(space, trial.suggestion.values)
        if misfit is not None:
            misfits[misfit] += 1
        elif values and any(map(math.isfinite, trial.metrics)):
            kept.append(RecordedTrial(**{**vars(trial), "suggestion": Suggestion(values)}))
    known = {key for trial in recording.trials for key in trial.suggestion.values}
    wanted = {key for _, key, _ in space.items()}
    parts = [f"{name}: {len(kept)} of {len(recording.trials)} trials"]
    parts += [
        f"{count} left out, whose {key} this search space does not have"
        for key, count in misfits.items()
    ]
    parts += (
        [f"left out: {', '.join(sorted(known - wanted))}, not in this search space"]
        if known - wanted
        else []
    )
    parts += [f"unknown there: {', '.join(sorted(wanted - known))}"] if wanted - known else []
    if not kept:
        raise ConfigError(
            f"warm_start: {'; '.join(parts)}; accepted is a study of which a trial fits this search"
            " space"
        )
    return EarlierStudy(
        name=name, target=recording.target, trials=tuple(kept), summary="; ".join(parts)
    )


def completed(space: SearchSpace, values: Mapping[str, Any], by_chance: RandomTrial) -> Suggestion:
    """A point of the space with the given values; missing values are drawn at random."""
    complete: dict[str, Any] = {}
    for key, parameter in space.parameters.items():
        complete[key] = values[key] if key in values else parameter.suggest(by_chance, key)
        if isinstance(parameter, Choice):
            complete |= completed(parameter.beneath(complete[key]), values, by_chance).values
    return Suggestion(complete)


def _fitting(space: SearchSpace, values: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The values of parameters that the space has, and the key of a value outside the space,
    None if there is none.
    """
    fitting: dict[str, Any] = {}
    for key, parameter in space.parameters.items():
        if key not in values:
            continue
        value = values[key]
        if isinstance(parameter, Float) and isinstance(value, int | float):
            low, high = parameter.ends()
            near = min(max(value, low), high)
            value = near if abs(value - near) <= _SAME * (high - low) else value
        if parameter.as_param(value) is None:
            return fitting, key
        fitting[key] = int(value) if isinstance(parameter, Int) else value
        if isinstance(parameter, Choice):
            fitting[key] = _option(parameter, value)
            beneath, misfit = _fitting(parameter.beneath(value), values)
            if misfit is not None:
                return fitting, misfit
            fitting |= beneath
    return fitting, None


def _option(choice: Choice, value: Any) -> Any:
    """The option of a choice that equals a value, with the option's type: 20 for 20.0."""
    return next(
        option
        for option, _ in choice.options
        if repr(choice.as_param(option)) == repr(choice.as_param(value))
    )


def _ranked(study: EarlierStudy) -> Sequence[RecordedTrial]:
    """A study's trials by time to target, the shortest first.

    Then those short of the target, by least shortfall.
    """

    def sort_key(trial: RecordedTrial) -> tuple[float, float]:
        seconds = trial.time_to_target(study.target)
        nearest = min(
            (study.target.shortfall(metric) for metric in trial.metrics if math.isfinite(metric)),
            default=math.inf,
        )
        return (math.inf if seconds is None else seconds, nearest)

    return sorted(study.trials, key=sort_key)


def first_points(
    studies: Sequence[EarlierStudy], space: SearchSpace, *, seed: int, count: int = 3
) -> list[Suggestion]:
    """At most ``count`` of the best points of earlier studies, from each study in turn and
    without duplicates.
    """
    by_chance = RandomTrial(np.random.default_rng(derived_seed(seed, "earlier points")))
    ranked = [_ranked(study) for study in studies]
    points: list[Suggestion] = []
    for trial in (
        trials[index]
        for index in range(max(map(len, ranked), default=0))
        for trials in ranked
        if index < len(trials)
    ):
        if len(points) == count:
            break
        point = completed(space, trial.suggestion.values, by_chance)
        if point not in points:
            points.append(point)
    return points
