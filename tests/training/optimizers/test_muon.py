"""Muon's updates against torch's on the same matrices, and several optimizers as one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune.errors import ConfigError
from autotune.training.optimizers.muon import Muon, muon_adamw, muon_sgd
from autotune.training.schedules import linear
from autotune.workloads.cnn import SimpleCNN

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MUON: dict[str, Any] = {
    "momentum": 0.6,
    "ns_steps": 5,
    "ns_coefficients": COEFFICIENTS,
    "nesterov": True,
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
WITH_SGD: dict[str, Any] = {
    "batch_size": 64,
    "lr": 0.3,
    "momentum": 0.6,
    "weight_decay": 0.0,
    "ns_steps": 3,
    "ns_coefficients": COEFFICIENTS,
    "rescale_filters": True,
    "bias_lr": 8.0,
    "head_lr": 4.0,
    "whitening_bias_lr": 16.0,
    "whitening_bias_fraction": 0.3,
    "sgd_momentum": 0.85,
    "sgd_weight_decay": 0.01,
    "decay_biases": True,
}
MakeJoined = Callable[[nn.Module], Muon]
BOTH: list[MakeJoined] = [
    lambda model: muon_adamw(model, **WITH_ADAMW),
    lambda model: muon_sgd(model, **WITH_SGD),
]


class WhitenedCNN(SimpleCNN):
    """A net whose first layer's filters are frozen."""

    def __init__(self) -> None:
        super().__init__(input_shape=[1, 8, 8], num_classes=4, widths=[4, 8], norm="none")
        self.features[0].weight.requires_grad_(False)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        named = dict(self.named_parameters())
        biases = [
            each
            for name, each in named.items()
            if name.endswith("bias") and name != "features.0.bias"
        ]
        return {
            "filters": [named["features.3.weight"]],
            "biases": biases,
            "head": [named["classifier.weight"]],
            "whitening_bias": [named["features.0.bias"]],
        }


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    first: int = 0,
    reduction: str = "mean",
) -> None:
    for step in range(first, first + num_steps):
        random_numbers = torch.Generator().manual_seed(step)
        images, targets = (
            torch.randn(16, 1, 8, 8, generator=random_numbers),
            torch.randint(4, (16,), generator=random_numbers),
        )
        optimizer.zero_grad(set_to_none=True)
        # missing in torch's stubs
        functional.cross_entropy(model(images), targets, reduction=reduction).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def as_matrix(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    return (tensor.permute(0, 2, 3, 1) if memory_format == torch.channels_last else tensor).flatten(
        1
    )


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_filters_learn_as_the_matrices_they_are_with_torchs_muon(
    memory_format: torch.memory_format,
) -> None:
    filters = nn.Parameter(torch.randn(8, 3, 3, 3).to(memory_format=memory_format))
    matrix = nn.Parameter(as_matrix(filters.detach(), memory_format).clone())
    usual = nn.Parameter(filters.detach().flatten(1).clone())
    settings = {"lr": 0.1, "weight_decay": 0.2}
    optimizers = [
        Muon({"params": [filters], **settings}, None, rescale=False, **MUON),
        *(torch.optim.Muon([each], **settings, **MUON) for each in (matrix, usual)),
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


@pytest.mark.parametrize("make", BOTH)
def test_a_schedule_drives_every_group(make: MakeJoined) -> None:
    model = WhitenedCNN()
    optimizer = make(model)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert set(rates) == {"filters", "head", "biases", "whitening_bias"}
    scheduler = linear(optimizer, 4, warmup_fraction=0.0, floor_fraction=0.0)
    train(model, optimizer, 1)
    scheduler.step()
    for group in optimizer.param_groups:
        ended = group.get("schedule_fraction", 1.0) < 0.5
        assert group["lr"] == pytest.approx(0.0 if ended else 0.75 * rates[group["name"]])
    for _ in range(3):
        scheduler.step()
    before = copy.deepcopy(model.state_dict())
    optimizer.param_groups[0]["weight_decay"] = 0.0
    train(model, optimizer, 1)
    changed = {
        name for name, each in model.state_dict().items() if not torch.equal(each, before[name])
    }
    assert changed <= {"features.3.weight"}, "at rates of 0 only rescaling changes anything"


def test_a_model_without_filters_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^optimizer: muon needs a model with matrices or filters"
    ):
        muon_adamw(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), **WITH_ADAMW)
