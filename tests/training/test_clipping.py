"""Gradients are clipped by their norm: as torch does it, in a training of one process too."""

import pytest
import torch

from autotune.training.parallel.strategy import SharedModel


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
