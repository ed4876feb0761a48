"""The files of a study's folder that tables and programs read: trials.csv and best.json."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.comparison import reach_rate_interval
from autotune.measurement import TrialResult
from autotune.report.arms import ArmScores
from autotune.report.score_format import SECONDS
from autotune.space import SearchSpace

_MEASURED = (
    "outcome", "score", "score_unit", "time_to_target_seconds", "build_seconds", "prepare_seconds", "train_seconds", "evaluate_seconds",
    "num_evaluations", "metric", "loss", "epoch", "samples_per_second", "peak_memory_bytes", "num_workers", "device_kind",
    "energy_joules", "started_at", "stopped_at", "seed", "contention", "error",
)  # fmt: skip


class TrialsTable:
    """``trials.csv``: a row an ended trial, in the order they end, its varied parameters last.

    The file is written anew from what ended before, then a row at a time.
    """

    def __init__(
        self, path: Path, space: SearchSpace, results: Sequence[TrialResult], scores: Mapping[int, float], unit: str = SECONDS.unit
    ) -> None:
        self._path = path
        self._unit = unit
        self._parameters = list(dict.fromkeys(key for _, key, _ in space.items()))
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["trial", *_MEASURED, *self._parameters])
            writer.writerows(self._row(each, scores.get(each.trial)) for each in sorted(results, key=lambda each: each.stopped_at))

    def trial_finished(self, result: TrialResult, score: float | None) -> None:
        """Append a trial's row."""
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(self._row(result, score))

    def trial_started(self, trial: int, overrides: tuple[str, ...]) -> None:
        """Only ended trials have a row."""

    def evaluated(self, trial: int, evaluation: Any) -> None:
        """Only ended trials have a row."""

    def trial_paused(self, trial: int) -> None:
        """Only ended trials have a row."""

    def trial_lost(self, trial: int) -> None:
        """Only ended trials have a row."""

    def trial_contended(self, trial: int, why: str) -> None:
        """Only ended trials have a row."""

    def _row(self, result: TrialResult, score: float | None) -> list[Any]:
        last = result.last.as_dict() if result.last else {}
        measured = {
            **last,
            "outcome": result.outcome.value,
            "score": score,
            "score_unit": self._unit,
            "time_to_target_seconds": result.time_to_target_seconds,
            "num_evaluations": len(result.evaluations),
            "started_at": result.started_at,
            "stopped_at": result.stopped_at,
            "seed": result.seed,
            "contention": result.contention,
            "error": result.error_line,
        }
        values = [result.values.get(key) for key in self._parameters]
        return [result.trial, *(measured.get(name) for name in _MEASURED), *values]


def arm_json(arm: ArmScores) -> dict[str, Any]:
    """One configuration's repeated runs, for programs; scores stand for times where the objective is another one."""
    is_time = arm.scale.is_time
    scores, bounds, expected = (
        ("times_seconds", "lower_bounds_seconds", "expected_seconds") if is_time else ("scores", "lower_bounds", "expected_score")
    )
    return {
        "unit": arm.scale.unit,
        scores: [score for score, reached in arm.scored_runs if reached],
        "num_runs": arm.num_runs,
        "num_reached": arm.num_reached,
        bounds: [score for score, reached in arm.scored_runs if not reached],
        expected: arm.expected_score,
        "reach_rate_interval": reach_rate_interval(arm.num_reached, arm.num_runs) if arm.runs else None,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write strict JSON, replaced as a whole: numbers that are not finite become null."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
