"""The Pareto front of a study: a table of it, and what each preference picks, in words."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.measurement import TrialResult
from autotune.objective import Pareto
from autotune.outcome import Outcome
from autotune.pareto import pareto_front
from autotune.report.score_format import ScoreFormat, score_format_of
from autotune.space import Suggestion


@dataclass(frozen=True, kw_only=True)
class Front:
    """The trials that reached the target, by several objectives; of single runs of the search, not confirmed."""

    scales: Mapping[str, ScoreFormat]
    """Of each objective, by its name in the configuration."""
    points: Mapping[int, tuple[float, ...]]
    """By trial, a value for each objective."""
    members: tuple[int, ...]
    """Trials that no other one beats in all objectives, the best by the first objective first."""
    picks: Mapping[str, int]
    """The trial that each preference picks."""

    def picked_by(self, trial: int) -> list[str]:
        """The preferences that pick a trial."""
        return [name for name, picked in self.picks.items() if picked == trial]


def front_of(objective: Pareto, results: Iterable[TrialResult]) -> Front | None:
    """The front of the trials that REACHED; None where there is none."""
    points = {each.trial: objective.values(each.last) for each in results if each.outcome is Outcome.REACHED and each.last is not None}
    if not points:
        return None
    trials = list(points)
    members = tuple(trials[place] for place in pareto_front(list(points.values())))
    return Front(
        scales={name: score_format_of(each) for name, each in objective.objectives.items()},
        points=points,
        members=members,
        picks=objective.picks({trial: points[trial] for trial in members}),
    )


def write_front(path: Path, front: Front, results: Mapping[int, TrialResult]) -> None:
    """Write the front as a table: a row a trial, with its value for each objective, who picks it, and its parameters as overrides."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["trial", *(f"{name} ({scale.unit})" for name, scale in front.scales.items()), "picked_by", "overrides"])
        for trial in front.members:
            overrides = " ".join(Suggestion(results[trial].values).as_overrides())
            writer.writerow([trial, *front.points[trial], " ".join(front.picked_by(trial)), overrides])


def describe_front(front: Front) -> list[str]:
    """The front in lines for a reader."""
    lines = [f"Pareto front: {len(front.members)} of {len(front.points)} trials that reached the target, by {', '.join(front.scales)}"]
    width = max(map(len, front.picks))
    for name, trial in front.picks.items():
        values = zip(front.scales.items(), front.points[trial], strict=True)
        told = ", ".join(f"{objective} {scale.format(value)}" for (objective, scale), value in values)
        lines.append(f"  {name:<{width}}  picks trial {trial}: {told}")
    return lines
