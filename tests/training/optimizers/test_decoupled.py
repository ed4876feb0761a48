"""How far weights go, and how much of them decays, while so many samples are seen."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autotune.errors import ConfigError
from autotune.training.optimizers.decoupled import REFERENCE_SAMPLES, adamw, sgd

PLAIN: dict[str, Any] = {
    "weight_decay": 0.0,
    "bias_lr_scale": 1.0,
    "head_lr_scale": 1.0,
    "decay_biases": False,
}


class Weight(nn.Module):
    """One matrix, which is thereby no bias."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((1, 1), value, dtype=torch.float64))


def train(
    make: Callable[..., torch.optim.Optimizer],
    gradient: Callable[[torch.Tensor], torch.Tensor],
    start: float,
    samples: int,
    **settings: Any,
) -> float:
    """The weight after so many samples, and after all momentum has come to rest."""
    model = Weight(start)
    optimizer = make(model, **PLAIN | settings)
    for _ in range(samples // settings["batch_size"]):
        model.value.grad = gradient(model.value.detach())
        optimizer.step()
    if make is sgd:
        for _ in range(400):
            model.value.grad = torch.zeros_like(model.value)
            optimizer.param_groups[0]["weight_decay"] = 0.0
            optimizer.step()
    return model.value.item()


@pytest.mark.parametrize(("batch_size", "momentum"), [(16, 0.0), (64, 0.5), (512, 0.95)])
@pytest.mark.parametrize(
    ("make", "key", "settings", "step"),
    [(sgd, "momentum", {}, 0.25), (adamw, "beta1", {"beta2": 0.99}, 1.0)],
)
def test_a_weight_goes_as_far_along_a_constant_gradient_whatever_batch_size_and_momentum(
    make: Any, key: str, settings: dict[str, float], step: float, batch_size: int, momentum: float
) -> None:
    end = train(
        make,
        lambda weight: torch.full_like(weight, 0.25),
        3.0,
        4 * REFERENCE_SAMPLES,
        lr=2.0,
        batch_size=batch_size,
        **{key: momentum},
        **settings,
    )
    assert end == pytest.approx(3.0 - 4 * 2.0 * step)


@pytest.mark.parametrize("batch_size", [16, 64])
@pytest.mark.parametrize("lr", [0.01, 1.0])
@pytest.mark.parametrize(
    ("make", "settings"),
    [(sgd, {"momentum": 0.0}), (sgd, {"momentum": 0.9}), (adamw, {"beta1": 0.9, "beta2": 0.99})],
)
def test_as_much_of_a_weight_decays_whatever_the_rate(
    make: Any, settings: dict[str, float], lr: float, batch_size: int
) -> None:
    end = train(
        make,
        torch.zeros_like,
        3.0,
        4 * REFERENCE_SAMPLES,
        lr=lr,
        weight_decay=0.05,
        batch_size=batch_size,
        **settings,
    )
    assert end == pytest.approx(3.0 * math.exp(-4 * 0.05), rel=0.005)


def test_momentum_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.momentum: found 1.0, must be 0 to below"):
        sgd(Weight(1.0), **PLAIN, lr=1.0, batch_size=64, momentum=1.0)
