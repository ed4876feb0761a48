"""Finds the recordings of earlier studies that a command line gives by a study's name, a folder, or the id of an MLflow run.

Of a study that was interrupted, the recording is made of its storage (``autotune.search.study``).

A study that has ended keeps its recording among the artifacts of its MLflow run. The recording of a study that has not, or that was tracked
before studies kept it there, is made of the trials' runs.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError, DataError
from autotune.hiding import without_secrets
from autotune.measurement import Evaluation, TrialResult
from autotune.outcome import Outcome
from autotune.recording import Recording, read_recording, target_of, write_recording
from autotune.remote import refuse_url, user_path
from autotune.space import Choice, Parameter, SearchSpace
from autotune.tracking.mlflow_fields import OUTCOME_TAG, param_text, plain_key
from autotune.tracking.mlflow_tracker import preload
from autotune.tracking.mlflow_uri import store_uri
from autotune.yaml_files import read_yaml

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_RUN_ID = r"[0-9a-f]{32}"


def earlier_recordings(
    entries: Sequence[str],
    studies: Path,
    uri: str | None,
    stored: Callable[[str], tuple[str, Recording] | None] = lambda entry: None,
) -> list[tuple[str, Recording]]:
    """The recordings that the entries of ``warm_start`` name, each with a name to display.

    Args:
        studies: folder that contains the studies' folders.
        uri: of the MLflow store, as ``tracking.uri``.
        stored: the name and the recording of a study whose storage has more than its folder; None for any other entry.

    Raises:
        ConfigError: an entry names neither a study nor a folder with a recording nor a run of a study.
        DataError: a recording cannot be read.
    """
    return [_earlier_recording(entry, studies, uri, stored) for entry in entries]


def _earlier_recording(
    entry: str, studies: Path, uri: str | None, stored: Callable[[str], tuple[str, Recording] | None]
) -> tuple[str, Recording]:
    refuse_url(entry, "warm_start", "a study's name, a folder of this machine, or the id of an MLflow run")
    if (found := stored(entry)) is not None:
        return found
    path = user_path(entry)
    for folder, name in ((path, path.name), (path / "recording", path.name), (studies / entry / "recording", entry)):
        if (folder / "study.yaml").is_file():
            return path.parent.name if name == "recording" else name, read_recording(folder)
    if re.fullmatch(_RUN_ID, entry):
        with TemporaryDirectory() as temporary:
            study, folder = fetch_recording(entry, uri, Path(temporary))
            return study, read_recording(folder)
    known = ", ".join(sorted(path.parent.parent.name for path in studies.glob("*/recording/study.yaml")))
    raise ConfigError(
        f"warm_start: {entry}: is no study that has a recording in {studies} ({f'there are {known}' if known else 'there is none'}), "
        f"no folder with study.yaml, and no id of an MLflow run; accepted is one of these"
    )


def fetch_recording(run_id: str, uri: str | None, folder: Path) -> tuple[str, Path]:
    """Bring the recording of the study whose own run in MLflow is ``run_id`` into a folder.

    Args:
        uri: of the MLflow store, as ``tracking.uri``.
        folder: an empty folder.

    Returns:
        The study's name, and the folder of its recording, inside ``folder``.

    Raises:
        ConfigError: the store cannot be read, or the run does not exist or is not the study's own.
        DataError: the run's files or params are not what a study writes.
    """
    preload()
    from autotune.tracking import mlflow_store  # noqa: PLC0415  # MLflow takes seconds to import

    uri, where = store_uri(uri), f"mlflow_run={run_id}"
    with mlflow_store.first_contact(uri):
        client = mlflow_store.open_store(uri)
        run = mlflow_store.find_run(client, run_id)
        if run is None:
            raise ConfigError(f"{where}: no such run in {without_secrets(uri)}; accepted is the id of a study's run")
        tags = run.data.tags
        if tags.get("autotune.phase") != "study":
            parent = tags.get("mlflow.parentRunId")
            kind = f"is a run of study {tags['autotune.study']}, whose own is {parent}" if parent else "is none of a study"
            raise ConfigError(f"{where}: {kind}; accepted is the id of a study's run")
        kept = {artifact.path for artifact in client.list_artifacts(run_id)}
        # A study that was taken up again and has not ended since still keeps its recording of before.
        if run.info.status == "FINISHED" and "recording" in kept:
            return tags["autotune.study"], Path(client.download_artifacts(run_id, "recording", str(folder)))
        for name in ("study.yaml", "space.yaml"):
            if name not in kept:
                raise DataError(f"{where}: has no {name}; accepted is a run whose study was tracked with metric, target and search space")
            client.download_artifacts(run_id, name, str(folder))
        children = mlflow_store.tagged_runs(client, run.info.experiment_id, {"mlflow.parentRunId": run_id, "autotune.phase": "search"})
        _rebuild(client, children, folder, where, tags["autotune.study"])
    return tags["autotune.study"], folder / "recording"


def _rebuild(client: "MlflowClient", trials: "Sequence[Run]", folder: Path, where: str, study: str) -> None:
    """Write the recording of a study from its trials' runs and the ``study.yaml`` and ``space.yaml`` in ``folder``.

    Trials that are still running, or were interrupted, are left out; so are those that were CONTENDED, since their configurations were
    trained again.
    """
    described, parameters = (read_yaml(folder / name, max_values=1_000_000) or {} for name in ("study.yaml", "space.yaml"))
    space = SearchSpace.from_mapping(parameters, f"{where}: space.yaml")
    ended = [trial for trial in trials if trial.data.tags.get(OUTCOME_TAG) in set(Outcome) - {Outcome.CONTENDED}]
    write_recording(
        folder / "recording",
        results=[_result(trial, _curve(client, trial.info.run_id), space) for trial in ended],
        target=target_of(described, f"{where}: study.yaml"),
        space=space.as_mapping(),
        source=f"autotune study {study}",
        baseline=described.get("baseline"),
    )


_METRICS: Mapping[str, float | None] = {
    **dict.fromkeys(("build_seconds", "prepare_seconds", "train_seconds", "epoch", "metric"), math.nan),
    **dict.fromkeys(("energy_joules", "build_joules")),
    "num_workers": 1,
}
"""Fields of an evaluation that a recording needs, each with its value where MLflow lacks it, as it does where a metric was not finite."""
_UNUSED = {"samples": 0, "peak_memory_bytes": None, **dict.fromkeys(("evaluate_seconds", "loss", "samples_per_second"), math.nan)}


def _curve(client: "MlflowClient", run_id: str) -> list[Evaluation]:
    """All evaluations of a run, with the fields that a recording needs."""
    history = {key: {point.step: point.value for point in client.get_metric_history(run_id, key)} for key in _METRICS}
    return [
        Evaluation.from_dict({"step": step, **_UNUSED, **{key: history[key].get(step, lacking) for key, lacking in _METRICS.items()}})
        for step in sorted(history["train_seconds"])
    ]


def _result(trial: "Run", curve: list[Evaluation], space: SearchSpace) -> TrialResult:
    """The result of a trial, with the fields that a recording needs."""
    tags, info = trial.data.tags, trial.info
    last, cap = tags.get("autotune.last_evaluation"), tags.get("autotune.cap_seconds")
    if curve and last is not None:
        curve[-1] = replace(curve[-1], outcome=Outcome[last])
    return TrialResult(
        trial=int(tags["autotune.trial"]),
        values=_values(space, trial.data.params, f"MLflow run {info.run_id}"),
        overrides=(),
        seed=int(tags["autotune.seed"]),
        outcome=Outcome[tags[OUTCOME_TAG]],
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
        if (text := params.get(plain_key(key))) is None:
            continue
        values[key] = _value(parameter, text, f"{where}: {key}")
        if isinstance(parameter, Choice):
            values |= _values(parameter.beneath(values[key]), params, where)
    return values


def _value(parameter: Parameter, text: str, where: str) -> Any:
    with suppress(ValueError):
        if isinstance(parameter, Choice):
            values = [value for value, _ in parameter.options]  # earlier versions wrote every text without quotes
            found = [value for value in values if param_text(value) == text] or [value for value in values if value == text]
        else:
            found = [value for value in [json.loads(text)] if parameter.as_param(value) is not None]
        if found:
            return found[0]
    raise DataError(f"{where}: found {text!r}, accepted is a value of the study's search space")
