"""Writes a study as TensorBoard files: one run for each trial or confirmation run, with a learning
curve and a row in the HPARAMS tab.

``tensorboard --logdir outputs`` shows all studies of the folder. The files lie in ``tensorboard/``
in the study's own folder.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, TrialResult
from autotune.tracking import mlflow_fields as fields
from autotune.tracking.tracker import StudyEnd, StudyInfo, TrackedTrial

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

_SCALARS = ("metric", "loss", "train_seconds", "samples_per_second")
"""Fields of an evaluation that are written as scalars, by step."""


class TensorBoardTracker:
    """Tracker that writes a study for TensorBoard.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, info: StudyInfo) -> None:
        try:
            import tensorboardX  # noqa: F401, PLC0415  # an extra of the package
        except ImportError as error:
            raise ConfigError(
                "tracking=tensorboard: needs tensorboardX; pip install 'autotune[tensorboard]'"
            ) from error
        self._folder = Path(info.folder) / "tensorboard"
        self._writers: dict[str, SummaryWriter] = {}
        self._steps: dict[str, set[int]] = {}
        """Steps whose evaluations are written, by name of the run."""
        self.complete = {path.name for path in self._folder.glob("*")}
        """Names of the runs that have files."""

    def start(self, trial: TrackedTrial) -> None:
        """Open the run's file and write its overrides as text."""
        self.complete.discard(trial.name)
        self._writer(trial.name).add_text(
            "overrides", "  \n".join(trial.overrides) or "as the experiment states it"
        )

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Write the scalars of an evaluation of the run ``name``."""
        writer = self._writer(name)
        self._steps[name].add(evaluation.step)
        for key, value, _, step in fields.evaluation_points(evaluation, at=0.0):
            if key in _SCALARS or key not in fields.EVALUATION_METRICS:
                # tensorboardX would replace spaces, so that two names could become one
                writer.add_scalar(fields.hashed_key(key) if " " in key else key, value, step)

    def finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        """Write the run's missing evaluations and its row in the HPARAMS tab, and close its
        file.
        """
        if trial.name not in self._writers:
            self.start(trial)
        for evaluation in result.evaluations:
            if evaluation.step not in self._steps[trial.name]:
                self.evaluate(trial.name, evaluation)
        # an extra of the package, imported when the first run ends
        from tensorboardX.summary import hparams  # noqa: PLC0415

        writer = self._writers.pop(trial.name)
        values = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in trial.values.items()
        }
        scores = {"score": score, "time_to_target_seconds": result.time_to_target_seconds}
        known: dict[str, Any] = {
            f"result/{key}": value for key, value in scores.items() if value is not None
        }
        for summary in hparams(
            {**values, "phase": trial.phase, "outcome": str(result.outcome)}, known
        ):
            writer.file_writer.add_summary(summary)
        for key, value in known.items():
            writer.add_scalar(key, value)
        writer.close()
        self.complete.add(trial.name)

    def close(self, end: StudyEnd) -> None:
        """Close every open file, and write the study's metrics, status and tags as a run of its
        own, named ``study``.
        """
        for writer in self._writers.values():
            writer.close()
        writer = self._writer("study")
        for key, value in end.metrics.items():
            writer.add_scalar(key, value)
        writer.add_text(
            "study",
            "  \n".join(
                f"{key}: {value}" for key, value in {"status": end.status, **end.tags}.items()
            ),
        )
        writer.close()

    def _writer(self, name: str) -> "SummaryWriter":
        from tensorboardX import SummaryWriter  # noqa: PLC0415  # an extra of the package

        if name not in self._writers:
            self._writers[name] = SummaryWriter(str(self._folder / name))
            self._steps[name] = set()
        return self._writers[name]
