"""The record of a comparison (sides, their runs on shared seeds, the ratios between the sides) and
its files.

Time to target is steps to target times seconds per step, so all three are reported, each as the
first side's value divided by another side's. Sides that differ in nothing but their workers and the
batch that these share also have the efficiency of the workers. Files are rewritten after every run,
so that a comparison that is killed keeps what it measured.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.confirm.statistics import Ratio, RunScore, ratio_of_expected_scores
from autotune.measurement import Target, TrialResult
from autotune.objective import Objective
from autotune.reporting.scores import (
    ArmScores,
    ScoreFormat,
    describe_interval,
    describe_ratio,
    format_ratio,
    run_score,
    score_format_of,
)
from autotune.reporting.study_files import (
    MEASURED,
    arm_json,
    measured_cells,
    write_csv,
    write_json,
)


@dataclass(frozen=True, kw_only=True)
class ComparedSide:
    """One of the compared configurations, with its runs that ended."""

    name: str
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    """The resolved configuration; its seed is not the seed of any run."""
    objective: Objective
    runs: dict[int, TrialResult] = field(default_factory=dict)
    """Results of the runs that ended, by number of the pair; added while the comparison runs."""

    @property
    def label(self) -> str:
        """The side's name and overrides on one line."""
        return f"{self.name}: {' '.join(self.overrides) or 'as the experiment stands'}"

    @property
    def num_workers(self) -> int:
        """Number of workers that a run trains on."""
        return int(self.config.get("parallelism", {}).get("num_workers", 1))

    @property
    def arm(self) -> ArmScores:
        """The scores of the side's runs, in the order of the pairs."""
        scale = score_format_of(self.objective)
        return ArmScores(label=self.label, runs=list(self.scores.values()), scale=scale)

    @property
    def scores(self) -> dict[int, RunScore]:
        """The objective's score of each run, by number of the pair."""
        runs = sorted(self.runs.items())
        return {number: run_score(run, self.objective) for number, run in runs}

    @property
    def steps(self) -> dict[int, RunScore]:
        """Optimizer steps until a run reached the target or ended, by number of the pair."""
        lasts = {number: run.last for number, run in self.runs.items()}
        return {
            number: score._replace(score=float(last.step) if (last := lasts[number]) else None)
            for number, score in self.scores.items()
        }

    @property
    def step_seconds(self) -> dict[int, RunScore]:
        """Mean training seconds per step of each run that was evaluated, by number of the pair."""
        means = {number: step_seconds(run) for number, run in sorted(self.runs.items())}
        return {
            number: RunScore(mean, reached=True)
            for number, mean in means.items()
            if mean is not None
        }


def step_seconds(run: TrialResult) -> float | None:
    """Mean training seconds per step of a run; None if no step was timed."""
    if run.last is None or run.last.step == 0:
        return None
    seconds = run.last.train_seconds / run.last.step
    return seconds if seconds > 0 and math.isfinite(seconds) else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison, under way, finished or interrupted."""

    name: str
    experiment: str
    target: Target
    num_seeds: int
    """Number of runs of each side that were asked for."""
    sides: tuple[ComparedSide, ...]

    @property
    def scale(self) -> ScoreFormat:
        """The format of the objective's scores, which all sides share."""
        return self.sides[0].arm.scale

    @property
    def num_runs(self) -> int:
        """Number of runs that ended, of all sides."""
        return sum(len(side.runs) for side in self.sides)

    @property
    def is_complete(self) -> bool:
        """Whether every run ended."""
        return self.num_runs == len(self.sides) * self.num_seeds

    @property
    def all_sides_reached(self) -> bool:
        """Whether each side reached the target at least once."""
        return all(side.arm.num_reached > 0 for side in self.sides)

    @property
    def is_scaling(self) -> bool:
        """Whether the sides differ in their workers and the batch these share, and in nothing
        else.
        """
        shared = ("parallelism", "batch_size")
        others = [
            {key: value for key, value in side.config.items() if key not in shared}
            for side in self.sides
        ]
        is_alike = all(other == others[0] for other in others)
        return is_alike and len({side.num_workers for side in self.sides}) > 1

    def num_pairs(self, side: ComparedSide) -> int:
        """Number of pairs of the first side and another one of which both runs ended."""
        return len(self.sides[0].runs.keys() & side.runs.keys())

    def ratios(self, side: ComparedSide) -> dict[str, Ratio | None]:
        """Ratios of the first side's values to another side's, by name; None where not measured."""
        first, quantity = self.sides[0], self.scale.quantity.replace(" ", "_")
        ratios = {
            quantity: _ratio(first.scores, side.scores),
            "steps_to_target": _ratio(first.steps, side.steps),
            "step_seconds": (steps := _ratio(first.step_seconds, side.step_seconds)),
        }
        if self.is_scaling and self.scale.is_time:
            fewer_workers = first.num_workers / side.num_workers
            larger_batch = side.config["batch_size"] / first.config["batch_size"]
            ratios["efficiency"] = _times(ratios[quantity], fewer_workers)
            ratios["step_efficiency"] = _times(steps, fewer_workers * larger_batch)
        return ratios

    def score_ratio(self, side: ComparedSide) -> Ratio | None:
        """The first side's expected score divided by another's: above 1 if that other is better."""
        return next(iter(self.ratios(side).values()))


def _ratio(first: Mapping[int, RunScore], other: Mapping[int, RunScore]) -> Ratio | None:
    pairs = sorted(first.keys() & other.keys())
    return ratio_of_expected_scores(
        [first[number] for number in pairs], [other[number] for number in pairs]
    )


def _times(ratio: Ratio | None, factor: float) -> Ratio | None:
    if ratio is None:
        return None
    scaled = {name: factor * getattr(ratio, name) for name in ("ratio", "low", "high")}
    return replace(ratio, **scaled)


def verdict(comparison: Comparison, side: ComparedSide) -> str:
    """The conclusion on a side and the first one, in a sentence."""
    first, ratio, scale = comparison.sides[0], comparison.score_ratio(side), comparison.scale
    names = f"{first.name} / {side.name}"
    if not comparison.num_pairs(side):
        return "nothing to compare: no pair of runs ended"
    if missing := [each.name for each in (first, side) if not each.arm.num_reached]:
        who = (
            f"side {missing[0]} never"
            if len(missing) == 1
            else f"neither {' nor '.join(missing)} ever"
        )
        told = f"; {names} is {describe_ratio(ratio)}" if ratio else ""
        return f"{who} reached the target{told}"
    if ratio is None:
        return f"no pair of runs has two {'times' if scale.is_time else 'scores'} to compare"
    pairs = "1 pair" if ratio.num_pairs == 1 else f"{ratio.num_pairs} pairs"
    measured = f"({describe_interval(ratio)}, n = {pairs})"
    if not ratio.is_resolved:
        which = "which" if len(comparison.sides) == 2 else f"which of {first.name} and {side.name}"
        return f"{which} is {'faster' if scale.is_time else 'better'} is not resolved {measured}"
    if scale.is_time:
        return (
            f"{side.name} reaches the target {format_ratio(ratio)} as fast as {first.name}"
            f" {measured}"
        )
    return f"{scale.quantity}: {names} is {format_ratio(ratio)} {measured}"


def write_comparison(
    folder: Path, comparison: Comparison, circumstances: Mapping[str, Any]
) -> list[Path]:
    """Write ``compare.json`` and ``runs.csv``, and return their paths.

    Args:
        circumstances: facts about the command and the machine, for ``compare.json``.
    """
    in_order = sorted(
        ((side, number, run) for side in comparison.sides for number, run in side.runs.items()),
        key=lambda entry: entry[2].started_at,
    )
    content = {
        "comparison": comparison.name,
        "experiment": comparison.experiment,
        "target": asdict(comparison.target),
        **circumstances,
        "num_seeds": comparison.num_seeds,
        "is_complete": comparison.is_complete,
        "sides": [_side_json(comparison, side) for side in comparison.sides],
        "runs": [
            {"side": side.name, "pair": number, **run.as_dict()} for side, number, run in in_order
        ],
    }
    write_json(folder / "compare.json", "comparison", content)
    rows = []
    for side, number, run in in_order:
        score = side.scores[number].score if side.scores[number].reached else None
        cells = measured_cells(run, score, comparison.scale.unit)
        rows.append([side.name, number, *cells, step_seconds(run), run.test_metric])
    header = ["side", "pair", *MEASURED, "step_seconds", "test_metric"]
    write_csv(folder / "runs.csv", header, rows)
    return [folder / "compare.json", folder / "runs.csv"]


def _side_json(comparison: Comparison, side: ComparedSide) -> dict[str, Any]:
    ratios = {} if side is comparison.sides[0] else comparison.ratios(side)
    tests = [run.test_metric for _, run in sorted(side.runs.items())]
    return {
        "name": side.name,
        "overrides": side.overrides,
        "config": side.config,
        **arm_json(side.arm),
        "step_seconds": [step.score for step in side.step_seconds.values()],
        "test_metrics": [metric for metric in tests if metric is not None],
        "first_over_this": {
            name: asdict(ratio) if ratio else None for name, ratio in ratios.items()
        },
    }
