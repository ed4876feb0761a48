"""Creates, writes, ends and finds the runs of one study in an MLflow store.

MLflow's fluent functions share one global run; here every call gives the id of its run, so several trials can be open at once. Any
call may raise what the store's client raises, and may be repeated: nothing is stored twice.
"""

import getpass
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from mlflow.entities import LoggedModelOutput, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.models import Model, infer_signature
from mlflow.utils.file_utils import local_file_uri_to_path

from autotune.imports import absent
from autotune.measurement import TrialResult
from autotune.mlflow_logs import LOGS_FOLDER
from autotune.tracking import mlflow_fields as fields
from autotune.tracking.mlflow_fields import INTERRUPTED, OUTCOME_TAG, RUN_TAG, Point
from autotune.tracking.mlflow_logged import read_logged
from autotune.tracking.mlflow_store import (
    ChildRun,
    child_runs,
    first_contact,
    has_transactions,
    one_transaction,
    open_experiment,
    tagged_runs,
    view_page,
)
from autotune.tracking.mlflow_uri import reason_of, store_uri
from autotune.tracking.tracker import StudyInfo, TrackedTrial, display_name
from autotune.yaml_files import yaml_text

_MAX_METRICS = 800  # MLflow accepts 1,000 entries of all kinds per batch
_MAX_PARAMS = 100
_MAX_TAGS = 100
_MAX_NAME_CHARACTERS = 250
LOGGER = logging.getLogger("autotune.tracking")
_KINDS = {"metrics": Metric, "params": Param, "tags": RunTag}
"""Kinds of entries of a batch, by the names of their arguments."""
_FILES = ("config.yaml", "overrides.yaml", "fingerprint.json", "error.txt")
"""Artifacts that autotune writes to a trial's run."""
_DESCRIPTION = "mlflow.note.content"
"""Tag whose Markdown MLflow's page of a run shows first."""


class MlflowRuns:
    """The parent run of a study and its child runs in a store; ``finished`` has the names of the children whose results are known.

    Raises:
        ConfigError: the store does not answer.
    """

    def __init__(self, info: StudyInfo, uri: str | None, finished: Collection[str]) -> None:
        uri = store_uri(uri)
        self._study, self._baseline = info.name, info.baseline
        self._logs = Path(info.folder) / LOGS_FOLDER
        self._folders: dict[str, str] = {}
        """Folder of a run's artifacts, by the run's id, where it is a folder of this machine and the run has not ended."""
        self._is_together = False  # within a transaction, which fails as a whole
        self._has_refused = False
        self._origin = {"mlflow.user": _user(), "mlflow.source.name": "autotune", "mlflow.source.type": "LOCAL"}
        with first_contact(uri):
            self._client, self._experiment = open_experiment(uri, info.experiment, info.parameters)
            self.page = view_page(uri, self._experiment)
            """Address of the page that shows the trials of the experiment, best first."""
            self.has_transactions = has_transactions(self._client)
            """Whether several runs can be written ``together``."""
            self.parent = self._open_parent(info, is_resumed=bool(finished))
            """Id of the study's own run."""
            self.left: dict[str, str | None] = self._take_over(finished)
            """The child runs that earlier processes left, by name: the id of one that is open or interrupted, None for a complete one."""

    def _open_parent(self, info: StudyInfo, *, is_resumed: bool) -> str:
        """Id of the study's open parent run: a new run if the store has none, or one of an earlier study of that name and folder."""
        tags = fields.study_tags(info, str(Path(info.folder).resolve()))
        settings = fields.params(info.settings)
        earlier = self._find_parent(tags)
        if earlier is not None and (is_resumed or not self._has_ended_children(earlier.info.run_id)):
            run_id = str(earlier.info.run_id)
            stored = dict(earlier.data.params)
            # A param can be written only once, so settings that changed when the study was resumed become tags.
            changed = {key: value for key, value in settings.items() if stored.get(key, value) != value}
            tags |= fields.plain_tags({f"autotune.resumed.{key}": value for key, value in changed.items()})
            self._client.update_run(run_id, status="RUNNING")
        else:
            stored = {}
            run_id = self._create(info.name, tags, time.time())
        self._log(run_id, params={key: value for key, value in settings.items() if key not in stored}, tags=tags)
        for name, content in info.files.items():
            self._client.log_text(run_id, yaml_text(dict(content)), name)
        return run_id

    def _find_parent(self, tags: Mapping[str, str]) -> Run | None:
        parents = self._search({key: tags[key] for key in ("autotune.study", "autotune.phase", "autotune.folder")})
        return max(parents, key=lambda run: run.info.start_time, default=None)

    def _has_ended_children(self, parent: str) -> bool:
        return any(not _is_open(run) and not _was_interrupted(run) for run in self._children(parent))

    def _take_over(self, finished: Collection[str]) -> dict[str, str | None]:
        """Find the child runs that earlier processes left, as in ``left``; an open one whose result is not known is interrupted."""
        left: dict[str, str | None] = {}
        for run in self._children(self.parent):
            name = run.tags.get(RUN_TAG, run.run_name)  # without that tag, the run is of a version that named runs so
            if not _is_open(run) and not _was_interrupted(run):
                left[name] = None
                continue
            if _is_open(run) and (name not in finished or name in left):
                self.interrupt(run.run_id)
            left.setdefault(name, run.run_id)
        return left

    def start(self, trial: TrackedTrial, tags: Mapping[str, str] = MappingProxyType({})) -> str:
        """Create the run of a trial, with further tags, and return its id."""
        tags = {**fields.trial_tags(trial, self._study), "mlflow.parentRunId": self.parent, **fields.plain_tags(tags)}
        return self._create(display_name(trial, self._baseline), tags, trial.started_at)

    def describe(self, run_id: str, trial: TrackedTrial) -> None:
        """Write a run's params, configuration and overrides."""
        self._log(run_id, params=fields.params(trial.values))
        self._log_files(run_id, _description(trial))

    def write(self, run_id: str, points: Sequence[Point]) -> None:
        """Write values of metrics to a run."""
        self._log(run_id, points=points)

    def finish(
        self,
        run_id: str,
        trial: TrackedTrial,
        result: TrialResult,
        score: float | None,
        *,
        points: Sequence[Point],
        is_described: bool,
        is_tagged: bool,
    ) -> None:
        """Write a run's last ``points`` and its result, and end it.

        Also writes what ``describe`` would have, unless ``is_described``, and the tags of the result, unless ``is_tagged``.
        """
        params = {} if is_described else fields.params(trial.values)
        tags = {} if is_tagged else fields.result_tags(trial, result)
        self._log(run_id, points=[*points, *fields.result_points(result, score)], params=params, tags=tags)
        self._add_logged(run_id, trial, result)
        files = {} if is_described else _description(trial)
        files["fingerprint.json"] = json.dumps(fields.plain(result.fingerprint), indent=2)
        if result.error is not None:
            files["error.txt"] = result.error
        self._log_files(run_id, files)
        self._client.set_terminated(run_id, result.outcome.traits.mlflow_status, fields.milliseconds(result.stopped_at))

    def _add_logged(self, run_id: str, trial: TrackedTrial, result: TrialResult) -> None:
        """Add what the training's own code logged, beneath ``logged/`` where the name is one of autotune's."""
        folder = self._logs / trial.name
        if not folder.is_dir():
            return
        try:
            logged = read_logged(folder)
        except Exception as error:  # noqa: BLE001  # files of any kind, which a process that was killed may have left half written
            LOGGER.warning("MLflow: what %s logged itself cannot be read (%s)", trial.name, reason_of(error))
            return
        evaluated = (fields.evaluation_points(evaluation, 0.0, fields.metric_name_of(trial)) for evaluation in result.evaluations)
        own_metrics = {*fields.EVALUATION_METRICS, *fields.RESULT_METRICS, *(point.key for points in evaluated for point in points)}
        own_params = fields.params(trial.values)
        self._log(
            run_id,
            points=[point._replace(key=_beside(point.key, own_metrics)) for point in logged.points],
            params={_beside(key, own_params): value for key, value in logged.params.items() if own_params.get(key) != value},
            tags={_beside(key, [tag for tag in logged.tags if tag.startswith("autotune.")]): value for key, value in logged.tags.items()},
        )
        for name, path in logged.artifacts:
            shown = _beside(name, _FILES)
            if path.is_dir():
                self._client.log_artifacts(run_id, str(path), shown)
            else:
                self._client.log_artifact(run_id, str(path), None if shown == name else "logged")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context manager in which all writes to a database are one transaction; if it fails, files of its runs are deleted too."""
        before, self._is_together = set(self._folders), True
        try:
            with one_transaction(self._client):
                yield
        except BaseException:
            for run_id in set(self._folders) - before:
                shutil.rmtree(Path(self._folders.pop(run_id)).parent, ignore_errors=True)
            raise
        finally:
            self._is_together = False

    def interrupt(self, run_id: str) -> None:
        """End a run as KILLED, with the outcome INTERRUPTED: it will have no result."""
        self._client.set_tag(run_id, OUTCOME_TAG, INTERRUPTED)
        self._client.set_terminated(run_id, "KILLED")

    def forget(self, run_id: str, name: str) -> None:
        """Forget what is kept of a run while it is written, and what its own code logged."""
        shutil.rmtree(self._logs / name, ignore_errors=True)
        self._folders.pop(run_id, None)

    def reopen(self, run_id: str) -> None:
        """Let a run that was interrupted go on."""
        self._client.update_run(run_id, status="RUNNING")

    def interrupt_open(self) -> None:
        """Interrupt every child run that is still open, such as one whose creation succeeded after the client had given up."""
        for run in self._search({"mlflow.parentRunId": self.parent}, "attributes.status = 'RUNNING'"):
            self.interrupt(run.info.run_id)

    def steps(self, run_id: str) -> set[int]:
        """Steps of the evaluations that a run has in the store."""
        return {point.step for point in self._client.get_metric_history(run_id, fields.STEP_METRIC)}

    @staticmethod
    def import_for_models() -> Any:
        """Import what logging a model takes, torch among it, and return ``mlflow.pytorch``; it takes seconds."""
        with absent("mlflow.pytorch._lightning_autolog"):  # imports Lightning, where it is installed, which takes seconds
            import mlflow.pytorch  # noqa: PLC0415  # imports torch; "from mlflow" would give a module that is imported later
        return mlflow.pytorch

    def log_model(self, model: Any, inputs: Any) -> None:
        """Log a trained model to the study's run, in place of one that the run had, with its signature and an input example.

        Args:
            model: a ``torch.nn.Module`` on the CPU, in evaluation mode, whose outputs need no gradients.
            inputs: a batch of its inputs.
        """
        pytorch = self.import_for_models()
        example = inputs.numpy()
        earlier = self._client.get_run(self.parent).outputs
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model")
            pytorch.save_model(
                model,
                path,
                mlflow_model=Model(run_id=self.parent),
                signature=infer_signature(example, model(inputs).numpy()),
                input_example=example,
                pip_requirements=[f"{package}=={version(package).partition('+')[0]}" for package in ("torch", "numpy")],
            )
            logged = self._client.create_logged_model(self._experiment, name="model", source_run_id=self.parent)
            self._client.log_model_artifacts(logged.model_id, str(path))
        self._client.finalize_logged_model(logged.model_id, "READY")
        self._client.log_outputs(self.parent, [LoggedModelOutput(logged.model_id, 0)])
        for output in earlier.model_outputs if earlier else ():
            self._client.delete_logged_model(output.model_id)

    def close(self, *, status: str, metrics: Mapping[str, float], tags: Mapping[str, str], artifacts: Sequence[Path]) -> None:
        """Write the study's metrics, tags and artifacts, and end its run; artifacts that do not exist are left out."""
        described = {_DESCRIPTION: tags["autotune.description"]} if "autotune.description" in tags else {}
        others = {key: value for key, value in tags.items() if key != "autotune.description"}
        self._log(self.parent, points=fields.study_points(metrics, time.time()), tags=fields.plain_tags(others | described))
        for path in artifacts:
            if path.is_dir():
                self._client.log_artifacts(self.parent, str(path), path.name)
            elif path.exists():
                self._client.log_artifact(self.parent, str(path))
        self._client.set_terminated(self.parent, status)

    def _create(self, name: str, tags: Mapping[str, str], started_at: float) -> str:
        name = fields.storable(name)[:_MAX_NAME_CHARACTERS]
        run = self._client.create_run(self._experiment, fields.milliseconds(started_at), {**self._origin, **tags}, run_name=name)
        run_id = str(run.info.run_id)
        if run.info.artifact_uri.startswith(("/", "file:")):
            self._folders[run_id] = local_file_uri_to_path(run.info.artifact_uri)
        return run_id

    def _log(
        self,
        run_id: str,
        *,
        points: Sequence[Point] = (),
        params: Mapping[str, str] = MappingProxyType({}),
        tags: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Write metrics, params and tags to a run in as few calls as MLflow's limits allow."""
        batches = zip_longest(
            _batches([Metric(point.key, point.value, point.timestamp_ms, point.step) for point in points], _MAX_METRICS),
            _batches([Param(key, value) for key, value in params.items()], _MAX_PARAMS),
            _batches([RunTag(key, value) for key, value in tags.items()], _MAX_TAGS),
            fillvalue=(),
        )
        for batch in batches:
            self._log_batch(run_id, [entity for entities in batch for entity in entities])

    def _log_batch(self, run_id: str, entities: Sequence[Metric | Param | RunTag]) -> None:
        """Write a batch, without entries that the store refuses for themselves: one such value must not keep a run out of MLflow."""
        kinds = {name: [entity for entity in entities if isinstance(entity, kind)] for name, kind in _KINDS.items()}
        try:
            self._client.log_batch(run_id, **kinds)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE" or self._is_together:
                raise
            if len(entities) > 1:
                for half in (entities[: len(entities) // 2], entities[len(entities) // 2 :]):
                    self._log_batch(run_id, half)
            elif not self._has_refused:
                self._has_refused = True
                LOGGER.warning("MLflow refuses %s (%s); the rest of the run is written", entities[0].key, reason_of(error))

    def _log_files(self, run_id: str, files: Mapping[str, str]) -> None:
        """Write artifacts (text by file name): into the run's folder where it is known, else in one call, which first asks for it."""
        if run_id in self._folders:
            own_folder = Path(self._folders[run_id])
            own_folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (own_folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
            return
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                Path(folder, name).write_text(text, encoding="utf-8", errors="backslashreplace")
            self._client.log_artifacts(run_id, folder)

    def _children(self, parent: str) -> list[ChildRun]:
        return child_runs(self._client, self._experiment, parent, [RUN_TAG, OUTCOME_TAG])

    def _search(self, tags: Mapping[str, str], condition: str = "") -> list[Run]:
        return tagged_runs(self._client, self._experiment, tags, condition)


_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # five times as fast, where PyYAML was built with it


def _description(trial: TrackedTrial) -> dict[str, str]:
    """Text of the files that describe what a run trains, by file name."""
    parts = {"config.yaml": trial.config, "overrides.yaml": trial.overrides}
    return {name: yaml.dump(fields.plain(part), Dumper=_Dumper) for name, part in parts.items()}


def _beside(key: str, own: Collection[str]) -> str:
    return f"logged/{key}" if key in own else key


def _is_open(run: ChildRun) -> bool:
    return run.status not in ("FINISHED", "FAILED", "KILLED")


def _was_interrupted(run: ChildRun) -> bool:
    return run.tags.get(OUTCOME_TAG) == INTERRUPTED


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user in a container may have no name
        return "unknown"
