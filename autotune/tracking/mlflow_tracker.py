"""Writes a study to MLflow: an MLflow experiment for each experiment, a parent run per study, a
child run per trial or confirmation run.

MLflow's fluent functions share one global run; here every call gives the id of its run, so several
trials can be open at once. Any call may raise what the store's client raises, and may be repeated:
nothing is stored twice. Importing this module imports MLflow, which takes seconds.
"""

import contextlib
import json
import logging
import os
import posixpath
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, Metric, Param, RunTag
from mlflow.entities import Run as MlflowRun
from mlflow.models import Model, infer_signature
from mlflow.utils.file_utils import local_file_uri_to_path

from autotune.errors import one_line
from autotune.files import TEXTS_FOLDER, make_folder, replace_file
from autotune.measurement import Evaluation, TrialResult
from autotune.mlflow_logs import LOGS_FOLDER
from autotune.policy import Run
from autotune.tracking import fields
from autotune.tracking.mlflow_store import (
    browse_command,
    first_contact,
    open_experiment,
    store_uri,
    view_page,
)
from autotune.tracking.tracker import StudyEnd, StudyInfo, display_name

logger = logging.getLogger(__name__)

WRITE_EVERY_SECONDS = 5.0
"""Least seconds between writes of a running trial; a trial that ends before its first write is
written all at once."""
_FILES = ("config.yaml", "overrides.yaml", "fingerprint.json", "error.txt")
"""Artifacts that autotune writes to a trial's run."""
# five times as fast, where PyYAML was built with it
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class MlflowTracker:
    """Tracker that writes a study to an MLflow store.

    Args:
        uri: of the store; if None, MLFLOW_TRACKING_URI of the environment, else ``mlflow.db`` in
            the working folder.
        log_model: whether a study's run gets the trained model of the configuration that it
            exports, as an MLflow model.
        close_seconds: read by ``TrackerWriter``.

    Raises:
        ConfigError: the store does not answer.
    """

    def __init__(
        self,
        info: StudyInfo,
        *,
        uri: str | None = None,
        log_model: bool = True,
        close_seconds: float = 0.0,
    ) -> None:
        self._info, self._logs_model = info, log_model
        self._runs: dict[str, _Run] = {}
        given, uri = uri, store_uri(uri)
        with first_contact(uri):
            self._client, self._experiment = open_experiment(uri, info.experiment, info.parameters)
            self.page = view_page(uri, self._experiment)
            """Address of the page that shows the trials of the experiment, best first."""
            self._parent = self._open_parent()
            children = {run.data.tags.get(fields.RUN_TAG, ""): run for run in self._children()}
        self.browse = browse_command(given)
        self._left = {name: run for name, run in children.items() if _may_continue(run)}
        """Child runs that earlier processes left open or interrupted, by name."""
        self.complete = children.keys() - self._left
        """Names of the child runs that the store holds as a whole."""

    def _open_parent(self) -> str:
        """Id of the study's own run, which is open: that of an earlier process if the study is
        resumed, else a new one.
        """
        tags, settings = fields.study_tags(self._info), fields.params(self._info.settings)
        identity = [f"autotune.{name}" for name in ("study", "phase", "folder")]
        values = {f"tags.`{key}`": tags[key] for key in identity}
        found = self._found(values) if self._info.is_resumed else []
        if found:
            earlier = max(found, key=lambda run: run.info.start_time)
            run_id = str(earlier.info.run_id)
            # a param can be written only once
            settings = {
                key: value for key, value in settings.items() if key not in earlier.data.params
            }
            self._client.update_run(run_id, status="RUNNING")
        else:
            run_id = self._create(self._info.name, {}, time.time())
        self._log(run_id, [], settings, tags)
        return run_id

    def start(self, trial: Run) -> None:
        """Take up a run; it is created with its first write."""
        self.complete.discard(trial.name)
        self._open(trial)
        if trial.phase == "confirm" and self._logs_model and trial.config.get("training") is None:
            # beside confirmation runs, since the study's end needs it
            _mlflow_pytorch()

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Write an evaluation of the run ``name``, with the current time, unless the run was
        written just before.
        """
        if run := self._runs.get(name):
            run.add(evaluation, time.time())
            if time.monotonic() - run.written_at >= WRITE_EVERY_SECONDS:
                self._write(run)

    def finish(self, trial: Run, result: TrialResult, score: float | None) -> None:
        """Write what the store lacks of a run, its evaluations, its result, its files and what its
        training's own code logged, and end it.
        """
        if trial.name in self.complete:
            return
        run = self._open(trial)
        for evaluation in result.evaluations:
            run.add(evaluation, fields.evaluated_at(result, evaluation))
        step = result.last.step if result.last else 0
        results = _metrics(fields.result_metrics(result, score), result.stopped_at, step)
        run_id = self._write(run, results, fields.result_tags(result))
        self._add_logged(run_id, trial, result)
        texts = (
            yaml.dump(fields.plain(trial.config), Dumper=_Dumper),
            yaml.dump(fields.plain(trial.overrides), Dumper=_Dumper),
            json.dumps(fields.plain(result.fingerprint), indent=2),
            result.error,
        )
        # not log_text, whose temporary folder stays where this process is killed
        folder = make_folder(Path(self._info.folder, TEXTS_FOLDER))
        for name, text in zip(_FILES, texts, strict=True):
            if text is not None:
                replace_file(folder / name, fields.storable(text))
                self._client.log_artifact(run_id, str(folder / name))
        self._client.set_terminated(
            run_id, result.outcome.traits.mlflow_status, _milliseconds(result.stopped_at)
        )
        for left in (folder, Path(self._info.folder, LOGS_FOLDER, trial.name)):
            shutil.rmtree(left, ignore_errors=True)
        self._left.pop(trial.name, None)
        del self._runs[trial.name]
        self.complete.add(trial.name)

    def close(self, end: StudyEnd) -> None:
        """Write and interrupt every open run, write the study's metrics, tags and artifacts, and
        end its run; then log its model, if there is one.
        """
        # the study's own end must not depend on one run that the store refuses
        with contextlib.suppress(Exception):
            for run in self._runs.values():
                self._write(run)
        for child in self._children(status="RUNNING"):
            self._client.set_tag(child.info.run_id, fields.OUTCOME_TAG, fields.INTERRUPTED)
            self._client.set_terminated(child.info.run_id, "KILLED")
        tags = {**end.tags}
        if description := tags.pop("autotune.description", None):
            # Markdown that MLflow's page of the run shows first
            tags["mlflow.note.content"] = description
        metrics = _metrics(end.metrics, time.time(), 0)
        metrics += (
            Metric("best_score", score, _milliseconds(at), num_ended)
            for num_ended, score, at in end.best_scores
        )
        self._log(self._parent, metrics, {}, fields.plain_tags(tags))
        for path in filter(Path.exists, end.artifacts):
            self._log_path(self._parent, path, path.name)
        self._client.set_terminated(self._parent, end.status)
        if end.make_model is not None and self._logs_model:
            try:
                self._log_model(*end.make_model())
            # a model of any kind, which torch may refuse to export in as many ways
            except Exception as error:  # noqa: BLE001
                logger.warning(
                    "MLflow has no model of the best configuration (%s)", one_line(error)
                )

    def _log_model(self, model: Any, inputs: Any) -> None:
        """Log a trained model to the study's run, in place of one that the run had, with its
        signature and an input example.

        Args:
            model: a ``torch.nn.Module`` on the CPU, in evaluation mode, whose outputs need no
                gradients.
            inputs: a batch of its inputs.
        """
        client, run_id, example = self._client, self._parent, inputs.numpy()
        earlier = client.get_run(run_id).outputs
        # MLflow compares the requirements with what is installed, which it reads from the lists of
        # files of all packages: a second, for versions that are those installed.
        installed = "mlflow.utils.requirements_utils._MODULES_TO_PACKAGES"
        with tempfile.TemporaryDirectory() as folder, patch(installed, {}, create=True):
            path = Path(folder, "model")
            _mlflow_pytorch().save_model(
                model,
                path,
                mlflow_model=Model(run_id=run_id),
                signature=infer_signature(example, model(inputs).numpy()),
                input_example=example,
                pip_requirements=[
                    f"{package}=={version(package).partition('+')[0]}"
                    for package in ("torch", "numpy")
                ],
            )
            model_id = client.create_logged_model(
                self._experiment, name="model", source_run_id=run_id
            ).model_id
            client.log_model_artifacts(model_id, str(path))
        client.finalize_logged_model(model_id, "READY")
        client.log_outputs(run_id, [LoggedModelOutput(model_id, 0)])
        for output in earlier.model_outputs if earlier else ():
            client.delete_logged_model(output.model_id)

    def _open(self, trial: Run) -> "_Run":
        """The record of a run, which continues where an earlier process left it."""
        if trial.name not in self._runs:
            run = _Run(trial)
            if left := self._left.get(trial.name):
                run.run_id = left.info.run_id
                self._client.update_run(run.run_id, status="RUNNING")
                # every evaluation has it
                history = self._client.get_metric_history(run.run_id, "train_seconds")
                run.steps = {point.step for point in history}
            self._runs[trial.name] = run
        return self._runs[trial.name]

    def _write(
        self, run: "_Run", metrics: Iterable[Metric] = (), tags: Mapping[str, str] | None = None
    ) -> str:
        """Write what is new of a run, and return its id."""
        trial = run.trial
        if run.run_id is None:
            run.run_id = self._create(
                display_name(trial, self._info.baseline),
                {**fields.trial_tags(trial, self._info.name), "mlflow.parentRunId": self._parent},
                trial.started_at,
            )
        self._log(run.run_id, [*run.unwritten, *metrics], fields.params(trial.values), tags or {})
        run.unwritten, run.written_at = [], time.monotonic()
        return run.run_id

    def _log(
        self,
        run_id: str,
        metrics: Sequence[Metric],
        params: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> None:
        self._client.log_batch(
            run_id,
            metrics,
            [Param(key, value) for key, value in params.items()],
            [RunTag(key, value) for key, value in tags.items()],
        )

    def _create(self, name: str, tags: Mapping[str, str], started_at: float) -> str:
        origin = {
            "mlflow.user": os.environ.get("USER", "unknown"),
            "mlflow.source.name": "autotune",
            "mlflow.source.type": "LOCAL",
        }
        run = self._client.create_run(
            self._experiment,
            _milliseconds(started_at),
            {**origin, **tags},
            run_name=fields.storable(name),
        )
        return str(run.info.run_id)

    def _children(self, **attributes: str) -> list[MlflowRun]:
        return self._found({"tags.`mlflow.parentRunId`": self._parent, **attributes})

    def _found(self, values: Mapping[str, str]) -> list[MlflowRun]:
        """Runs of the experiment that have all the given tags and attributes."""
        query = " and ".join(f'{key} = "{value}"' for key, value in values.items())
        return list(self._client.search_runs([self._experiment], query, max_results=_MAX_RESULTS))

    def _add_logged(self, run_id: str, trial: Run, result: TrialResult) -> None:
        """Add what the training's own code logged, beneath ``logged/`` where the name is one of
        autotune's.
        """
        folder = Path(self._info.folder, LOGS_FOLDER, trial.name)
        if not folder.is_dir():
            return
        own_metrics = {*fields.EVALUATION_METRICS, *fields.RESULT_METRICS}.union(
            *(fields.evaluation_metrics(evaluation, trial) for evaluation in result.evaluations)
        )
        own_params = fields.params(trial.values)
        # MLflow opens a folder only if it is told to
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            client = MlflowClient(folder.absolute().as_uri())
            experiments = [experiment.experiment_id for experiment in client.search_experiments()]
            runs = sorted(client.search_runs(experiments), key=lambda run: run.info.start_time)
            metrics = [
                Metric(_beside(key, own_metrics), point.value, point.timestamp, point.step)
                for run in runs
                for key in run.data.metrics
                for point in client.get_metric_history(run.info.run_id, key)
            ]
            models = client.search_logged_models(experiments)
        # files of any kind, which a process that was killed may have left half written
        except Exception as error:  # noqa: BLE001
            logger.warning(
                "MLflow: what %s logged cannot be read (%s)", trial.name, one_line(error)
            )
            return
        params = {
            _beside(key, own_params): value
            for run in runs
            for key, value in run.data.params.items()
        }
        tags = {
            key: value
            for run in runs
            for key, value in run.data.tags.items()
            if not key.startswith(("autotune.", "mlflow."))
        }
        self._log(run_id, metrics, params, tags)
        for run in runs:
            for path in Path(local_file_uri_to_path(run.info.artifact_uri)).glob("*"):
                self._log_path(run_id, path, _beside(path.name, _FILES))
        for model in models:
            self._log_path(
                run_id, Path(local_file_uri_to_path(model.artifact_location)), model.name
            )

    def _log_path(self, run_id: str, path: Path, name: str) -> None:
        """Log a folder by a name, or a file in the folder of the name."""
        if path.is_dir():
            self._client.log_artifacts(run_id, str(path), name)
        else:
            self._client.log_artifact(run_id, str(path), posixpath.dirname(name))


def _mlflow_pytorch() -> Any:
    """The module ``mlflow.pytorch``, without its part for Lightning, which is not needed here, and
    whose import takes seconds beside runs that are timed.
    """
    part = "mlflow.pytorch._lightning_autolog"
    sys.modules.setdefault(part, None)  # type: ignore[arg-type]  # its import fails then
    import mlflow.pytorch  # noqa: PLC0415  # imports torch, for a study that keeps its model

    if sys.modules[part] is None:
        del sys.modules[part]
    return mlflow.pytorch


_MAX_RESULTS = 50_000
"""The most runs that MLflow returns at once."""


@dataclass
class _Run:
    """A run that has not ended."""

    trial: Run
    run_id: str | None = None
    """Id of the run in the store; None before its first write."""
    steps: set[int] = field(default_factory=set)
    """Steps whose evaluations are written or in ``unwritten``."""
    unwritten: list[Metric] = field(default_factory=list)
    written_at: float = field(default_factory=time.monotonic)

    def add(self, evaluation: Evaluation, at: float) -> None:
        """Add the metrics of an evaluation that is not known yet; ``at`` is its Unix time."""
        if evaluation.step not in self.steps:
            self.steps.add(evaluation.step)
            metrics = fields.evaluation_metrics(evaluation, self.trial)
            self.unwritten += _metrics(metrics, at, evaluation.step)


def _metrics(values: Mapping[str, float], at: float, step: int) -> list[Metric]:
    """MLflow's metrics; ``at`` is their Unix time."""
    return [Metric(key, value, _milliseconds(at), step) for key, value in values.items()]


def _milliseconds(unix_seconds: float) -> int:
    return round(unix_seconds * 1000)


def _beside(name: str, own: Collection[str]) -> str:
    return f"logged/{name}" if name in own else name


def _may_continue(run: MlflowRun) -> bool:
    """Whether a run is open or was interrupted."""
    return (
        run.info.status not in ("FINISHED", "FAILED", "KILLED")
        or run.data.tags.get(fields.OUTCOME_TAG) == fields.INTERRUPTED
    )
