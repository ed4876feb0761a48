"""Schedule-free optimizers: the average that is evaluated, by hand."""

from typing import Any

import pytest
import torch
from torch import nn

from autotune.errors import ConfigError
from autotune.training.optimizers.schedule_free import schedule_free_sgd

PLAIN: dict[str, Any] = {
    "weight_decay": 0.0,
    "warmup_fraction": 0.0,
    "bias_lr_scale": 1.0,
    "head_lr_scale": 1.0,
    "decay_biases": False,
    "total_steps": 8,
}


def evaluated_weight(optimizer: Any, weight: torch.Tensor, num_steps: int) -> float:
    for _ in range(num_steps):
        weight.grad = torch.full_like(weight, 0.25)
        optimizer.step()
    optimizer.eval()
    return weight.item()


@pytest.mark.parametrize("batch_size", [128, 256])
@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_sgd_evaluates_the_mean_of_the_points_that_plain_sgd_passes(
    batch_size: int, momentum: float
) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = schedule_free_sgd(model, **PLAIN, batch_size=batch_size, lr=2.0, momentum=momentum)
    passed = [-0.25 * 2.0 * batch_size / 1024 * step for step in range(1, 5)]
    assert evaluated_weight(optimizer, model.weight, 4) == pytest.approx(sum(passed) / 4)


def test_the_warm_up_is_a_fraction_of_the_steps() -> None:
    optimizer = schedule_free_sgd(
        nn.Linear(1, 1),
        **PLAIN | {"warmup_fraction": 0.25, "total_steps": 40},
        batch_size=1,
        lr=1.0,
        momentum=0.9,
    )
    assert {group["warmup_steps"] for group in optimizer.param_groups} == {10}
    with pytest.raises(ConfigError, match=r"^optimizer.warmup_fraction: found 2, must be 0 to 1$"):
        schedule_free_sgd(
            nn.Linear(1, 1), **PLAIN | {"warmup_fraction": 2}, batch_size=1, lr=1.0, momentum=0.9
        )
