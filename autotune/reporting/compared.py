"""The record of a comparison (two sides, their runs in pairs, the ratios between the sides) and its files, compare.json and runs.csv.

Time to target is steps to target times seconds per step, so all three are reported, each as side a's value divided by side b's.
Seconds per step are also known for a run that fell short of the target. Both files are rewritten after every run, so that a comparison
that is killed keeps what it measured.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.comparison import Ratio, RunScore, ratio_of_expected_scores, ratio_of_means, ratio_where_both_reached
from autotune.files import replacing
from autotune.measurement import Evaluation, Target, TrialResult
from autotune.reporting.scores import SECONDS, ArmScores, ScoreFormat, describe_interval, describe_ratio, format_ratio
from autotune.reporting.study_files import arm_json, write_json

_COLUMNS = (
    "run", "side", "pair", "seed", "outcome", "score", "score_unit", "time_to_target_seconds", "build_seconds", "prepare_seconds",
    "train_seconds", "evaluate_seconds", "step", "step_seconds", "num_evaluations", "epoch", "metric", "test_metric", "loss",
    "samples_per_second", "peak_memory_bytes", "num_workers", "device_kind", "energy_joules", "started_at", "stopped_at", "error",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ComparedSide:
    """One of the compared configurations, with its runs that ended."""

    name: str
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    """The resolved configuration; its seed is not the seed of any run."""
    runs: Mapping[int, TrialResult]
    """The results of the runs that ended, by number of the pair."""
    scores: Mapping[int, RunScore]
    """The objective's score of each run, by number of the pair; seconds to target if the objective is time."""
    scale: ScoreFormat = SECONDS

    @property
    def label(self) -> str:
        """The side's name and overrides on one line."""
        return f"{self.name}: {' '.join(self.overrides) or 'as the experiment stands'}"

    @property
    def arm(self) -> ArmScores:
        """The scores of the side's runs, in the order of the pairs."""
        return ArmScores(label=self.label, runs=[self.scores[number] for number in sorted(self.scores)], scale=self.scale)

    @property
    def steps(self) -> Mapping[int, RunScore]:
        """Optimizer steps until a run reached the target or ended without reaching it, by number of the pair."""
        return {
            number: RunScore(float(run.last.step) if run.last is not None else None, self.scores[number].reached)
            for number, run in self.runs.items()
        }

    @property
    def step_seconds(self) -> Mapping[int, float]:
        """Mean training seconds per step of each run that was evaluated, by number of the pair."""
        seconds = {number: step_seconds(run.last) for number, run in self.runs.items() if run.last is not None}
        return {number: mean for number, mean in seconds.items() if mean is not None}


def step_seconds(evaluation: Evaluation) -> float | None:
    """Mean training seconds per step up to an evaluation; None if no step was timed."""
    seconds = evaluation.train_seconds / evaluation.step if evaluation.step > 0 else 0.0
    return seconds if seconds > 0 and math.isfinite(seconds) else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison, finished or interrupted."""

    name: str
    experiment: str
    target: Target
    num_seeds: int
    """Number of pairs that were asked for."""
    sides: tuple[ComparedSide, ComparedSide]

    @property
    def scale(self) -> ScoreFormat:
        """The format of the objective's scores, which both sides share."""
        return self.sides[0].scale

    @property
    def num_runs(self) -> int:
        """Number of runs that ended, on both sides."""
        return sum(len(side.runs) for side in self.sides)

    @property
    def num_pairs(self) -> int:
        """Number of pairs of which both runs ended."""
        return len(self._pairs)

    @property
    def is_complete(self) -> bool:
        """Whether every run ended."""
        return self.num_runs == 2 * self.num_seeds

    @property
    def both_sides_reached(self) -> bool:
        """Whether each side reached the target at least once."""
        return all(side.arm.num_reached > 0 for side in self.sides)

    @property
    def _pairs(self) -> list[int]:
        return sorted(self.sides[0].runs.keys() & self.sides[1].runs.keys())

    @property
    def score_ratio(self) -> Ratio | None:
        """Side a's expected score divided by side b's: above 1 if b is better."""
        one, other = (side.scores for side in self.sides)
        return ratio_of_expected_scores([one[number] for number in self._pairs], [other[number] for number in self._pairs])

    @property
    def score_ratio_where_both_reached(self) -> Ratio | None:
        """Descriptive ratio of mean scores (a / b) over the pairs that both reached the target; None if every run did or no pair did."""
        one, other = ([side.scores[number] for number in self._pairs] for side in self.sides)
        return None if all(run.reached for run in (*one, *other)) else ratio_where_both_reached(one, other)

    @property
    def steps_ratio(self) -> Ratio | None:
        """Side a's expected steps to target divided by side b's."""
        one, other = (side.steps for side in self.sides)
        return ratio_of_expected_scores([one[number] for number in self._pairs], [other[number] for number in self._pairs])

    @property
    def step_ratio(self) -> Ratio | None:
        """Side a's mean seconds per step divided by side b's; None if no pair has them on both sides."""
        one, other = (side.step_seconds for side in self.sides)
        numbers = sorted(one.keys() & other.keys())
        return ratio_of_means([one[number] for number in numbers], [other[number] for number in numbers]) if numbers else None


def verdict(comparison: Comparison) -> str:
    """The conclusion of a comparison, in one sentence."""
    ratio = comparison.score_ratio
    if comparison.num_pairs == 0:
        return "nothing to compare: no pair of runs ended"
    if not comparison.both_sides_reached:
        return f"{_who_never_reached(comparison)} reached the target" + (f"; a / b is {describe_ratio(ratio)}" if ratio else "")
    if ratio is None:
        return f"no pair of runs has two {'times' if comparison.scale.is_time else 'scores'} to compare"
    pairs = "1 pair" if ratio.num_pairs == 1 else f"{ratio.num_pairs} pairs"
    scale = comparison.scale
    how = (
        f"b reaches the target {format_ratio(ratio)} as fast as a" if scale.is_time else f"{scale.quantity}: a / b is {format_ratio(ratio)}"
    )
    measured = f"{describe_interval(ratio)}, n = {pairs}"
    if not ratio.is_resolved:
        return f"which is {'faster' if scale.is_time else 'better'} is not resolved ({measured})"
    return f"{how} ({measured})"


def format_step(seconds: float) -> str:
    """A step time for display, such as ``1.23 ms`` or ``0.456 s``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.1 else f"{seconds:.3g} s"


def _who_never_reached(comparison: Comparison) -> str:
    names = [side.name for side in comparison.sides if side.arm.num_reached == 0]
    return "neither side ever" if len(names) == 2 else f"side {names[0]} never"


def write_comparison(folder: Path, comparison: Comparison, circumstances: Mapping[str, Any]) -> list[Path]:
    """Write both files and return their paths; ``circumstances``, facts about the command and the machine, go to compare.json."""
    one, other = comparison.sides
    quantity = comparison.scale.quantity.replace(" ", "_")
    ratios = {quantity: comparison.score_ratio, "steps_to_target": comparison.steps_ratio, "step_seconds": comparison.step_ratio}
    content = {
        "comparison": comparison.name,
        "experiment": comparison.experiment,
        "target": asdict(comparison.target),
        **circumstances,
        "num_seeds": comparison.num_seeds,
        "num_pairs": comparison.num_pairs,
        "is_complete": comparison.is_complete,
        "where_both_reached": asdict(described) if (described := comparison.score_ratio_where_both_reached) else None,
        "a_over_b": {name: asdict(ratio) if ratio else None for name, ratio in ratios.items()},
        "a": _side_json(one),
        "b": _side_json(other),
        "runs": [
            {"side": side.name, "pair": number, "score": side.scores[number].score, **run.as_dict()}
            for side, number, run in _in_order(comparison)
        ],
    }
    write_json(folder / "compare.json", "comparison", content)
    with replacing(folder / "runs.csv") as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for index, (side, number, run) in enumerate(_in_order(comparison)):
            last = run.last.as_dict() if run.last else {}
            measured = {
                **last,
                "run": index,
                "side": side.name,
                "pair": number,
                "seed": run.seed,
                "outcome": run.outcome.value,
                "score": side.scores[number].score if side.scores[number].reached else None,
                "score_unit": side.scale.unit,
                "time_to_target_seconds": run.time_to_target_seconds,
                "step_seconds": step_seconds(run.last) if run.last else None,
                "num_evaluations": len(run.evaluations),
                "test_metric": run.test_metric,
                "started_at": run.started_at,
                "stopped_at": run.stopped_at,
                "error": run.error_line,
            }
            writer.writerow([measured.get(name) for name in _COLUMNS])
    return [folder / "compare.json", folder / "runs.csv"]


def _side_json(side: ComparedSide) -> dict[str, Any]:
    return {
        "overrides": side.overrides,
        "config": side.config,
        **arm_json(side.arm),
        f"mean_{_unit_word(side)}": side.arm.mean_spent,
        f"expected_{_unit_word(side)}": side.arm.expected_score,
        "step_seconds": list(side.step_seconds.values()),
        "test_metrics": [run.test_metric for run in side.runs.values() if run.test_metric is not None],
    }


def _unit_word(side: ComparedSide) -> str:
    return "seconds" if side.scale.is_time else "score"


def _in_order(comparison: Comparison) -> list[tuple[ComparedSide, int, TrialResult]]:
    """Every run with its side and the number of its pair, in the order in which the runs started."""
    runs = [(side, number, run) for side in comparison.sides for number, run in side.runs.items()]
    return sorted(runs, key=lambda entry: entry[2].started_at)
