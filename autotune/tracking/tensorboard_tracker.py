"""A study in TensorBoard's files: one run a trial or confirmation run, with its learning curve and its row in the HPARAMS tab.

``tensorboard --logdir outputs`` shows all studies of the folder. The files lie in ``tensorboard/`` in the study's own folder, so a store
that fails, which the MLflow tracker has to outlive, is a full disk here.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError
from autotune.measurement import Evaluation, TrialResult
from autotune.tracking.tracker import FinishedRun, StudyInfo, TrackedTrial

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

LOGGER = logging.getLogger("autotune.tracking")
_SCALARS = ("metric", "loss", "train_seconds", "samples_per_second")
"""Numbers of an evaluation that are kept, over its step."""


class TensorBoardTracker:
    """Writes a study for TensorBoard.

    Args:
        info: of the study.
        finished: runs of this study that ended before it was resumed; those without files get them.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, info: StudyInfo, *, finished: Sequence[FinishedRun] = ()) -> None:
        try:
            import tensorboardX  # noqa: F401, PLC0415  # an extra of the package
        except ImportError as error:
            raise ConfigError("tracking=tensorboard: needs tensorboardX; pip install 'autotune[tensorboard]'") from error
        self._folder = Path(info.folder) / "tensorboard"
        self._writers: dict[str, SummaryWriter] = {}
        self._steps: dict[str, set[int]] = {}
        """Steps whose evaluations are written, by run."""
        for trial, result, score in finished:
            if not (self._folder / trial.name).is_dir():
                self.finish(trial, result, score)

    def start(self, trial: TrackedTrial) -> None:
        """Open the run's file, with what is trained as its text."""
        self._writer(trial.name).add_text("overrides", "  \n".join(trial.overrides) or "as the experiment states it")

    def evaluate(self, name: str, evaluation: Evaluation) -> None:
        """Write an evaluation's numbers."""
        writer = self._writer(name)
        self._steps[name].add(evaluation.step)
        for scalar in _SCALARS:
            value = getattr(evaluation, scalar)
            if math.isfinite(value):
                writer.add_scalar(scalar, value, evaluation.step)

    def finish(self, trial: TrackedTrial, result: TrialResult, score: float | None) -> None:
        """Write what is missing of the run and its row in the HPARAMS tab, and close its file."""
        if trial.name not in self._writers:
            self.start(trial)
        for evaluation in result.evaluations:
            if evaluation.step not in self._steps[trial.name]:
                self.evaluate(trial.name, evaluation)
        from tensorboardX.summary import hparams  # noqa: PLC0415  # with the first run

        writer = self._writers.pop(trial.name)
        values = {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in trial.values.items()}
        numbers = {"score": score, "time_to_target_seconds": result.time_to_target_seconds}
        known: dict[str, Any] = {f"result/{key}": value for key, value in numbers.items() if value is not None}
        for summary in hparams({**values, "phase": trial.phase, "outcome": str(result.outcome)}, known):
            writer.file_writer.add_summary(summary)
        for key, value in known.items():
            writer.add_scalar(key, value)
        writer.close()

    def close(self, *, status: str, metrics: Mapping[str, float], tags: Mapping[str, str], artifacts: Sequence[Path]) -> None:
        """Close every file, and write what the study came to as a run of its own."""
        for writer in self._writers.values():
            writer.close()
        writer = self._writer("study")
        for key, value in metrics.items():
            writer.add_scalar(key, value)
        writer.add_text("study", "  \n".join(f"{key}: {value}" for key, value in {"status": status, **tags}.items()))
        writer.close()

    def _writer(self, name: str) -> "SummaryWriter":
        from tensorboardX import SummaryWriter  # noqa: PLC0415  # as above

        if name not in self._writers:
            self._writers[name] = SummaryWriter(str(self._folder / name))
            self._steps[name] = set()
        return self._writers[name]
