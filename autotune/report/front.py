"""The Pareto front of a study: the record, its CSV file, and lines on which trial each preference picks."""

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
    """Scores by several objectives of the trials that reached the target; each is one run of the search, not confirmed."""

    scales: Mapping[str, ScoreFormat]
    """The score format of each objective, by the objective's name in the configuration."""
    points: Mapping[int, tuple[float, ...]]
    """The score of a trial by each objective, by trial number."""
    members: tuple[int, ...]
    """Trials that no other trial beats in all objectives, sorted by the first objective, best first."""
    picks: Mapping[str, int]
    """The trial that each preference picks, by the preference's name."""

    def picked_by(self, trial: int) -> list[str]:
        """Names of the preferences that pick a trial."""
        return [name for name, picked in self.picks.items() if picked == trial]


def make_front(objective: Pareto, results: Iterable[TrialResult]) -> Front | None:
    """The Pareto front of the trials that REACHED the target; None if no trial did."""
    reached = [result for result in results if result.outcome is Outcome.REACHED]
    points = {result.trial: objective.values(result.last) for result in reached if result.last is not None}
    if not points:
        return None
    trials = list(points)
    members = tuple(trials[index] for index in pareto_front(list(points.values())))
    return Front(
        scales={name: score_format_of(component) for name, component in objective.objectives.items()},
        points=points,
        members=members,
        picks=objective.picks({trial: points[trial] for trial in members}),
    )


def write_front(path: Path, front: Front, results: Mapping[int, TrialResult]) -> None:
    """Write the front as CSV: for each trial its score by each objective, the preferences that pick it, and its overrides."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["trial", *(f"{name} ({scale.unit})" for name, scale in front.scales.items()), "picked_by", "overrides"])
        for trial in front.members:
            overrides = " ".join(Suggestion(results[trial].values).as_overrides())
            writer.writerow([trial, *front.points[trial], " ".join(front.picked_by(trial)), overrides])


def describe_front(front: Front) -> list[str]:
    """Lines on the front's size and on the trial that each preference picks."""
    lines = [f"Pareto front: {len(front.members)} of {len(front.points)} trials that reached the target, by {', '.join(front.scales)}"]
    width = max(map(len, front.picks))
    for name, trial in front.picks.items():
        values = zip(front.scales.items(), front.points[trial], strict=True)
        scores = ", ".join(f"{objective} {scale.format(value)}" for (objective, scale), value in values)
        lines.append(f"  {name:<{width}}  picks trial {trial}: {scores}")
    return lines
