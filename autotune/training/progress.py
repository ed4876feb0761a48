"""The progress of a training, and saving its state so that another process can resume it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.config.schema import first_difference
from autotune.errors import DataError
from autotune.measurement import Evaluation, Phase, PhaseClock
from autotune.training.checkpoint import (
    STATE_FILE,
    random_state,
    read_state,
    save_state,
    save_weights,
    set_random_state,
    weights_metadata,
)
from autotune.training.components import Components
from autotune.training.device import versions
from autotune.training.set_up import Run


@dataclass(kw_only=True)
class Progress:
    """How far a training has come."""

    step: int = 0
    last: Evaluation | None = None

    @property
    def evaluation(self) -> Evaluation:
        """The last evaluation."""
        assert self.last is not None, "not yet evaluated"
        return self.last

    @property
    def has_ended(self) -> bool:
        """Whether the last evaluation ended the training, because it has an outcome."""
        return self.last is not None and self.last.outcome is not None

    @property
    def evaluated_samples(self) -> int:
        """Number of training samples seen at the last evaluation."""
        return self.last.samples if self.last else 0

    def is_due(self, samples: int, every: int) -> bool:
        """Whether an evaluation is due, at the first step at or past each multiple of ``every`` samples."""
        return samples // every > self.evaluated_samples // every


def is_kept(folder: Path) -> bool:
    """Whether a folder holds a saved training state."""
    return (folder / STATE_FILE).is_file()


def keep(folder: Path, run: Run, parts: Components, progress: Progress) -> None:
    """Save the state that the training needs to be resumed, in place of the folder's earlier state."""
    save_state(
        folder,
        {
            "config": run.config.as_dict(),
            "step": progress.step,
            "evaluation": progress.evaluation.as_dict(),
            "random": random_state(run.device),
            "parts": {name: part.state_dict() for name, part in _parts_with_state(parts).items()},
        },
    )


def resume(folder: Path, run: Run, parts: Components, clock: PhaseClock) -> Progress:
    """Resume from a saved state: restore the parts' state, and add the seconds and joules spent so far to the clock.

    Raises:
        DataError: the state is damaged or belongs to another configuration.
    """
    state, config = read_state(folder), run.config.as_dict()
    saved = {key: value for key, value in state["config"].items() if key in config}
    different = [
        key for key, value in config.items() if first_difference({key: saved[key]} if key in saved else {}, {key: value}) is not None
    ]
    if different:
        raise DataError(
            f"checkpoint.folder: {folder} holds a training with another {', '.join(different)}; accepted is an empty folder, or its own"
        )
    for name, part in _parts_with_state(parts).items():
        part.load_state_dict(state["parts"][name])
    set_random_state(state["random"], run.device)
    evaluation = Evaluation.from_dict(state["evaluation"])
    for phase, seconds, joules in (
        (Phase.BUILD, evaluation.build_seconds, evaluation.build_joules),
        (Phase.PREPARE, evaluation.prepare_seconds, 0.0),
        (Phase.TRAIN, evaluation.train_seconds, evaluation.energy_joules),  # includes the joules of prepare
        (Phase.EVALUATE, evaluation.evaluate_seconds, 0.0),
    ):
        clock.add(phase, seconds, joules)
    return Progress(step=state["step"], last=evaluation)


def keep_weights(path: Path, run: Run, parts: Components, evaluation: Evaluation, origin: Mapping[str, Any]) -> None:
    """Write the scored weights, and the metadata to make their model again; every rank must call this, the first rank writes."""
    weights = parts.shared.state_dict(parts.evaluated_model)
    if not run.ranks.is_first:
        return
    metadata = weights_metadata(
        run.config,
        input_shape=run.data.input_shape,
        num_classes=run.data.num_classes,
        evaluation=evaluation,
        versions=versions(),
        origin=origin,
    )
    save_weights(path, weights, metadata)


def _parts_with_state(parts: Components) -> dict[str, Any]:
    """The components whose state training changes, by name."""
    named = {name: getattr(parts, name) for name in ("model", "optimizer", "schedule", "average", "technique", "scaler")}
    return {name: part for name, part in named.items() if hasattr(part, "state_dict")}
