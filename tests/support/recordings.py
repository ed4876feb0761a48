"""Recordings in files that a test writes by itself, row by row."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml


def write_raw_recording(
    folder: Path,
    space: Mapping[str, Any],
    points: Mapping[str, Sequence[Any]],
    curves: Sequence[Sequence[float]],
    *,
    evaluation_seconds: float = 1.0,
) -> Path:
    """A recording of a trial for each curve, a metric for each evaluation.

    The target is 0.9.
    """
    folder.mkdir(parents=True)
    study = {
        "metric": "accuracy",
        "mode": "max",
        "target": 0.9,
        "max_train_seconds": 10.0,
        "num_trials": len(curves),
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    (folder / "space.yaml").write_text(yaml.safe_dump(space))
    trials = {"trial": range(len(curves)), **points}
    pq.write_table(
        pa.table({name: [*values] for name, values in trials.items()}), folder / "trials.parquet"
    )
    rows = [
        {"trial": trial, "step": step, "train_seconds": step * evaluation_seconds, "metric": metric}
        for trial, curve in enumerate(curves)
        for step, metric in enumerate(curve, 1)
    ]
    pq.write_table(pa.Table.from_pylist(rows[::-1]), folder / "curves.parquet")
    return folder
