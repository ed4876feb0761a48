"""Muon's updates against torch's on the same matrices, and several optimizers as one."""

from typing import Any

import pytest
import torch
from torch import nn

from autotune.errors import ConfigError
from autotune.training.optimizers.muon import Muon, muon_adamw

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MUON: dict[str, Any] = {
    "lr": 0.1,
    "weight_decay": 0.2,
    "momentum": 0.6,
    "ns_steps": 5,
    "ns_coefficients": COEFFICIENTS,
}
WITH_ADAMW: dict[str, Any] = {
    "batch_size": 64,
    "lr": 0.3,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "ns_steps": 5,
    "ns_coefficients": COEFFICIENTS,
    "rescale_filters": False,
    "adamw_lr": 0.05,
    "beta1": 0.9,
    "beta2": 0.99,
    "bias_lr_scale": 2.0,
    "head_lr_scale": 1.0,
    "decay_biases": False,
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def as_matrix(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    return (tensor.permute(0, 2, 3, 1) if memory_format == torch.channels_last else tensor).flatten(
        1
    )


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_filters_learn_as_the_matrices_they_are_with_torchs_muon(
    memory_format: torch.memory_format,
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 2))
    model.to(memory_format=memory_format)  # type: ignore[call-overload]
    filters = model[0].weight
    matrix = nn.Parameter(as_matrix(filters.detach(), memory_format).clone())
    usual = nn.Parameter(filters.detach().flatten(1).clone())
    others = torch.optim.SGD(model[1].parameters())
    optimizers = [
        Muon(model, others, 1024, rescale_filters=False, **MUON),
        *(
            torch.optim.Muon([each], nesterov=True, **MUON | {"weight_decay": 0.2 / 0.1})
            for each in (matrix, usual)
        ),
    ]
    for _ in range(4):
        gradient = torch.randn(8, 3, 3, 3).to(memory_format=memory_format)
        filters.grad, matrix.grad, usual.grad = (
            gradient,
            as_matrix(gradient, memory_format).clone(),
            gradient.flatten(1).clone(),
        )
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(as_matrix(filters, memory_format), matrix)
    assert torch.allclose(filters.flatten(1), usual, atol=0.01), (
        "the order of columns changes no more than bfloat16's rounding"
    )
    assert filters.is_contiguous(memory_format=memory_format)


def test_a_model_without_filters_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^optimizer: muon needs a model with matrices or filters"
    ):
        muon_adamw(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), **WITH_ADAMW)
