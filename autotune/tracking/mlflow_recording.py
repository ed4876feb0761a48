"""Reads a study back from an MLflow store, as the input of its recording."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from autotune.errors import ConfigError, DataError
from autotune.measurement import Evaluation, Target, TrialResult
from autotune.outcome import Outcome
from autotune.recording import target_of
from autotune.remote.url import without_password
from autotune.space import Choice, Parameter, SearchSpace
from autotune.tracking.mlflow_environment import store_uri
from autotune.tracking.mlflow_fields import param_text, plain_key
from autotune.tracking.mlflow_runs import tagged_runs
from autotune.tracking.mlflow_store import first_contact, open_store


@dataclass(frozen=True, kw_only=True)
class TrackedStudy:
    """A study read from an MLflow store: the arguments of ``autotune.recording.write_recording``."""

    name: str
    target: Target
    space: Mapping[str, Any]
    results: tuple[TrialResult, ...]
    baseline: int | None
    """Number of the baseline's trial; None if the study did not record it."""


def tracked_study(run_id: str, uri: str | None) -> TrackedStudy:
    """Read the study whose parent run is ``run_id``; trials that are still running, or were interrupted, are left out.

    ``uri`` names the store as ``tracking.uri`` does.

    Raises:
        ConfigError: the store cannot be read, or the run does not exist or is not the parent run of a study.
        DataError: the run's files or params are not what a study writes.
    """
    uri = store_uri(uri)
    with first_contact(uri):
        client = open_store(uri)
        run = _run(client, run_id)
    where = f"mlflow_run={run_id}"
    if run is None:
        raise ConfigError(f"{where}: no such run in {without_password(uri)}; accepted is the id of a study's run")
    tags = run.data.tags
    if tags.get("autotune.phase") != "study":
        parent = tags.get("mlflow.parentRunId")
        kind = f"is a run of study {tags['autotune.study']}, whose own is {parent}" if parent else "is none of a study"
        raise ConfigError(f"{where}: {kind}; accepted is the id of a study's run")
    with first_contact(uri):
        files = {name: _file(client, run_id, name) for name in ("study.yaml", "space.yaml")}
        children = tagged_runs(client, run.info.experiment_id, {"mlflow.parentRunId": run_id, "autotune.phase": "search"})
        curves = {child.info.run_id: _curve(client, child.info.run_id) for child in children if _has_ended(child)}
    missing = [name for name, content in files.items() if content is None]
    if missing:
        raise DataError(f"{where}: has no {missing[0]}; accepted is a run whose study was tracked with metric, target and search space")
    space = SearchSpace.from_mapping(files["space.yaml"] or {}, f"{where}: space.yaml")
    results = [_result(child, curves[child.info.run_id], space) for child in children if child.info.run_id in curves]
    return TrackedStudy(
        name=tags["autotune.study"],
        target=target_of(files["study.yaml"] or {}, f"{where}: study.yaml"),
        space=space.as_mapping(),
        results=tuple(sorted(results, key=lambda result: result.trial)),
        baseline=(files["study.yaml"] or {}).get("baseline"),
    )


def _run(client: MlflowClient, run_id: str) -> Run | None:
    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _file(client: MlflowClient, run_id: str, name: str) -> Mapping[str, Any] | None:
    """The content of a YAML file among a run's artifacts; None if there is no file of that name."""
    if name not in {artifact.path for artifact in client.list_artifacts(run_id)}:
        return None
    with TemporaryDirectory() as folder:
        content = yaml.safe_load(Path(client.download_artifacts(run_id, name, folder)).read_text(encoding="utf-8"))
    return content if isinstance(content, Mapping) else {}


def _has_ended(child: Run) -> bool:
    """Whether a child run is an ended trial; one that was CONTENDED does not count, since its configuration was trained again."""
    return child.data.tags.get("autotune.outcome") in set(Outcome) - {Outcome.CONTENDED}


_SECONDS = ("build_seconds", "prepare_seconds", "train_seconds")


def _curve(client: MlflowClient, run_id: str) -> list[Evaluation]:
    """All evaluations of a run, with the fields that a recording needs; a metric that MLflow lacks, since it was not finite, is NaN."""
    keys = (*_SECONDS, "build_joules", "energy_joules", "num_workers", "epoch", "metric")
    history = {key: {point.step: point.value for point in client.get_metric_history(run_id, key)} for key in keys}
    return [
        Evaluation(
            step=step,
            epoch=history["epoch"].get(step, math.nan),
            samples=0,
            **{key: history[key].get(step, math.nan) for key in _SECONDS},
            evaluate_seconds=math.nan,
            metric=history["metric"].get(step, math.nan),
            loss=math.nan,
            samples_per_second=math.nan,
            peak_memory_bytes=None,
            energy_joules=history["energy_joules"].get(step),
            build_joules=history["build_joules"].get(step),
            num_workers=int(history["num_workers"].get(step, 1)),
        )
        for step in sorted(history["train_seconds"])
    ]


def _result(child: Run, curve: list[Evaluation], space: SearchSpace) -> TrialResult:
    """The result of a trial, with the fields that a recording needs; other fields are empty or NaN."""
    tags, info = child.data.tags, child.info
    last, cap = tags.get("autotune.last_evaluation"), tags.get("autotune.cap_seconds")
    if curve and last is not None:
        curve = [*curve[:-1], replace(curve[-1], outcome=Outcome[last])]
    return TrialResult(
        trial=int(tags["autotune.trial"]),
        values=_values(space, child.data.params, f"MLflow run {info.run_id}"),
        overrides=(),
        seed=int(tags["autotune.seed"]),
        outcome=Outcome[tags["autotune.outcome"]],
        evaluations=tuple(curve),
        started_at=info.start_time / 1000,
        stopped_at=(info.end_time or info.start_time) / 1000,
        fingerprint={},
        cap_seconds=None if cap is None else float(cap),
    )


def _values(space: SearchSpace, params: Mapping[str, str], where: str) -> dict[str, Any]:
    """A trial's parameter values from its params, in the order of the search space; empty for a baseline outside the space."""
    values: dict[str, Any] = {}
    for key, parameter in space.parameters.items():
        text = params.get(plain_key(key))
        if text is None:
            continue
        values[key] = _value(parameter, text, f"{where}: {key}")
        if isinstance(parameter, Choice):
            values |= _values(parameter.beneath(values[key]), params, where)
    return values


def _value(parameter: Parameter, text: str, where: str) -> Any:
    if isinstance(parameter, Choice):
        for value, _ in parameter.options:
            if param_text(value) == text:
                return value
    else:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if parameter.as_param(value) is not None:
            return value
    raise DataError(f"{where}: found {text!r}, accepted is a value of the study's search space")
