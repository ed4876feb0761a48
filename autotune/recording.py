"""A recording: one study on disk with all its learning curves, for replay, reports and warm starts.

A folder of four files:

* ``study.yaml``: metric, mode, target, max_train_seconds, num_trials, clock (what the seconds mean), source;
* ``space.yaml``: the search space, in the syntax of ``search_spaces/``, or nothing where it is not known;
* ``trials.parquet``: ``trial`` and one column a parameter, by config key; empty where the trial's branch does not have it;
* ``curves.parquet``: ``trial``, ``step``, ``train_seconds`` (warm seconds since the trial began), ``metric`` (not finite where
  training diverged); one row an evaluation.

A trial's time to target is the ``train_seconds`` of its first evaluation at or past the target, if within max_train_seconds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from autotune.measurement import Target, TrialResult


def write_recording(folder: Path, *, results: Sequence[TrialResult], target: Target, space: Mapping[str, Any], source: str) -> None:
    """Write a study's ended trials, in order of their numbers; each file is replaced as a whole.

    ``space`` is the search space as plain data; ``source`` says where the numbers come from, for a reader.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended = sorted(results, key=lambda each: each.trial)
    study = {
        "metric": target.metric,
        "mode": target.mode,
        "target": target.value,
        "max_train_seconds": target.max_train_seconds,
        "num_trials": len(ended),
        "clock": "seconds of preparing and training, measured",
        "source": source,
    }
    _replace(folder / "study.yaml", yaml.safe_dump(study, sort_keys=False).encode())
    _replace(folder / "space.yaml", yaml.safe_dump(dict(space), sort_keys=False).encode())
    keys = dict.fromkeys(key for each in ended for key in each.values)
    columns: dict[str, Any] = {"trial": pa.array([each.trial for each in ended], pa.int64())}
    columns |= {key: _column([each.values.get(key) for each in ended]) for key in keys}
    _write_table(folder / "trials.parquet", pa.table(columns))
    rows = [(each.trial, point.step, point.warm_seconds, point.metric) for each in ended for point in each.evaluations]
    trial, step, seconds, metric = zip(*rows, strict=True) if rows else ((), (), (), ())
    curves = {
        "trial": pa.array(trial, pa.int64()),
        "step": pa.array(step, pa.int64()),
        "train_seconds": pa.array(seconds, pa.float64()),
        "metric": pa.array(metric, pa.float64()),
    }
    _write_table(folder / "curves.parquet", pa.table(curves))


def _column(values: list[Any]) -> pa.Array:
    """A column of one type: numbers or booleans as they are, anything mixed or nested as text."""
    present = {type(each) for each in values if each is not None}
    if present <= {int, float} or present in ({bool}, {str}):
        return pa.array([float(each) if isinstance(each, int) and float in present else each for each in values])
    return pa.array([None if each is None else str(each) for each in values], pa.string())


def _write_table(path: Path, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    _replace(path, sink.getvalue().to_pybytes())


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(content)
    temporary.replace(path)
