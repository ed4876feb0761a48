"""Ranks train one model, and score and keep one: what each of them holds, asked of all of them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autotune.config.compose import Composer
from autotune.measurement import PhaseClock
from autotune.training.set_up import set_up
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow

SHORT = (
    "experiment=cnn",
    "device=cpu",
    "runtime.num_threads=1",
    "batch_size=32",
    "epochs=0.5",
    "parallelism.num_workers=2",
)
NUM_STEPS = 18
Numbers = Mapping[str, Any]
"""Of tensors, by name, as lists."""


def numbers(model: nn.Module) -> Numbers:
    state = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }
    return {name: value.flatten().tolist() for name, value in state.items()}


def scored(overrides: list[str], ranks: Any) -> Numbers:
    """The model that all ranks score after a training's last step."""
    run, step = set_up(
        Composer(overrides).compose().trial, torch.device("cpu"), PhaseClock(), 1, ranks
    )
    assert run.total_steps == NUM_STEPS
    for index, batch in enumerate(run.batches(0)):
        step(batch, index)
    run.ranks.share_buffers(step.parts.evaluated_model)
    return numbers(step.parts.evaluated_model)


@pytest.mark.parametrize(
    "settings",
    [
        ["parallelism=ddp"],
        ["parallelism=ddp", "averaging=ema"],
        ["parallelism=ddp", "averaging=ema", "precision=pure_bf16"],
        ["parallelism=fsdp"],
    ],
)
def test_all_ranks_score_one_model(ranks: Ranks, settings: list[str]) -> None:
    first, second = ranks.call(
        2, scored, [*settings[:1], *SHORT, "model.norm=batch", *settings[1:]]
    )
    assert isinstance(first, dict), first
    assert any("running_mean" in name for name in first)
    assert first == second
