"""The record of a comparison (configurations, their runs on shared seeds, the ratios between them)
and its files.

Time to target is steps to target times seconds per step, so all three are reported, each as the
first configuration's value divided by another one's. Configurations that differ in nothing but
their workers and the batch that these share also have the efficiency of the workers. Files are
rewritten after every run, from the runs in the comparison's storage.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.confirm.statistics import Ratio, RunScore, ratio_of_pairs
from autotune.measurement import Target, TrialResult
from autotune.objective import Objective
from autotune.reporting.scores import (
    ConfigurationScores,
    ScoreFormat,
    counted,
    describe_interval,
    describe_ratio,
    format_ratio,
    run_score,
    score_format_of,
)
from autotune.reporting.study_files import (
    MEASURED,
    measured_cells,
    scores_json,
    write_csv,
    write_json,
)

RESULTS = "compare.json"
"""The file, in a comparison's folder, with its configurations, runs and ratios."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One of the compared configurations, with its runs that ended."""

    name: str
    overrides: tuple[str, ...]
    """Overrides of this configuration alone, beside those that all share."""
    config: Mapping[str, Any]
    """The resolved configuration; its seed is not the seed of any run."""
    objective: Objective
    runs: dict[int, TrialResult] = field(default_factory=dict)
    """Results of the runs that ended, by number of the pair; added while the comparison runs."""

    @property
    def shown(self) -> str:
        """The overrides on one line."""
        return " ".join(self.overrides) or "as the experiment stands"

    @property
    def num_workers(self) -> int:
        """Number of workers that a run trains on."""
        return int(self.config.get("parallelism", {}).get("num_workers", 1))

    @property
    def scores(self) -> dict[int, RunScore]:
        """The objective's score of each run, by number of the pair."""
        runs = sorted(self.runs.items())
        return {number: run_score(run, self.objective) for number, run in runs}

    @property
    def steps(self) -> dict[int, RunScore]:
        """Optimizer steps until a run reached the target or ended, by number of the pair."""
        return {
            number: score._replace(score=float(last.step) if last is not None else None)
            for number, score in self.scores.items()
            for last in (self.runs[number].last,)
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

    @property
    def summary(self) -> ConfigurationScores:
        """The scores of all runs, in the order of the pairs."""
        scale = score_format_of(self.objective)
        label = f"{self.name}: {self.shown}"
        return ConfigurationScores(label=label, runs=list(self.scores.values()), scale=scale)


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
    """Number of runs of each configuration that were asked for."""
    configurations: tuple[Compared, ...]

    @property
    def scale(self) -> ScoreFormat:
        """The format of the objective's scores, which all configurations share."""
        return score_format_of(self.configurations[0].objective)

    @property
    def num_runs(self) -> int:
        """Number of runs that ended, of all configurations."""
        return sum(len(each.runs) for each in self.configurations)

    @property
    def num_wanted(self) -> int:
        """Number of runs that were asked for, of all configurations."""
        return len(self.configurations) * self.num_seeds

    @property
    def is_complete(self) -> bool:
        """Whether every run ended."""
        return self.num_runs == self.num_wanted

    @property
    def all_reached(self) -> bool:
        """Whether each configuration reached the target at least once."""
        return all(each.summary.num_reached > 0 for each in self.configurations)

    @property
    def is_scaling(self) -> bool:
        """Whether the configurations differ in nothing but their workers and the batch these
        share.
        """
        first, *others = [
            {**each.config, "parallelism": None, "batch_size": None} for each in self.configurations
        ]
        is_alike = all(other == first for other in others)
        return is_alike and len({each.num_workers for each in self.configurations}) > 1

    def ratios(self, other: Compared) -> dict[str, Ratio | None]:
        """Ratios of the first configuration's values to another one's, by name; None where not
        measured.
        """
        first, quantity = self.configurations[0], self.scale.quantity.replace(" ", "_")
        ratios = {
            quantity: ratio_of_pairs(first.scores, other.scores),
            "steps_to_target": ratio_of_pairs(first.steps, other.steps),
            "step_seconds": ratio_of_pairs(first.step_seconds, other.step_seconds),
        }
        if self.is_scaling and self.scale.is_time:
            fewer_workers = first.num_workers / other.num_workers
            larger_batch = other.config["batch_size"] / first.config["batch_size"]
            ratios["efficiency"] = _times(ratios[quantity], fewer_workers)
            ratios["step_efficiency"] = _times(ratios["step_seconds"], fewer_workers * larger_batch)
        return ratios


def _times(ratio: Ratio | None, factor: float) -> Ratio | None:
    if ratio is None:
        return None
    scaled = {name: factor * getattr(ratio, name) for name in ("ratio", "low", "high")}
    return replace(ratio, **scaled)


def verdict(comparison: Comparison, other: Compared) -> str:
    """The conclusion on a configuration and the first one, in a sentence."""
    first, is_time = comparison.configurations[0], comparison.scale.is_time
    names, ratio = f"{first.name} / {other.name}", ratio_of_pairs(first.scores, other.scores)
    missing = [each.name for each in (first, other) if each.runs and not each.summary.num_reached]
    if missing:
        told = f"; {names} is {describe_ratio(ratio)}" if ratio else ""
        return f"{' and '.join(missing)} never reached the target{told}"
    if ratio is None:
        return f"no pair of runs has two {'times' if is_time else 'scores'} to compare"
    measured = f"({describe_interval(ratio)}, n = {counted(ratio.num_pairs, 'pair')})"
    if not ratio.is_resolved:
        which = f"which of {first.name} and {other.name} is {'faster' if is_time else 'better'}"
        return f"{which} is not resolved {measured}"
    if is_time:
        times = format_ratio(ratio)
        return f"{other.name} reaches the target {times} as fast as {first.name} {measured}"
    return f"{comparison.scale.quantity}: {names} is {format_ratio(ratio)} {measured}"


def write_comparison(
    folder: Path, comparison: Comparison, circumstances: Mapping[str, Any]
) -> list[Path]:
    """Write ``compare.json`` and ``runs.csv``, and return their paths.

    Args:
        circumstances: facts about the command and the machine, for ``compare.json``.
    """
    in_order = sorted(
        (
            (each, number, run)
            for each in comparison.configurations
            for number, run in each.runs.items()
        ),
        key=lambda entry: entry[2].started_at,
    )
    content = {
        "comparison": comparison.name,
        "experiment": comparison.experiment,
        "target": asdict(comparison.target),
        **circumstances,
        "num_seeds": comparison.num_seeds,
        "is_complete": comparison.is_complete,
        "sides": [_as_json(comparison, each) for each in comparison.configurations],
        "runs": [
            {"side": each.name, "pair": number, **run.as_dict()} for each, number, run in in_order
        ],
    }
    write_json(folder / RESULTS, content)
    rows = []
    for each, number, run in in_order:
        score = each.scores[number].score if each.scores[number].reached else None
        cells = measured_cells(run, score, comparison.scale.unit)
        rows.append([each.name, number, *cells, step_seconds(run), run.test_metric])
    header = ["side", "pair", *MEASURED, "step_seconds", "test_metric"]
    write_csv(folder / "runs.csv", header, rows)
    return [folder / RESULTS, folder / "runs.csv"]


def _as_json(comparison: Comparison, each: Compared) -> dict[str, Any]:
    ratios = {} if each is comparison.configurations[0] else comparison.ratios(each)
    tests = [run.test_metric for _, run in sorted(each.runs.items())]
    return {
        "name": each.name,
        "overrides": each.overrides,
        "config": each.config,
        **scores_json(each.summary),
        "step_seconds": [step.score for step in each.step_seconds.values()],
        "test_metrics": [metric for metric in tests if metric is not None],
        "first_over_this": {
            name: asdict(ratio) if ratio else None for name, ratio in ratios.items()
        },
    }
