"""Writes a study to Weights & Biases: a group of runs for each study, one run a trial or
confirmation run, and one of the study itself.

The runs' files lie in ``wandb/`` in the study's own folder, also while they are uploaded. A run
that W&B could not take, since its service was killed, its server is gone or the disk is full, is
written anew as a whole when the study ends, or when it is taken up again.
"""

import hashlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from autotune.errors import ConfigError
from autotune.files import make_folder, replace_file
from autotune.measurement import Evaluation, TrialResult
from autotune.tracking import mlflow_fields as fields
from autotune.tracking.tracker import StudyEnd, StudyInfo, TrackedTrial, display_name

if TYPE_CHECKING:
    from wandb import Run

MODES: tuple[Literal["offline", "online", "disabled"], ...] = ("offline", "online", "disabled")
_ENDED = "ended"
"""File in the folder of a run that is written as a whole; it has the run's name."""
_LOGIN_SECONDS, _INIT_SECONDS, _FINISH_SECONDS = 10, 20.0, 60.0
"""How long W&B may take to check the key, and to begin and to end the upload of a run; the rest
is left to ``wandb sync``."""


class WandbTracker:
    """Tracker that writes a study for Weights & Biases.

    Args:
        mode: one of ``MODES``.
        project: of the runs; if None, WANDB_PROJECT of the environment, else the experiment's name.

    Raises:
        ConfigError: wandb is not installed, the mode is not one of ``MODES``, the project is no
            text, the server does not take the user's key, or the study's folder cannot be written.
    """

    def __init__(
        self, info: StudyInfo, *, mode: str = "offline", project: str | None = None
    ) -> None:
        try:
            import wandb  # noqa: PLC0415  # an extra of the package
        except ImportError as error:
            raise ConfigError(
                "tracking=wandb: needs wandb; pip install 'autotune[wandb]'"
            ) from error
        if mode not in MODES:
            raise ConfigError(
                f"tracking.mode: found {mode!r}, accepted is one of {', '.join(MODES)}"
            )
        if not isinstance(project, str | None):
            raise ConfigError(
                f"tracking.project: found {project}; accepted is the name of a project"
            )
        if mode == "online":
            try:
                wandb.login(verify=True, timeout=_LOGIN_SECONDS)
            except wandb.Error as error:
                raise ConfigError(
                    f"tracking.mode=online: {str(error).splitlines()[0]} (tracking.mode=offline"
                    " needs no server)"
                ) from error
        # its tracebacks of a lost service or a full disk flood the terminal
        logging.getLogger("wandb").setLevel(logging.CRITICAL)
        self._wandb, self._info, self._mode = wandb, info, mode
        # which it accepts in no name
        self._project = (
            project or os.environ.get("WANDB_PROJECT") or info.experiment.replace("/", "_")
        )
        self._folder = Path(info.folder) / "wandb"
        self._study_id = self._read_study_id()
        self._runs: dict[str, _OpenRun] = {}
        self.complete = {file.read_text() for file in self._folder.glob(f"*/{_ENDED}")}
        """Names of the runs that are written as a whole."""

    def start(self, trial: TrackedTrial) -> None:
        """Begin the trial's run, with its values as the run's config."""
        self.complete.discard(trial.name)
        with self._cleared_by_faults():
            self._start(trial)

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Write the metrics of an evaluation of the run ``name``."""
        if name in self._runs:
            with self._cleared_by_faults():
                self._evaluate(name, evaluation)

    def finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        """Write the run's missing evaluations, its result and a tag that says how it ended, and
        end it.
        """
        with self._cleared_by_faults():
            self._finish(trial, result, score)
        self.complete.add(trial.name)

    def close(self, end: StudyEnd) -> None:
        """End every open run as interrupted, and write the study's own run: best scores,
        metrics, tags and files.
        """
        with self._cleared_by_faults():
            while self._runs:
                _, opened = self._runs.popitem()
                _end(opened.run, fields.INTERRUPTED, is_success=False)
            self._write_study(end)

    @contextmanager
    def _cleared_by_faults(self) -> Iterator[None]:
        """Context after whose errors W&B begins anew: its service, its server or the disk has
        failed, and the open runs are lost.
        """
        try:
            yield
        except Exception:
            # no run waits for a server that is gone: wandb sync uploads
            self._mode = "offline" if self._mode == "online" else self._mode
            self._runs.clear()
            with suppress(Exception):
                self._wandb.teardown()  # the next run starts a new service
            raise

    def _start(self, trial: TrackedTrial) -> None:
        config = {**trial.values, **fields.trial_tags(trial, self._info.name)}
        run = self._begin(trial.name, display_name(trial, self._info.baseline), trial.phase, config)
        self._runs[trial.name] = _OpenRun(run, fields.metric_name_of(trial), set())

    def _evaluate(self, name: str, evaluation: Evaluation) -> None:
        run, metric_name, steps = self._runs[name]
        steps.add(evaluation.step)
        points = fields.evaluation_points(evaluation, time.time(), metric_name)
        run.log({point.key: point.value for point in points}, step=evaluation.step)

    def _finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        if trial.name not in self._runs:
            self._start(trial)
        run, _, steps = self._runs[trial.name]
        for evaluation in result.evaluations:
            if evaluation.step not in steps:
                self._evaluate(trial.name, evaluation)
        _summarise(run, fields.result_points(result, score))
        for key, tag in fields.result_tags(trial, result).items():
            run.config[key] = tag
        if result.error is not None:
            run.notes = result.error
        _end(run, str(result.outcome), is_success=result.outcome.traits.mlflow_status == "FINISHED")
        if self._mode != "disabled":
            replace_file(Path(run.settings.sync_dir) / _ENDED, trial.name)
        del self._runs[trial.name]

    def _write_study(self, end: StudyEnd) -> None:
        tags = {**fields.study_tags(self._info, str(self._folder.parent.resolve())), **end.tags}
        notes = tags.pop("autotune.description", None)
        run = self._begin(
            "", self._info.name, self._info.kind, {**self._info.settings, **tags}, notes
        )
        for best in end.best_scores:
            run.log({"best_score": best.score}, step=best.num_ended)
        _summarise(run, fields.study_points(end.metrics, time.time()))
        for path in end.artifacts:
            run.save(path / "*" if path.is_dir() else path, base_path=path.parent, policy="end")
        _end(run, end.status, is_success=end.status == "FINISHED")

    def _begin(
        self,
        name: str,
        shown_name: str,
        job_type: str,
        config: Mapping[str, Any],
        notes: str | None = None,
    ) -> "Run":
        for folder in self._folders(name):
            shutil.rmtree(folder)  # of a run that was not written as a whole, and now is
        settings = self._wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            finish_timeout=_FINISH_SECONDS,
            finish_timeout_raises=True,
            init_timeout=_INIT_SECONDS,
            silent=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        return self._wandb.init(
            id=self._run_id(name),
            name=shown_name,
            group=self._info.name,
            job_type=job_type,
            config=fields.plain(config),
            notes=notes,
            project=self._project,
            mode=self._mode,
            dir=self._folder.parent,
            reinit="create_new",
            settings=settings,
        )

    def _run_id(self, name: str) -> str:
        return hashlib.sha256(f"{self._study_id}/{name}".encode()).hexdigest()[:16]

    def _folders(self, name: str) -> list[Path]:
        return list(self._folder.glob(f"*run-*-{self._run_id(name)}*"))

    def _read_study_id(self) -> str:
        """A random id of the study, kept in its folder: W&B never takes the id of a deleted run
        again, so that names do not suffice.
        """
        file = self._folder / "study_id"
        try:
            if not file.exists():
                replace_file(make_folder(self._folder) / file.name, uuid.uuid4().hex)
            return file.read_text()
        except OSError as error:
            raise ConfigError(f"tracking=wandb: {error}") from error


class _OpenRun(NamedTuple):
    """A run that is not ended."""

    run: "Run"
    metric_name: str | None
    """Name of the metric of the run's target."""
    steps: set[int]
    """Steps whose evaluations are written."""


def _summarise(run: "Run", points: Iterable[fields.Point]) -> None:
    for point in points:
        run.summary[point.key] = point.value


def _end(run: "Run", tag: str, *, is_success: bool) -> None:
    run.tags = (tag,)
    run.finish(exit_code=0 if is_success else 1)
