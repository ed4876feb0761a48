"""Creates, writes, ends and finds the runs of one study in an MLflow store.

MLflow's fluent functions share one global run; here every call gives the id of its run, so several
trials can be open at once. Any call may raise what the store's client raises, and may be repeated:
nothing is stored twice.
"""

import getpass
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, Metric, Param, Run, RunTag
from mlflow.models import Model, infer_signature
from mlflow.utils.file_utils import local_file_uri_to_path

from autotune.measurement import TrialResult
from autotune.mlflow_logs import LOGS_FOLDER
from autotune.tracking import mlflow_fields as fields
from autotune.tracking.mlflow_fields import INTERRUPTED, OUTCOME_TAG, RUN_TAG, Point
from autotune.tracking.mlflow_store import (
    first_contact,
    open_experiment,
    reason_of,
    store_uri,
    tagged_runs,
    view_page,
)
from autotune.tracking.tracker import StudyEnd, StudyInfo, TrackedTrial, display_name

LOGGER = logging.getLogger("autotune.tracking")
_MAX_NAME_CHARACTERS = 250
_FILES = ("config.yaml", "overrides.yaml", "fingerprint.json", "error.txt")
"""Artifacts that autotune writes to a trial's run."""
# five times as fast, where PyYAML was built with it
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class MlflowRuns:
    """The parent run of a study and its child runs in a store.

    Raises:
        ConfigError: the store does not answer.
    """

    def __init__(self, info: StudyInfo, uri: str | None) -> None:
        uri = store_uri(uri)
        self._study, self._baseline = info.name, info.baseline
        self._logs = Path(info.folder) / LOGS_FOLDER
        with first_contact(uri):
            self._client, self._experiment = open_experiment(uri, info.experiment, info.parameters)
            self.page = view_page(uri, self._experiment)
            """Address of the page that shows the trials of the experiment, best first."""
            self._parent = self._open_parent(info)
            children = [run for run in self._children() if RUN_TAG in run.data.tags]
        self.complete = {run.data.tags[RUN_TAG] for run in children if not _may_go_on(run)}
        """Names of the child runs that are written as a whole."""
        self._left = {
            run.data.tags[RUN_TAG]: str(run.info.run_id) for run in children if _may_go_on(run)
        }
        """Ids of the child runs that earlier processes left open or interrupted, by name."""

    def _open_parent(self, info: StudyInfo) -> str:
        """Id of the study's own run, which is open: that of an earlier process if the study is
        resumed, else a new one.
        """
        tags = fields.study_tags(info, str(Path(info.folder).resolve()))
        settings = fields.params(info.settings)
        identity = {
            key: tags[key] for key in ("autotune.study", "autotune.phase", "autotune.folder")
        }
        found = tagged_runs(self._client, self._experiment, identity) if info.is_resumed else []
        if found:
            earlier = max(found, key=lambda run: run.info.start_time)
            run_id = str(earlier.info.run_id)
            # A param can be written only once, so settings that changed when the study was resumed
            # become tags.
            stored = earlier.data.params
            tags |= {
                f"autotune.resumed.{key}": value
                for key, value in settings.items()
                if stored.get(key, value) != value
            }
            settings = {key: value for key, value in settings.items() if key not in stored}
            self._client.update_run(run_id, status="RUNNING")
        else:
            run_id = self._create(info.name, {}, time.time())
        self.log(run_id, params=settings, tags=fields.plain_tags(tags))
        return run_id

    def create(self, trial: TrackedTrial) -> str:
        """Create the run of a trial and return its id."""
        tags = {**fields.trial_tags(trial, self._study), "mlflow.parentRunId": self._parent}
        return self._create(display_name(trial, self._baseline), tags, trial.started_at)

    def reopened(self, name: str) -> tuple[str, set[int]] | None:
        """Let a run that an earlier process left go on: its id and the steps of its evaluations.

        None if there is none of that name.
        """
        if (run_id := self._left.get(name)) is None:
            return None
        self._client.update_run(run_id, status="RUNNING")
        return run_id, {
            point.step for point in self._client.get_metric_history(run_id, fields.STEP_METRIC)
        }

    def log(
        self,
        run_id: str,
        *,
        points: Iterable[Point] = (),
        params: Mapping[str, str] = MappingProxyType({}),
        tags: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Write metrics, params and tags to a run."""
        self._client.log_batch(
            run_id,
            metrics=[
                Metric(point.key, point.value, point.timestamp_ms, point.step) for point in points
            ],
            params=[Param(key, value) for key, value in params.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        )

    def finish(self, run_id: str, trial: TrackedTrial, result: TrialResult) -> None:
        """Write a run's files and what its training's own code logged, and end it."""
        self._add_logged(run_id, trial, result)
        files = {
            "config.yaml": yaml.dump(fields.plain(trial.config), Dumper=_Dumper),
            "overrides.yaml": yaml.dump(fields.plain(trial.overrides), Dumper=_Dumper),
            "fingerprint.json": json.dumps(fields.plain(result.fingerprint), indent=2),
            **({} if result.error is None else {"error.txt": result.error}),
        }
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                Path(folder, name).write_text(text, encoding="utf-8", errors="backslashreplace")
            self._client.log_artifacts(run_id, folder)
        self._client.set_terminated(
            run_id, result.outcome.traits.mlflow_status, fields.milliseconds(result.stopped_at)
        )
        shutil.rmtree(self._logs / trial.name, ignore_errors=True)
        self._left.pop(trial.name, None)
        self.complete.add(trial.name)

    def close(self, end: StudyEnd) -> None:
        """Interrupt the child runs that are open, write the study's metrics, tags and artifacts,
        and end its run.
        """
        for run in self._children("attributes.status = 'RUNNING'"):
            self._client.set_tag(run.info.run_id, OUTCOME_TAG, INTERRUPTED)
            self._client.set_terminated(run.info.run_id, "KILLED")
        tags = {**end.tags}
        if (description := tags.pop("autotune.description", None)) is not None:
            # Markdown that MLflow's page of the run shows first
            tags["mlflow.note.content"] = description
        best = [
            Point("best_score", score, fields.milliseconds(at), num_ended)
            for num_ended, score, at in end.best_scores
        ]
        self.log(
            self._parent,
            points=[*fields.study_points(end.metrics, time.time()), *best],
            tags=fields.plain_tags(tags),
        )
        for path in end.artifacts:
            if path.is_dir():
                self._client.log_artifacts(self._parent, str(path), path.name)
            elif path.exists():
                self._client.log_artifact(self._parent, str(path))
        self._client.set_terminated(self._parent, end.status)

    def log_model(self, model: Any, inputs: Any) -> None:
        """Log a trained model to the study's run, in place of one that the run had, with its
        signature and an input example.

        Args:
            model: a ``torch.nn.Module`` on the CPU, in evaluation mode, whose outputs need no
                gradients.
            inputs: a batch of its inputs.
        """
        import mlflow.pytorch  # noqa: PLC0415  # imports torch, for a study that keeps its model

        example = inputs.numpy()
        earlier = self._client.get_run(self._parent).outputs
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model")
            mlflow.pytorch.save_model(
                model,
                path,
                mlflow_model=Model(run_id=self._parent),
                signature=infer_signature(example, model(inputs).numpy()),
                input_example=example,
                pip_requirements=[
                    f"{package}=={version(package).partition('+')[0]}"
                    for package in ("torch", "numpy")
                ],
            )
            logged = self._client.create_logged_model(
                self._experiment, name="model", source_run_id=self._parent
            )
            self._client.log_model_artifacts(logged.model_id, str(path))
        self._client.finalize_logged_model(logged.model_id, "READY")
        self._client.log_outputs(self._parent, [LoggedModelOutput(logged.model_id, 0)])
        for output in earlier.model_outputs if earlier else ():
            self._client.delete_logged_model(output.model_id)

    def _create(self, name: str, tags: Mapping[str, str], started_at: float) -> str:
        name = fields.storable(name)[:_MAX_NAME_CHARACTERS]
        origin = {
            "mlflow.user": _user(),
            "mlflow.source.name": "autotune",
            "mlflow.source.type": "LOCAL",
        }
        run = self._client.create_run(
            self._experiment, fields.milliseconds(started_at), {**origin, **tags}, run_name=name
        )
        return str(run.info.run_id)

    def _children(self, condition: str = "") -> list[Run]:
        return tagged_runs(
            self._client, self._experiment, {"mlflow.parentRunId": self._parent}, condition
        )

    def _add_logged(self, run_id: str, trial: TrackedTrial, result: TrialResult) -> None:
        """Add what the training's own code logged, beneath ``logged/`` where the name is one of
        autotune's.
        """
        folder = self._logs / trial.name
        if not folder.is_dir():
            return
        evaluated = (
            fields.evaluation_points(evaluation, 0.0, fields.metric_name_of(trial))
            for evaluation in result.evaluations
        )
        own_metrics = {
            *fields.EVALUATION_METRICS,
            *fields.RESULT_METRICS,
            *(point.key for points in evaluated for point in points),
        }
        own_params = fields.params(trial.values)
        try:
            client = _folder_client(folder)
            experiments = [experiment.experiment_id for experiment in client.search_experiments()]
            runs = sorted(client.search_runs(experiments), key=lambda run: run.info.start_time)
            points = [
                _beside(point, own_metrics) for run in runs for point in _logged_points(client, run)
            ]
            models = [
                (model.name, model.artifact_location)
                for model in client.search_logged_models(experiments)
            ]
        # files of any kind, which a process that was killed may have left half written
        except Exception as error:  # noqa: BLE001
            LOGGER.warning(
                "MLflow: what %s logged itself cannot be read (%s)", trial.name, reason_of(error)
            )
            return
        params = {
            key: value
            for run in runs
            for key, value in run.data.params.items()
            if own_params.get(key) != value
        }
        tags = {
            key: value
            for run in runs
            for key, value in run.data.tags.items()
            if not key.startswith("mlflow.")
        }
        self.log(
            run_id,
            points=points,
            params={_logged_name(key, own_params): value for key, value in params.items()},
            tags={
                f"logged/{key}" if key.startswith("autotune.") else key: value
                for key, value in tags.items()
            },
        )
        paths = [(path.name, path) for run in runs for path in _artifacts(run.info.artifact_uri)]
        for name, path in [
            *paths,
            *((name, Path(local_file_uri_to_path(location))) for name, location in models),
        ]:
            shown = _logged_name(name, _FILES)
            if path.is_dir():
                self._client.log_artifacts(run_id, str(path), shown)
            else:
                self._client.log_artifact(run_id, str(path), None if shown == name else "logged")


def _folder_client(folder: Path) -> MlflowClient:
    """A client of a folder that ``autotune/mlflow_logs.py`` let a training log to, which MLflow
    opens only if it is told to.
    """
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return MlflowClient(folder.absolute().as_uri())


def _logged_points(client: MlflowClient, run: Run) -> list[Point]:
    histories = [client.get_metric_history(run.info.run_id, key) for key in run.data.metrics]
    points = [
        Point(point.key, point.value, point.timestamp, point.step)
        for history in histories
        for point in history
    ]
    return [point for point in points if math.isfinite(point.value)]


def _artifacts(uri: str) -> Sequence[Path]:
    return sorted(Path(local_file_uri_to_path(uri)).glob("*"))


def _beside(point: Point, own: Collection[str]) -> Point:
    return point._replace(key=_logged_name(point.key, own))


def _logged_name(name: str, own: Collection[str]) -> str:
    return f"logged/{name}" if name in own else name


def _may_go_on(run: Run) -> bool:
    """Whether a run is open or was interrupted."""
    return (
        run.info.status not in ("FINISHED", "FAILED", "KILLED")
        or run.data.tags.get(OUTCOME_TAG) == INTERRUPTED
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user in a container may have no name
        return "unknown"
