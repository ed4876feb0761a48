"""Ranks train one model, and score and keep one: what each of them holds, asked of all of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autotune.config.compose import Composer
from autotune.measurement import PhaseClock
from autotune.training.loop import train
from autotune.training.set_up import set_up
from autotune.training.step import TrainingStep
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


def stepped(
    overrides: list[str], ranks: Any, evaluate_after: tuple[int, ...] = ()
) -> tuple[TrainingStep, Numbers]:
    """A training's step after its last one, and the model that all ranks score then."""
    run, step = set_up(
        Composer(overrides).compose().trial, torch.device("cpu"), PhaseClock(), 1, ranks
    )
    assert run.total_steps == NUM_STEPS
    for place, batch in enumerate(run.batches(0)):
        step(batch, place)
        if place + 1 in evaluate_after:
            run.evaluate(step.parts, run.validation)
    with step.parts.shared.scoring(step.parts.evaluated_model):
        return step, numbers(step.parts.evaluated_model)


def scored(overrides: list[str], ranks: Any) -> Numbers:
    return stepped(overrides, ranks)[1]


def own(overrides: list[str], ranks: Any, evaluate_after: tuple[int, ...] = ()) -> Numbers:
    """What this rank trains, by itself."""
    return numbers(stepped(overrides, ranks, evaluate_after)[0].parts.model)


def parameters(state: Numbers) -> Numbers:
    return {
        name: value
        for name, value in state.items()
        if "running" not in name and "num_batches" not in name
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a short training."""
    path = tmp_path_factory.mktemp("source") / "weights.safetensors"
    overrides = ["experiment=cnn", "device=cpu", "epochs=0.1", "model.norm=none"]
    list(train(Composer(overrides).compose().trial, weights_path=path))
    return path


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["parallelism.static_graph=true", "parallelism.gradient_as_bucket_view=true"],
        ["parallelism.compression=powersgd"],
        ["runtime.micro_batch_size=4"],
    ],
)
def test_layers_that_are_unfrozen_on_the_way_are_exchanged(
    ranks: Ranks, source: Path, settings: list[str]
) -> None:
    transfer = ["technique=transfer", f"technique.checkpoint={source}", "technique.unfreeze_at=0.4"]
    first, second = ranks.call(
        2, own, [*SHORT, "parallelism=ddp", "model.norm=none", *transfer, *settings]
    )
    assert isinstance(first, dict), first
    taken = numbers_of(source)
    assert all(first[name] != taken[name] for name in parameters(first)), (
        "all layers have been trained"
    )
    assert parameters(first) == parameters(second)


def numbers_of(path: Path) -> Numbers:
    from safetensors.torch import load_file

    return {name: value.flatten().tolist() for name, value in load_file(path).items()}


@pytest.mark.parametrize(
    "settings",
    [
        ["parallelism=ddp"],
        ["parallelism=ddp", "averaging=ema"],
        ["parallelism=ddp", "averaging=ema", "precision=pure_bf16"],
        ["parallelism=ddp", "parallelism.local_steps=4"],
        ["parallelism=ddp", "parallelism.local_steps=4", "averaging=ema"],
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
