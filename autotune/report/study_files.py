"""The machine-readable files of a study's folder: trials.csv and best.json."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.comparison import reach_rate_interval
from autotune.files import replacing
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
    """Writes ``trials.csv``: a row for each ended trial, in the order in which trials end, with the varied parameters last.

    The file is rewritten with the trials that ended in earlier sessions, then a row is appended for each trial that ends.
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
            ended = sorted(results, key=lambda result: result.stopped_at)
            writer.writerows(self._row(result, scores.get(result.trial)) for result in ended)

    def trial_finished(self, result: TrialResult, score: float | None) -> None:
        """Append the row of a trial that ended."""
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(self._row(result, score))

    def trial_started(self, trial: int, overrides: tuple[str, ...]) -> None:
        """Write nothing: only ended trials have a row."""

    def evaluated(self, trial: int, evaluation: Any) -> None:
        """Write nothing: only ended trials have a row."""

    def trial_paused(self, trial: int) -> None:
        """Write nothing: only ended trials have a row."""

    def trial_lost(self, trial: int) -> None:
        """Write nothing: only ended trials have a row."""

    def trial_contended(self, trial: int, why: str) -> None:
        """Write nothing: only ended trials have a row."""

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
    """The repeated runs of one configuration as JSON data, with keys for times or, if the objective is not time, for scores."""
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
    """Write strict JSON, replacing the file atomically; numbers that are not finite become null."""
    with replacing(path) as part:
        part.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
