"""Writes a study as TensorBoard files: one run for each trial or confirmation run, with a learning
curve and a row in the HPARAMS tab.

``tensorboard --logdir outputs`` shows all studies of the folder. The files lie in ``tensorboard/``
in the study's own folder.
"""

import shlex
from pathlib import Path

from autotune.errors import ConfigError

try:
    from tensorboardX import SummaryWriter
    from tensorboardX.summary import hparams
except ImportError as missing:
    raise ConfigError(
        "tracking=tensorboard: needs tensorboardX; pip install 'autotune[tensorboard]'"
    ) from missing

from autotune.measurement import Evaluation, TrialResult
from autotune.policy import Run
from autotune.tracking import fields
from autotune.tracking.tracker import StudyEnd, StudyInfo

_SCALARS = ("metric", "loss", "train_seconds", "samples_per_second")
"""Fields of an evaluation that are written as scalars, by step, besides reported metrics."""


class TensorBoardTracker:
    """Tracker that writes a study for TensorBoard."""

    def __init__(self, info: StudyInfo) -> None:
        self._folder = Path(info.folder) / "tensorboard"
        self.browse = f"tensorboard --logdir {shlex.quote(str(Path(info.folder).parent))}"
        self._runs: dict[str, tuple[Run, SummaryWriter, set[int]]] = {}
        """Open runs, with the steps whose evaluations are written, by name."""
        self.complete = {path.name for path in self._folder.glob("*")}
        """Names of the runs that have files."""

    def start(self, trial: Run) -> None:
        """Open the run's file and write its overrides as text."""
        self.complete.discard(trial.name)
        writer = SummaryWriter(str(self._folder / trial.name))
        writer.add_text("overrides", "  \n".join(trial.overrides) or "as the experiment states it")
        self._runs[trial.name] = trial, writer, set()

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Write the scalars of an evaluation of the run ``name``."""
        trial, writer, steps = self._runs[name]
        if evaluation.step in steps:
            return
        steps.add(evaluation.step)
        for key, value in fields.evaluation_metrics(evaluation, trial).items():
            if key in _SCALARS or key not in fields.EVALUATION_METRICS:
                # tensorboardX would replace spaces, so that two names could become one
                shown = fields.hashed_key(key) if " " in key else key
                writer.add_scalar(shown, value, evaluation.step)

    def finish(self, trial: Run, result: TrialResult, score: float | None) -> None:
        """Write the run's missing evaluations and its row in the HPARAMS tab, and close its
        file.
        """
        if trial.name not in self._runs:
            self.start(trial)
        for evaluation in result.evaluations:
            self.evaluate(trial.name, evaluation)
        _, writer, _ = self._runs.pop(trial.name)
        values = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in trial.values.items()
        }
        scores = {"score": score, "time_to_target_seconds": result.time_to_target_seconds}
        known = {f"result/{key}": value for key, value in scores.items() if value is not None}
        row = {**values, "phase": trial.phase, "outcome": str(result.outcome)}
        for summary in hparams(row, known):
            writer.file_writer.add_summary(summary)
        for key, value in known.items():
            writer.add_scalar(key, value)
        writer.close()
        self.complete.add(trial.name)

    def close(self, end: StudyEnd) -> None:
        """Close every open file, and write the study's metrics, status and tags as a run of its
        own, named ``study``.
        """
        for _, writer, _ in self._runs.values():
            writer.close()
        with SummaryWriter(str(self._folder / "study")) as writer:
            for key, value in end.metrics.items():
                writer.add_scalar(key, value)
            tags = {"status": end.status, **end.tags}
            writer.add_text("study", "  \n".join(f"{key}: {tag}" for key, tag in tags.items()))
