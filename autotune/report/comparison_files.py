"""The machine-readable files of a comparison's folder: compare.json and runs.csv.

Both are rewritten after every run, so that a comparison that is killed keeps what it measured.
"""

import csv
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.measurement import TrialResult
from autotune.report.compared import ComparedSide, Comparison, step_seconds
from autotune.report.study_files import arm_json, write_json

_COLUMNS = (
    "run", "side", "pair", "seed", "outcome", "score", "score_unit", "time_to_target_seconds", "build_seconds", "prepare_seconds",
    "train_seconds", "evaluate_seconds", "step", "step_seconds", "num_evaluations", "epoch", "metric", "test_metric", "loss",
    "samples_per_second", "peak_memory_bytes", "num_workers", "device_kind", "energy_joules", "started_at", "stopped_at", "error",
)  # fmt: skip


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
    write_json(folder / "compare.json", content)
    with (folder / "runs.csv").open("w", newline="", encoding="utf-8") as file:
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
