"""Gradients are clipped by their norm: as torch does it, in a training of one process too."""

from collections.abc import Callable

import pytest
import torch

from autotune.config.schema import TrialConfig
from autotune.training.parallel.strategy import SharedModel
from autotune.training.run import start_training


def with_gradients() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2), torch.nn.Linear(3, 3))
    model[:2](torch.randn(5, 4)).square().sum().backward()  # the last layer has no gradients
    return model


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
def test_gradients_are_those_that_torch_gives(max_norm: float) -> None:
    model, other = with_gradients(), with_gradients()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm)
    shared = SharedModel(model)
    assert shared.gradient_norm() == pytest.approx(norm)
    shared.clip_gradients(max_norm)
    for mine, torchs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, torchs.grad)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clipped_steps_hardly_move_the_loss(precision: str, trial_config: Callable[..., TrialConfig]) -> None:
    found = {}
    for max_grad_norm in ("null", "1e-3"):
        config = trial_config(
            "experiment=cnn", f"precision={precision}", "optimizer.lr=0.3", "optimizer.momentum=0", "optimizer.nesterov=false",
            f"max_grad_norm={max_grad_norm}",
            "epochs=0.5", "evaluate_every_samples=64", "target.value=0.9999",
        )  # fmt: skip
        evaluations = list(start_training(config))
        found[max_grad_norm] = [each.loss for each in evaluations]
    first, last = found["1e-3"][0], found["1e-3"][-1]
    assert last == pytest.approx(first, rel=5e-3)
    assert found["null"][-1] < 0.99 * found["null"][0]
