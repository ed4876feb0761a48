"""Every optimizer of conf/ trains digits in two passes, with the rates that stand in its file."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from autotune.config.schema import TrialConfig
from autotune.measurement import Target
from autotune.training.loop import train

FILES = sorted((Path(__file__).parent.parent.parent.parent / "conf" / "optimizer").glob("*.yaml"))
OF_A_LARGE_MODEL = {"muon_sgd": {"lr": 3.0, "bias_lr": 8.0, "head_lr": 8.0}}


@pytest.mark.parametrize("file", FILES, ids=[each.stem for each in FILES])
def test_every_optimizer_learns(file: Path, trial_config: Callable[..., TrialConfig]) -> None:
    config = trial_config(
        *("epochs=2", "evaluate_every_samples=2874", "model.norm=batch", "model.widths=[8]"),
        optimizer={**OmegaConf.load(file), **OF_A_LARGE_MODEL.get(file.stem, {})},
        target=Target(metric="accuracy", value=2.0, mode="max", max_train_seconds=100),
    )
    assert [*train(config)][-1].metric > 0.5
