"""A recording: one study on disk with all its learning curves, for replay, reports and warm starts.

A folder of four files:

* ``study.yaml``: metric, mode, target, max_train_seconds, num_trials, clock (what the seconds mean), source; of a study of autotune's
  also baseline (its trial) and outcomes (of each trial);
* ``space.yaml``: the search space, in the syntax of ``search_spaces/``, or nothing where it is not known;
* ``trials.parquet``: ``trial`` and one column a parameter, by config key; empty where the trial's branch does not have it;
* ``curves.parquet``: ``trial``, ``step``, ``train_seconds`` (warm seconds since the trial began), ``metric`` (not finite where
  training diverged); one row an evaluation. Of a study of autotune's also ``build_seconds`` and ``prepare_seconds`` (the latter within
  ``train_seconds``), ``outcome``, where the evaluation ended the trial, ``limit_seconds``, where it was made because the trial was past
  that limit and not because one was due, and ``epoch``, passes over the training split; and what objectives other than time need:
  ``num_workers``, ``device_kind``, ``build_joules`` and ``energy_joules`` (empty where they were not measured).

A trial's time to target is the ``train_seconds`` of its first evaluation at or past the target, if within max_train_seconds; where
outcomes are recorded, of the one that is REACHED.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from autotune.errors import AutotuneError, DataError
from autotune.files import replacing
from autotune.measurement import Evaluation, Target, TrialResult
from autotune.outcome import Outcome
from autotune.space import Choice, Float, Int, Parameter, PowerOfTwo, SearchSpace, Suggestion, override_text


@dataclass(frozen=True, kw_only=True)
class RecordedTrial:
    """One training as it went: its point and its learning curve, all of one length and in order of time."""

    number: int
    suggestion: Suggestion
    steps: tuple[float, ...]
    train_seconds: tuple[float, ...]
    """Since the trial began."""
    metrics: tuple[float, ...]
    """Not finite where training diverged."""
    build_seconds: tuple[float, ...] = ()
    prepare_seconds: tuple[float, ...] = ()
    """Within ``train_seconds``; both are empty where the recording does not tell them apart."""
    ends: tuple[Outcome | None, ...] = ()
    """Which evaluation ended the trial, and how; empty where the recording does not say."""
    limit_seconds: tuple[float, ...] = ()
    """The limit that an evaluation was made past, NaN where one was due; empty where the recording does not say."""
    epochs: tuple[float, ...] = ()
    """Passes over the training split so far, NaN where they are not known; empty where the recording does not say."""
    num_workers: tuple[float, ...] = ()
    device_kinds: tuple[str | None, ...] = ()
    build_joules: tuple[float, ...] = ()
    energy_joules: tuple[float, ...] = ()
    """NaN where they were not measured; these four are empty where the recording does not have them."""
    outcome: Outcome | None = None
    """How the trial ended; None where the recording does not say."""

    def time_to_target(self, target: Target) -> float | None:
        """Train seconds of the evaluation that reached the target; None where none did."""
        place = self.index_of_target(target)
        return None if place is None else self.train_seconds[place]

    def index_of_target(self, target: Target) -> int | None:
        """Place of the first evaluation at or past the target, within its ``max_train_seconds``; None where there is none.

        Where outcomes are recorded they decide: before a model is pruned, say, no evaluation counts.
        """
        if self.ends:
            return self.ends.index(Outcome.REACHED) if Outcome.REACHED in self.ends else None
        curve = enumerate(zip(self.train_seconds, self.metrics, strict=True))
        in_time = target.max_train_seconds
        return next((place for place, (seconds, metric) in curve if target.reached_by(metric) and seconds <= in_time), None)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A study with all its learning curves."""

    target: Target
    space: SearchSpace
    trials: tuple[RecordedTrial, ...]
    baseline: int | None = None
    """Number of the trial that was the experiment's own configuration; its point is empty where the space does not contain it."""

    @property
    def best_seconds(self) -> float | None:
        """The least time to target of all trials; None where none reached it."""
        return min((seconds for each in self.trials if (seconds := each.time_to_target(self.target)) is not None), default=None)


def read_recording(folder: Path) -> Recording:
    """Read a recording; a trial without any parameter, which is a baseline that the space does not contain, is left out.

    Raises:
        DataError: with the file, what was found and what is accepted.
    """
    if not folder.is_dir():
        raise DataError(f"recording={folder}: no such folder; accepted is one with study.yaml, space.yaml, trials.parquet, curves.parquet")
    study = _read_yaml(folder / "study.yaml")
    target = _read_target(study, folder / "study.yaml")
    try:
        space = SearchSpace.from_mapping(_read_yaml(folder / "space.yaml"), str(folder / "space.yaml"))
    except AutotuneError as error:
        raise DataError(str(error)) from error
    points = _read_table(folder / "trials.parquet", ("trial",))
    curves = _read_table(folder / "curves.parquet", ("trial", "step", "train_seconds", "metric"))
    order = sorted(range(len(curves["trial"])), key=lambda row: [_number(curves[name][row]) for name in ("step", "train_seconds")])
    rows: dict[int, list[int]] = {}
    for row in order:
        rows.setdefault(curves["trial"][row], []).append(row)
    baseline, outcomes = study.get("baseline"), study.get("outcomes") or {}
    trials = []
    for index, number in enumerate(points["trial"]):
        where = f"{folder / 'trials.parquet'}: trial {number}"
        values = {key: column[index] for key, column in points.items() if key != "trial" and column[index] is not None}
        is_outside = not values and not all(_may_be_null(parameter) for parameter in space.parameters.values())
        if is_outside and number != baseline:
            continue
        own = rows.get(number, [])

        def column(name: str, own: list[int] = own) -> tuple[float, ...]:
            return tuple(_number(curves[name][row]) for row in own) if name in curves else ()

        trials.append(
            RecordedTrial(
                number=number,
                suggestion=Suggestion({} if is_outside else _recorded_values(space, values, where)),
                steps=column("step"),
                train_seconds=column("train_seconds"),
                metrics=column("metric"),
                build_seconds=column("build_seconds"),
                prepare_seconds=column("prepare_seconds"),
                ends=tuple(_outcome(curves["outcome"][row], where) for row in own) if "outcome" in curves else (),
                limit_seconds=column("limit_seconds"),
                epochs=column("epoch"),
                num_workers=column("num_workers"),
                device_kinds=tuple(curves["device_kind"][row] for row in own) if "device_kind" in curves else (),
                build_joules=column("build_joules"),
                energy_joules=column("energy_joules"),
                outcome=_outcome(outcomes.get(number), where),
            )
        )
    return Recording(target=target, space=space, trials=tuple(trials), baseline=baseline)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _outcome(value: Any, where: str) -> Outcome | None:
    try:
        return None if value is None else Outcome[value]
    except KeyError as error:
        raise DataError(f"{where}: found outcome {value!r}, accepted are {', '.join(Outcome)}") from error


def _read_target(study: Mapping[str, Any], path: Path) -> Target:
    return target_of(study, str(path))


def target_of(study: Mapping[str, Any], where: str) -> Target:
    """The target that a recording's ``study.yaml`` states.

    Raises:
        DataError: a field is missing or none that a target can have; it begins with ``where``.
    """
    names = {"metric": "metric", "value": "target", "mode": "mode", "max_train_seconds": "max_train_seconds"}
    missing = [name for name in names.values() if name not in study]
    if missing:
        raise DataError(f"{where}: has no {missing[0]}; accepted are {', '.join(names.values())}")
    if study["mode"] not in ("max", "min"):
        raise DataError(f"{where}: mode: found {study['mode']!r}, accepted are max, min")
    try:
        numbers = {field: float(study[names[field]]) for field in ("value", "max_train_seconds")}
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {error}; accepted are numbers for target and max_train_seconds") from error
    return Target(metric=str(study["metric"]), mode=study["mode"], **numbers)


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping):
        raise DataError(f"{path}: found {content!r}, accepted is a mapping")
    return content


def _read_table(path: Path, columns: Sequence[str]) -> dict[str, list[Any]]:
    try:
        table: dict[str, list[Any]] = pq.read_table(path).to_pydict()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    missing = [name for name in columns if name not in table]
    if missing:
        raise DataError(f"{path}: has no column {missing[0]}; accepted are {', '.join(columns)}")
    return table


def _recorded_values(space: SearchSpace, row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A point of the space from a row; what lies past a bound by its rounding is taken as the bound."""
    values: dict[str, Any] = {}
    for key, parameter in space.parameters.items():
        if row.get(key) is None and not _may_be_null(parameter):
            raise DataError(f"{where}: has no {key}; accepted is a value for every parameter that its choices open")
        values[key] = _recorded_value(parameter, row.get(key), f"{where}: {key}")
        if isinstance(parameter, Choice):
            values |= _recorded_values(parameter.beneath(values[key]), row, where)
    return values


def _may_be_null(parameter: Parameter) -> bool:
    return isinstance(parameter, Choice) and parameter.as_param(None) is not None


def _recorded_value(parameter: Parameter, found: Any, where: str) -> Any:
    if isinstance(parameter, Choice):
        for value, _ in parameter.options:
            if override_text(value) == override_text(found) or str(value) == str(found):
                return value
        numbers = [value for value, _ in parameter.options if isinstance(value, int | float) and not isinstance(value, bool)]
        near = [value for value in numbers if isinstance(found, int | float) and math.isclose(value, found, rel_tol=1e-6)]
        if near:
            return near[0]
    elif isinstance(found, int | float) and math.isfinite(found):
        low, high = parameter.ends()
        value = min(max(found, low), high)
        if isinstance(parameter, Float):
            return float(value)
        return int(value) if isinstance(parameter, Int | PowerOfTwo) else value
    raise DataError(f"{where}: found {found!r}, accepted is a value of the space")


def target_fields(target: Target) -> dict[str, Any]:
    """The fields of ``study.yaml`` that ``target_of`` reads."""
    return {"metric": target.metric, "mode": target.mode, "target": target.value, "max_train_seconds": target.max_train_seconds}


def write_recording(
    folder: Path,
    *,
    results: Sequence[TrialResult],
    target: Target,
    space: Mapping[str, Any],
    source: str,
    baseline: int | None = None,
) -> None:
    """Write a study's ended trials, in order of their numbers; each file is replaced as a whole.

    ``space`` is the search space as plain data; ``source`` says where the numbers come from, for a reader; ``baseline`` is the number
    of its trial. Evaluations whose ``build_seconds`` are not known (NaN) are written without all that only autotune's own say.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended = sorted(results, key=lambda each: each.trial)
    study = {
        **target_fields(target),
        "num_trials": len(ended),
        "clock": "seconds of preparing and training, measured",
        "source": source,
        "baseline": baseline,
        "outcomes": {each.trial: str(each.outcome) for each in ended},
    }
    for name, content in (("study.yaml", study), ("space.yaml", dict(space))):
        with replacing(folder / name) as part:
            part.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    keys = dict.fromkeys(key for each in ended for key in each.values)
    columns: dict[str, Any] = {"trial": pa.array([each.trial for each in ended], pa.int64())}
    columns |= {key: _column([each.values.get(key) for each in ended]) for key in keys}
    _write_table(folder / "trials.parquet", pa.table(columns))
    rows = [(each, point) for each in ended for point in each.evaluations]
    curves = {
        "trial": pa.array([each.trial for each, _ in rows], pa.int64()),
        "step": pa.array([point.step for _, point in rows], pa.int64()),
        "train_seconds": pa.array([point.warm_seconds for _, point in rows], pa.float64()),
        "metric": pa.array([point.metric for _, point in rows], pa.float64()),
    }
    details = {
        "build_seconds": pa.array([point.build_seconds for _, point in rows], pa.float64()),
        "prepare_seconds": pa.array([point.prepare_seconds for _, point in rows], pa.float64()),
        "outcome": pa.array([None if point.outcome is None else str(point.outcome) for _, point in rows], pa.string()),
        "limit_seconds": pa.array([_limit_seconds(each, point, target) for each, point in rows], pa.float64()),
        "epoch": pa.array([point.epoch for _, point in rows], pa.float64()),
        "num_workers": pa.array([point.num_workers for _, point in rows], pa.int64()),
        "device_kind": pa.array([point.device_kind for _, point in rows], pa.string()),
        "build_joules": pa.array([point.build_joules for _, point in rows], pa.float64()),
        "energy_joules": pa.array([point.energy_joules for _, point in rows], pa.float64()),
    }
    if all(math.isfinite(point.build_seconds) for _, point in rows):
        curves |= details
    _write_table(folder / "curves.parquet", pa.table(curves))


def _limit_seconds(result: TrialResult, evaluation: Evaluation, target: Target) -> float | None:
    """The limit that a trial was past when an evaluation was made; None where it was not."""
    cap_seconds = math.inf if result.cap_seconds is None else result.cap_seconds
    limit = min(cap_seconds, target.max_train_seconds + evaluation.prepare_seconds)
    return limit if evaluation.warm_seconds > limit else None


def _column(values: list[Any]) -> pa.Array:
    """A column of one type: numbers or booleans as they are, anything mixed or nested as text."""
    present = {type(each) for each in values if each is not None}
    if present <= {int, float} or present in ({bool}, {str}):
        return pa.array([float(each) if isinstance(each, int) and float in present else each for each in values])
    return pa.array([None if each is None else str(each) for each in values], pa.string())


def _write_table(path: Path, table: pa.Table) -> None:
    with replacing(path) as part:
        pq.write_table(table, part)
