"""Writes a study to Weights & Biases: a group of runs for each study, one run a trial or
confirmation run, and one of the study itself.

The runs' files lie in ``wandb/`` in the study's own folder, also while they are uploaded. A run
that W&B could not take, since its service was killed, its server is gone or the disk is full, is
written anew as a whole when the study ends, or when it is resumed.
"""

import hashlib
import logging
import os
import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from autotune.errors import ConfigError, FileError

try:
    import wandb
except ImportError as missing:
    raise ConfigError("tracking=wandb: needs wandb; pip install 'autotune[wandb]'") from missing

from autotune.files import make_folder, replace_file
from autotune.measurement import Evaluation, TrialResult
from autotune.policy import Run
from autotune.tracking import fields
from autotune.tracking.tracker import StudyEnd, StudyInfo, display_name

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
        ConfigError: the mode is not one of ``MODES``, the server does not take the user's key, or
            the study's folder cannot be written.
    """

    def __init__(
        self, info: StudyInfo, *, mode: str = "offline", project: str | None = None
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"tracking.mode: found {mode!r}, use one of {', '.join(MODES)}")
        self._info, self._mode = info, mode
        # its tracebacks of a lost service or a full disk flood the terminal
        logging.getLogger("wandb").setLevel(logging.CRITICAL)
        # W&B accepts a slash in no name
        default = os.environ.get("WANDB_PROJECT") or info.experiment.replace("/", "_")
        self._project = project or default
        self._folder = Path(info.folder) / "wandb"
        self.browse = {
            "offline": f"wandb sync {shlex.quote(str(self._folder))}/offline-run-*",
            "online": os.environ.get("WANDB_BASE_URL", "https://wandb.ai"),
        }.get(mode)
        # W&B never takes the id of a deleted run again, so names do not suffice
        study_id = self._folder / "study_id"
        try:
            if mode == "online":
                wandb.login(verify=True, timeout=_LOGIN_SECONDS)
            if not study_id.exists():
                replace_file(make_folder(self._folder) / study_id.name, uuid.uuid4().hex)
            self._study_id = study_id.read_text()
        except (wandb.Error, OSError, FileError) as error:
            raise ConfigError(f"tracking.mode={mode}: {str(error).splitlines()[0]}") from error
        self._runs: dict[str, tuple[Run, wandb.Run, set[int]]] = {}
        """Open runs, with the steps whose evaluations are written, by name."""
        self.complete = {file.read_text() for file in self._folder.glob(f"*/{_ENDED}")}
        """Names of the runs that are written as a whole."""

    def start(self, trial: Run) -> None:
        """Begin the trial's run, with its values as the run's config."""
        self.complete.discard(trial.name)
        name = display_name(trial, self._info.baseline)
        config = {**trial.values, **fields.trial_tags(trial, self._info.name)}
        with self._cleared_by_faults():
            run = self._begin(trial.name, name=name, job_type=trial.phase, config=config)
            self._runs[trial.name] = trial, run, set()

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Write the metrics of an evaluation of the run ``name``."""
        if name in self._runs:
            trial, run, steps = self._runs[name]
            if evaluation.step not in steps:
                steps.add(evaluation.step)
                with self._cleared_by_faults():
                    run.log(fields.evaluation_metrics(evaluation, trial), step=evaluation.step)

    def finish(self, trial: Run, result: TrialResult, score: float | None) -> None:
        """Write the run's missing evaluations, its result and a tag that says how it ended, and
        end it.
        """
        if trial.name not in self._runs:
            self.start(trial)
        for evaluation in result.evaluations:
            self.evaluate(trial.name, evaluation)
        with self._cleared_by_faults():
            _, run, _ = self._runs.pop(trial.name)
            run.summary.update(fields.result_metrics(result, score))
            for key, tag in fields.result_tags(result).items():
                run.config[key] = tag
            run.notes = result.error or ""
            is_success = result.outcome.traits.mlflow_status == "FINISHED"
            _end(run, str(result.outcome), is_success=is_success)
            if self._mode != "disabled":
                replace_file(Path(run.settings.sync_dir) / _ENDED, trial.name)
        self.complete.add(trial.name)

    def close(self, end: StudyEnd) -> None:
        """End every open run as interrupted, and write the study's own run: best scores,
        metrics, tags and files.
        """
        tags = {**fields.study_tags(self._info), **end.tags}
        notes = tags.pop("autotune.description", None)
        config = {**self._info.settings, **tags}
        with self._cleared_by_faults():
            for _, run, _ in self._runs.values():
                _end(run, fields.INTERRUPTED, is_success=False)
            run = self._begin(
                "", name=self._info.name, job_type=self._info.kind, config=config, notes=notes
            )
            for best in end.best_scores:
                run.log({"best_score": best.score}, step=best.num_ended)
            run.summary.update({**end.metrics})
            for path in end.artifacts:
                run.save(path / "*" if path.is_dir() else path, base_path=path.parent, policy="end")
            _end(run, end.status, is_success=end.status == "FINISHED")

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
                wandb.teardown()  # the next run starts a new service
            raise

    def _begin(self, run: str, *, config: Mapping[str, Any], **arguments: Any) -> wandb.Run:
        """Begin to write a run, the study's own if its name is empty, as a whole."""
        run_id = hashlib.sha256(f"{self._study_id}/{run}".encode()).hexdigest()[:16]
        for folder in self._folder.glob(f"*run-*-{run_id}*"):
            shutil.rmtree(folder)
        settings = wandb.Settings(
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
        return wandb.init(
            id=run_id,
            group=self._info.name,
            config=fields.plain(config),
            project=self._project,
            mode=self._mode,
            dir=self._folder.parent,
            reinit="create_new",
            settings=settings,
            **arguments,
        )


def _end(run: wandb.Run, tag: str, *, is_success: bool) -> None:
    run.tags = (tag,)
    run.finish(exit_code=0 if is_success else 1)
