"""Does pausing help a Lightning program? ``python -m benchmarks.lightning_pausing``.

Studies of a Lightning program in turns, with as many seconds of search each: one whose trainings
can be paused, by the callback's checkpoints, and one whose trainings cannot. What each found, after
its confirmation, is trained again on fresh seeds that both sides share, in turns. The ratio is that
of ``benchmarks.plain_optuna``: above 1 where pausing found the faster configuration.

Exit code 0: the interval of the ratio lies above 1 or holds it; 1: pausing found slower ones.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import autotune
from autotune.config.compose import Composer
from autotune.session import Checkpoint, current, in_session
from benchmarks.measuring import circumstances, write_result
from benchmarks.plain_optuna import REPOSITORY, Study, on_fresh_seeds, ratio

PAUSING, WHOLE = "pausing", "whole_trainings"
_SPACE = {
    "lr": autotune.log(1e-4, 1e-1),
    "width": [8, 16, 32],
    "batch_size": autotune.power_of_two(16, 256),
    "dropout": [0.0, 0.2, 0.4],
}
_TARGET = autotune.target("val_accuracy", at_least=0.985, max_seconds=30)
_BASELINE = {"lr": 3e-3, "width": 16, "batch_size": 64, "dropout": 0.2}


def fit(lr: float, width: int, batch_size: int, dropout: float) -> None:
    """Train a Lightning module that knows nothing of autotune, a small convolutional network on
    scikit-learn's digits.
    """
    import lightning
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset, random_split

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(1, width, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(width, 2 * width, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(2 * width, 2 * width, 3, padding=1),
                nn.ReLU(),
                nn.Flatten(),
                nn.Dropout(dropout),
                nn.Linear(32 * width, 10),
            )

        def training_step(self, batch: Any, index: int) -> Any:
            inputs, targets = batch
            return nn.functional.cross_entropy(self.layers(inputs), targets)

        def validation_step(self, batch: Any, index: int) -> None:
            inputs, targets = batch
            self.log("val_accuracy", (self.layers(inputs).argmax(1) == targets).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=lr)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 25)]

    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    train, validation = random_split(
        TensorDataset(images, torch.tensor(digits.target)),
        [1400, 397],
        torch.Generator().manual_seed(0),
    )
    trainer = lightning.Trainer(
        max_epochs=25,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[autotune.lightning.ReportCallback(monitor="val_accuracy")],
    )
    trainer.fit(Net(), DataLoader(train, batch_size, shuffle=True), DataLoader(validation, 397))


def fit_whole(lr: float, width: int, batch_size: int, dropout: float) -> None:
    """Train as ``fit`` does, with a checkpoint that keeps nothing, so that no training can be
    paused.
    """
    session = current()
    assert session is not None, "a study calls this"
    with in_session(dataclasses.replace(session, checkpoint=Checkpoint())):
        fit(lr, width, batch_size, dropout)


def search(side: str, *, seed: int, seconds: float, folder: str) -> None:
    """Run one study in this process."""
    autotune.tune(
        fit if side == PAUSING else fit_whole,
        space=_SPACE,
        target=_TARGET,
        baseline=_BASELINE,
        time_budget_seconds=seconds,
        name="study",
        folder=folder,
        seed=seed,
        tracking="none",
        quiet=True,
    )


def run_study(side: str, seed: int, seconds: float) -> tuple[Study, dict[str, int]]:
    """Run one study in a process of its own; also count how its trials ended.

    Raises:
        RuntimeError: the process failed.
    """
    with tempfile.TemporaryDirectory(
        prefix="autotune-pausing-", ignore_cleanup_errors=True
    ) as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.lightning_pausing",
            f"--side={side}",
            f"--seed={seed}",
            f"--seconds={seconds}",
        ]
        began = time.monotonic()
        done = subprocess.run(
            [*command, f"--folder={folder}"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        wall_seconds = time.monotonic() - began
        if done.returncode:
            raise RuntimeError(f"{side} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        path = Path(folder) / "study" / "best.json"
        best = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        outcomes = (
            autotune.api.TuneResult("study", Path(folder) / "study")
            .trials_dataframe()["outcome"]
            .value_counts()
            .to_dict()
        )
    found = Study(
        side=side,
        seed=seed,
        wall_seconds=wall_seconds,
        claimed_seconds=None if best is None else best["best"]["expected_seconds"],
        overrides=None if best is None else tuple(best["overrides"]),
    )
    return found, outcomes


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lightning_pausing", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--studies", type=int, default=10, help="pairs of studies (10)")
    parser.add_argument("--seconds", type=float, default=30, help="of search (30)")
    parser.add_argument(
        "--runs", type=int, default=6, help="on fresh seeds, of what a study found (6)"
    )
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        search(
            arguments.side, seed=arguments.seed, seconds=arguments.seconds, folder=arguments.folder
        )
        return 0
    started = circumstances()
    composer = Composer(
        [
            "experiment=mlp",
            "device=cpu",
            (
                "+training={_target_:"
                f" {__name__ if __name__ != '__main__' else 'benchmarks.lightning_pausing'}.fit}}"
            ),
            (
                f"target={{metric: {_TARGET.metric}, value: {_TARGET.value}, mode: max,"
                f" max_train_seconds: {_TARGET.max_train_seconds}}}"
            ),
            "allowed_targets=[benchmarks.lightning_pausing]",
            *(f"+training.{key}={value}" for key, value in _BASELINE.items()),
        ]
    )
    studies: list[Study] = []
    trials: list[dict[str, Any]] = []
    for seed in range(1, arguments.studies + 1):
        sides = (PAUSING, WHOLE) if seed % 2 else (WHOLE, PAUSING)
        found = [run_study(side, seed, arguments.seconds) for side in sides]
        trials += [
            {"seed": seed, "side": side, **outcomes}
            for side, (_, outcomes) in zip(sides, found, strict=True)
        ]
        pair = on_fresh_seeds([study for study, _ in found], composer, arguments.runs)
        studies += pair
        for study, (_, outcomes) in zip(pair, found, strict=True):
            told = "nothing" if study.claimed_seconds is None else f"{study.claimed_seconds:.3g} s"
            print(
                f"seed {seed}: {study.side}: {study.seconds:.3g} s on fresh seeds, told {told},"
                f" {study.wall_seconds:.0f} s of wall clock, {outcomes}",
                flush=True,
            )
        mean, low, high = ratio(studies, PAUSING, WHOLE)
        result = {
            "ratio": mean,
            "low": low,
            "high": high,
            "num_pairs": seed,
            "studies": studies,
            "trials": trials,
        }
        path = write_result(
            "lightning_pausing", started=started, settings=vars(arguments), result=result
        )
    print(
        f"whole trainings / pausing: {mean:.3g} [{low:.3g}, {high:.3g}] (n={arguments.studies}"
        f" pairs of studies)\nwrote {path}"
    )
    return 0 if high >= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
