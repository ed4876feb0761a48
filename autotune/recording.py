"""A recording: one study on disk with all its learning curves, for replay, reports and warm starts.

A recording is a folder of four files:

* ``study.yaml``: format (number of the recording's format, 1 without it), metric, mode, target,
  max_train_seconds, num_trials, clock (what the seconds mean), source; for a study of autotune's
  also baseline (number of its trial) and outcomes (of each trial);
* ``space.yaml``: the search space in the syntax of ``search_spaces/``; an empty mapping if it is
  not known;
* ``trials.parquet``: ``trial`` and one column for each parameter, by config key; null if the
  trial's branch does not have the parameter, or for the value null; in a column of texts, those
  that could be taken for another value have quotes: ``'1'``, ``'true'``, ``'a b'``;
* ``curves.parquet``: one row for each evaluation, with ``trial``, ``step``, ``train_seconds`` (warm
  seconds since the trial began) and ``metric`` (not finite if the training diverged). For a study
  of autotune's also ``build_seconds``; ``prepare_seconds`` (contained in ``train_seconds``);
  ``outcome``, if the evaluation ended the trial; ``limit_seconds``, if the evaluation was made
  because the trial was past that limit, not because it was due; ``epoch``, passes over the training
  split; and what objectives other than time need: ``num_workers``, ``device_kind``,
  ``build_joules`` and ``energy_joules`` (null if they were not measured).

A trial's time to target is the ``train_seconds`` of its first evaluation at or past the target, if
within max_train_seconds; if outcomes are recorded, it is that of the evaluation that REACHED the
target.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from autotune.errors import DataError, explained
from autotune.files import (
    FORMAT,
    FORMAT_KEY,
    check_format,
    make_folder,
    replace_file,
    replacing,
)
from autotune.measurement import Evaluation, Target, TrialResult
from autotune.outcome import Outcome
from autotune.space import (
    Choice,
    Parameter,
    SearchSpace,
    Suggestion,
    override_text,
    short,
)
from autotune.yaml_files import read_yaml, yaml_text


@dataclass(frozen=True, kw_only=True)
class RecordedTrial:
    """A trial's point and learning curve: tuples with one element for each evaluation, in order
    of time.
    """

    number: int
    suggestion: Suggestion
    steps: tuple[float, ...]
    train_seconds: tuple[float, ...]
    """Warm seconds since the trial began."""
    metrics: tuple[float, ...]
    """The target's metric; not finite if the training diverged."""
    build_seconds: tuple[float, ...] = ()
    prepare_seconds: tuple[float, ...] = ()
    """Contained in ``train_seconds``; this and ``build_seconds`` are empty if the recording does
    not have them."""
    ends: tuple[Outcome | None, ...] = ()
    """Outcome of the evaluation that ended the trial, None for all others; empty if the
    recording does not have them."""
    limit_seconds: tuple[float, ...] = ()
    """Limit that an evaluation was made past, NaN for one that was due; empty if the recording
    does not have them."""
    epochs: tuple[float, ...] = ()
    """Passes over the training split so far, NaN if unknown; empty if the recording does not
    have them."""
    num_workers: tuple[float, ...] = ()
    device_kinds: tuple[str | None, ...] = ()
    build_joules: tuple[float, ...] = ()
    energy_joules: tuple[float, ...] = ()
    """NaN if not measured; this and the three fields above are empty if the recording does not
    have them."""
    outcome: Outcome | None = None
    """How the trial ended; None if the recording does not say."""

    def time_to_target(self, target: Target) -> float | None:
        """``train_seconds`` of the evaluation that reached the target; None if none did."""
        index = self.index_of_target(target)
        return None if index is None else self.train_seconds[index]

    def index_of_target(self, target: Target) -> int | None:
        """Index of the first evaluation at or past the target, within its ``max_train_seconds``.

        None if there is none.

        If outcomes are recorded, they decide: evaluations before a model is pruned, for example, do
        not count.
        """
        if self.ends:
            return self.ends.index(Outcome.REACHED) if Outcome.REACHED in self.ends else None
        for index, (seconds, metric) in enumerate(
            zip(self.train_seconds, self.metrics, strict=True)
        ):
            if target.reached_by(metric) and seconds <= target.max_train_seconds:
                return index
        return None


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A study with all its learning curves."""

    target: Target
    space: SearchSpace
    trials: tuple[RecordedTrial, ...]
    baseline: int | None = None
    """Number of the trial of the experiment's own configuration; its point is empty if the space
    does not contain it."""


_MAX_VALUES = 100_000_000
"""The most values that one file may hold: a few bytes can stand for gigabytes."""
_CURVES = {
    "step": ("steps", pa.int64()),
    "train_seconds": ("train_seconds", pa.float64()),
    "metric": ("metrics", pa.float64()),
    "build_seconds": ("build_seconds", pa.float64()),
    "prepare_seconds": ("prepare_seconds", pa.float64()),
    "outcome": ("ends", pa.string()),
    "limit_seconds": ("limit_seconds", pa.float64()),
    "epoch": ("epochs", pa.float64()),
    "num_workers": ("num_workers", pa.int64()),
    "device_kind": ("device_kinds", pa.string()),
    "build_joules": ("build_joules", pa.float64()),
    "energy_joules": ("energy_joules", pa.float64()),
}
"""Columns of ``curves.parquet`` beside ``trial``: for each its field of a RecordedTrial, and its
type."""
_NUM_REQUIRED = 3
"""Number of the first columns that every recording has."""


def read_recording(folder: Path) -> Recording:
    """Read a recording from its folder.

    Trials without any parameter are left out, except the baseline.

    Raises:
        AutotuneError: a file is missing or wrong; names the file, what was found and what is
            accepted.
    """
    if not folder.is_dir():
        raise DataError(
            f"recording={folder}: no such folder; it must have study.yaml, space.yaml,"
            " trials.parquet, curves.parquet"
        )
    with explained(f"recording={folder}: is not as a study writes it"):
        return _read(folder)


def _read(folder: Path) -> Recording:
    study, space_yaml = (_read_mapping(folder / name) for name in ("study.yaml", "space.yaml"))
    check_format(study.get(FORMAT_KEY), folder / "study.yaml")
    space = SearchSpace.from_mapping(space_yaml, str(folder / "space.yaml"))
    points = _read_table(folder / "trials.parquet").to_pylist()
    order = [("step", "ascending"), ("train_seconds", "ascending")]
    curves = _read_table(folder / "curves.parquet").sort_by(order)
    fields = {name: field for name, (field, _) in _CURVES.items() if name in curves.column_names}
    evaluations: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in curves.to_pylist():
        evaluations[row["trial"]].append(row)
    baseline, outcomes = study.get("baseline"), study.get("outcomes") or {}
    trials = []
    for point in points:
        number = point.pop("trial")
        values = {key: value for key, value in point.items() if value is not None}
        is_outside = not values and not all(map(_may_be_null, space.parameters.values()))
        if is_outside and number != baseline:
            continue
        where = f"{folder / 'trials.parquet'}: trial {number}"
        curve: dict[str, Any] = {
            field: tuple(_value(name, row[name]) for row in evaluations[number])
            for name, field in fields.items()
        }
        trials.append(
            RecordedTrial(
                number=number,
                suggestion=Suggestion({}) if is_outside else _recorded_point(space, values, where),
                outcome=_value("outcome", outcomes.get(number)),
                **curve,
            )
        )
    if study["mode"] not in ("max", "min"):
        raise DataError(f"{folder / 'study.yaml'}: mode: found {study['mode']!r}, use max or min")
    target = Target(
        metric=str(study["metric"]),
        mode=study["mode"],
        value=float(study["target"]),
        max_train_seconds=float(study["max_train_seconds"]),
        constraints=study.get("constraints") or {},
    )
    return Recording(target=target, space=space, trials=tuple(trials), baseline=baseline)


def _value(column: str, value: Any) -> Any:
    """A value of ``curves.parquet`` as a RecordedTrial has it: NaN for a number that is missing,
    None for a missing text.
    """
    if column == "outcome":
        return None if value is None else Outcome[value]
    if column == "device_kind":
        return value
    return math.nan if value is None else float(value)


def _read_mapping(path: Path) -> Mapping[str, Any]:
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise DataError(f"{path}: found {short(content)}, it must be a mapping")
    return content


def _read_table(path: Path) -> pa.Table:
    described = pq.read_metadata(path)
    if (num_values := described.num_rows * described.num_columns) > _MAX_VALUES:
        raise DataError(f"{path}: found {num_values:,} values, the most are {_MAX_VALUES:,}")
    return pq.read_table(path)


def _recorded_point(space: SearchSpace, row: Mapping[str, Any], where: str) -> Suggestion:
    """The point of a row of ``trials.parquet``.

    Numbers outside a parameter's bounds are set to the bound.
    """

    def value_of(_: str, key: str, parameter: Parameter) -> Any:
        if row.get(key) is None and not _may_be_null(parameter):
            raise DataError(
                f"{where}: has no {key}; it must have a value for every parameter that its choices"
                " open"
            )
        return _recorded_value(parameter, row.get(key), f"{where}: {key}")

    return space.point(value_of)


def _may_be_null(parameter: Parameter) -> bool:
    return isinstance(parameter, Choice) and parameter.as_param(None) is not None


def _recorded_value(parameter: Parameter, found: Any, where: str) -> Any:
    if isinstance(parameter, Choice):
        options = [value for value, _ in parameter.options if (value is None) == (found is None)]
        wanted = found if isinstance(found, str) else _cell(found)
        for text_of in (_cell, str):  # earlier versions wrote every value by str
            for value in options:
                if text_of(value) == wanted:
                    return value
        for value in options:
            is_number = type(value) in (int, float) and type(found) in (int, float)
            if is_number and math.isclose(value, found, rel_tol=1e-6):
                return value
    else:
        number = math.nan
        with suppress(ValueError, TypeError):
            # it may stand in a column of texts, as where a trial has 1 and another 1.0
            number = float(found) if isinstance(found, str) else found
        if math.isfinite(number):
            return parameter.kind(min(max(number, parameter.low), parameter.high))
    raise DataError(f"{where}: found {short(found)}, it must be a value of the space")


def write_recording(
    folder: Path,
    *,
    results: Sequence[TrialResult],
    target: Target,
    space: Mapping[str, Any],
    source: str,
    baseline: int | None = None,
) -> None:
    """Write the ended trials of a study as a recording, in order of their numbers.

    Each file is replaced as a whole.

    The columns that only studies of autotune's have are left out if ``build_seconds`` of any
    evaluation is unknown (NaN).

    Args:
        space: the search space as plain data.
        source: where the numbers come from, as a text for readers.
        baseline: number of the baseline's trial.
    """
    make_folder(folder)
    ended = sorted(results, key=lambda result: result.trial)
    study = {
        FORMAT_KEY: FORMAT,
        "metric": target.metric,
        "mode": target.mode,
        "target": target.value,
        "max_train_seconds": target.max_train_seconds,
        "constraints": target.constraints,
        "num_trials": len(ended),
        "clock": "seconds of preparing and training, measured",
        "source": source,
        "baseline": baseline,
        "outcomes": {result.trial: str(result.outcome) for result in ended},
    }
    for name, content in (("study.yaml", study), ("space.yaml", dict(space))):
        replace_file(folder / name, yaml_text(content))
    keys = dict.fromkeys(key for result in ended for key in result.values)
    columns: dict[str, Any] = {"trial": pa.array([result.trial for result in ended], pa.int64())}
    columns |= {key: _column([result.values.get(key) for result in ended]) for key in keys}
    _write_table(folder / "trials.parquet", pa.table(columns))
    rows = [
        {
            **vars(evaluation),
            "trial": result.trial,
            "train_seconds": evaluation.warm_seconds,
            "limit_seconds": _limit_seconds(result, evaluation, target),
        }
        for result in ended
        for evaluation in result.evaluations
    ]
    is_detailed = all(math.isfinite(row["build_seconds"]) for row in rows)
    names = [*_CURVES][: None if is_detailed else _NUM_REQUIRED]
    schema = pa.schema([("trial", pa.int64()), *((name, _CURVES[name][1]) for name in names)])
    _write_table(folder / "curves.parquet", pa.Table.from_pylist(rows, schema))


def _limit_seconds(result: TrialResult, evaluation: Evaluation, target: Target) -> float | None:
    """Limit in warm seconds that the trial was past at an evaluation; None if it was past none."""
    cap_seconds = math.inf if result.cap_seconds is None else result.cap_seconds
    limit = min(cap_seconds, target.max_train_seconds + evaluation.prepare_seconds)
    return limit if evaluation.warm_seconds > limit else None


def _column(values: list[Any]) -> pa.Array:
    """Column of one type: booleans and numbers as they are, unless two of them would be the same
    there, and all else as text.
    """
    present = [value for value in values if value is not None]
    types = {type(value) for value in present}
    if types == {int, float}:
        numbers = [None if value is None else float(value) for value in values]
        if len(set(map(_cell, numbers)) - {"None"}) == len(set(map(_cell, present))):
            return pa.array(numbers)
    elif types in ({bool}, {float}, set()) or (
        types == {int} and all(-(2**63) <= value < 2**63 for value in present)
    ):
        return pa.array(values)
    return pa.array([None if value is None else _cell(value) for value in values], pa.string())


def _cell(value: Any) -> str:
    """Text of a value: one that is a text has quotes, as in an override, where it could be taken
    for another value.
    """
    return override_text(value) if isinstance(value, str) else str(value)


def _write_table(path: Path, table: pa.Table) -> None:
    with replacing(path) as part:
        pq.write_table(table, part)
