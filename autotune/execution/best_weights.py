"""The weights of what a study exports: those of the winner's first confirmation run that reached the target.

Workers write them into the study's folder, where their machine has it too; the first of each arm is kept until it is known which
arm is the best, and the best one's for as long as the study.
"""

import contextlib
import os
import shutil
from pathlib import Path

from autotune.measurement import TrialResult
from autotune.outcome import Outcome

BEST_WEIGHTS = "best.safetensors"
_FOLDER = ".weights"


def run_path(study_folder: Path, run: str) -> Path:
    """Where a confirmation run leaves its weights."""
    return study_folder / _FOLDER / f"{run}.safetensors"


def keep_first(study_folder: Path, run: str, result: TrialResult) -> None:
    """Keep the weights that a run left where it is its arm's first to reach the target, and drop them otherwise."""
    left, kept = run_path(study_folder, run), _arm_path(study_folder, result.trial)
    with contextlib.suppress(FileNotFoundError):  # it ended early, or on a machine that has not this folder
        if result.outcome is Outcome.REACHED and not kept.exists():
            left.replace(kept)
        else:
            left.unlink()


def keep_best(study_folder: Path, best_trial: int) -> None:
    """Give the best arm's weights their name, and drop the others'; none are there where no worker could leave them."""
    best, kept = study_folder / BEST_WEIGHTS, _arm_path(study_folder, best_trial)
    best.unlink(missing_ok=True)
    for path in (study_folder / _FOLDER).glob("*.safetensors"):
        if path != kept:
            path.unlink()
    if kept.is_file():
        try:
            os.link(kept, best)
        except OSError:  # a file system without links
            shutil.copyfile(kept, best)


def _arm_path(study_folder: Path, trial: int) -> Path:
    return study_folder / _FOLDER / f"trial-{trial}.safetensors"
