"""The weights that a study exports: those of the best arm's first confirmation run that reached the
target.

Workers write weights into the study's folder if their machine has that folder. The first weights of
each arm are kept until the best arm is known; the best arm's weights are kept as long as the study.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autotune.files import replacing
from autotune.measurement import TrialResult
from autotune.outcome import Outcome

BEST_WEIGHTS = "best.safetensors"
_FOLDER = ".weights"


def run_path(study_folder: Path, run: str) -> Path:
    """File that a confirmation run leaves its weights in."""
    return study_folder / _FOLDER / f"{run}.safetensors"


def keep_first(
    study_folder: Path, run: str, result: TrialResult, *, earlier: Iterable[TrialResult]
) -> None:
    """Keep the weights of a run if it is the first of its arm, by round, to reach the target.

    Delete them otherwise.

    Args:
        earlier: the arm's results of earlier rounds. Runs of later rounds may have ended first,
            beside this one.
    """
    run_weights, kept = run_path(study_folder, run), _arm_path(study_folder, result.trial)
    # the run ended early, or on a machine without this folder
    with contextlib.suppress(FileNotFoundError):
        is_first = all(other.outcome is not Outcome.REACHED for other in earlier)
        if result.outcome is Outcome.REACHED and (is_first or not kept.exists()):
            run_weights.replace(kept)
        else:
            run_weights.unlink()


def keep_best(study_folder: Path, best_trial: int) -> None:
    """Name the best arm's weights ``best.safetensors``, if a worker could write them, and delete
    those of all other arms.
    """
    best, kept = study_folder / BEST_WEIGHTS, _arm_path(study_folder, best_trial)
    best.unlink(missing_ok=True)
    for path in (study_folder / _FOLDER).glob("*.safetensors"):
        if path != kept:
            path.unlink()
    if kept.is_file():
        try:
            os.link(kept, best)
        except OSError:  # the file system has no hard links
            with replacing(best) as part:
                shutil.copyfile(kept, part)


def best_model(study_folder: Path, allowed_targets: tuple[str, ...]) -> tuple[Any, Any]:
    """The exported weights in their model, as ``autotune.training.trained_model.scored_model``
    makes it.

    Raises:
        ConfigError: the model cannot be made.
        DataError: there are no weights, or they are those of a training function of the user's own.
    """
    # imports torch, which only the tracker that keeps models needs
    from autotune.training.trained_model import scored_model  # noqa: PLC0415

    return scored_model(study_folder / BEST_WEIGHTS, allowed_targets)


def _arm_path(study_folder: Path, trial: int) -> Path:
    return study_folder / _FOLDER / f"trial-{trial}.safetensors"
