"""Trials of an earlier study, as another search space knows them: matched by config key.

A parameter that only the earlier study has is left out. One that only the new space has is unknown for every earlier trial: models
are told nothing of it, and where such a point is tried again its value is drawn. A trial with a value that the new space does not
have (outside a range, none of a choice's options) is left out whole: at the range's end it would tell of a point that nobody trained.
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
from autotune.search.random_sampler import RandomTrial
from autotune.search.seeds import derived_seed
from autotune.space import Choice, Float, Int, SearchSpace, Suggestion

_SAME = 1e-9
"""Share of a range by which a value may lie past its end: what rounding does."""


@dataclass(frozen=True, kw_only=True)
class EarlierStudy:
    """An earlier study's trials, as far as a search space has their values."""

    name: str
    target: Target
    trials: tuple[RecordedTrial, ...]
    """Their suggestions hold only values of the new space, and not always all of a point's."""
    summary: str
    """What was taken and what was left out, for a reader; one line."""


def earlier_study(name: str, recording: Recording, space: SearchSpace) -> EarlierStudy:
    """The trials of a recording that fit a search space and have an evaluation.

    Raises:
        ConfigError: there is none.
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
    parts += [f"{count} left out, whose {key} this search space does not have" for key, count in misfits.items()]
    parts += [f"left out: {', '.join(sorted(known - wanted))}, not in this search space"] if known - wanted else []
    parts += [f"unknown there: {', '.join(sorted(wanted - known))}"] if wanted - known else []
    if not kept:
        raise ConfigError(f"warm_start: {'; '.join(parts)}; accepted is a study of which a trial fits this search space")
    return EarlierStudy(name=name, target=recording.target, trials=tuple(kept), summary="; ".join(parts))


def completed(space: SearchSpace, values: Mapping[str, Any], by_chance: RandomTrial) -> Suggestion:
    """A point of the space with these values; what they lack is drawn."""
    made: dict[str, Any] = {}
    for key, parameter in space.parameters.items():
        made[key] = values[key] if key in values else parameter.suggest(by_chance, key)
        if isinstance(parameter, Choice):
            made |= completed(parameter.beneath(made[key]), values, by_chance).values
    return Suggestion(made)


def _fitting(space: SearchSpace, values: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Those of the values that the space has, and the key of one that it does not have as it is."""
    found: dict[str, Any] = {}
    for key, parameter in space.parameters.items():
        if key not in values:
            continue
        value = values[key]
        if isinstance(parameter, Float) and isinstance(value, int | float):
            low, high = parameter.ends()
            near = min(max(value, low), high)
            value = near if abs(value - near) <= _SAME * (high - low) else value
        if parameter.as_param(value) is None:
            return found, key
        found[key] = int(value) if isinstance(parameter, Int) else value
        if isinstance(parameter, Choice):
            found[key] = _option(parameter, value)
            beneath, misfit = _fitting(parameter.beneath(value), values)
            if misfit is not None:
                return found, misfit
            found |= beneath
    return found, None


def _option(choice: Choice, value: Any) -> Any:
    """The choice's own value that one is: 20 where it is 20.0."""
    return next(each for each, _ in choice.options if repr(choice.as_param(each)) == repr(choice.as_param(value)))


def _ranked(study: EarlierStudy) -> Sequence[RecordedTrial]:
    """The trials, the soonest at their study's target first; those that never were, by how near they came."""

    def merit(trial: RecordedTrial) -> tuple[float, float]:
        seconds = trial.time_to_target(study.target)
        nearest = min((study.target.shortfall(each) for each in trial.metrics if math.isfinite(each)), default=math.inf)
        return (math.inf if seconds is None else seconds, nearest)

    return sorted(study.trials, key=merit)


def first_points(studies: Sequence[EarlierStudy], space: SearchSpace, *, seed: int, count: int = 3) -> list[Suggestion]:
    """The best points of earlier studies, those of each in turn, none twice."""
    by_chance = RandomTrial(np.random.default_rng(derived_seed(seed, "earlier points")))
    ranked = [_ranked(each) for each in studies]
    found: list[Suggestion] = []
    for trial in (each[place] for place in range(max(map(len, ranked), default=0)) for each in ranked if place < len(each)):
        if len(found) == count:
            break
        point = completed(space, trial.suggestion.values, by_chance)
        if point not in found:
            found.append(point)
    return found
