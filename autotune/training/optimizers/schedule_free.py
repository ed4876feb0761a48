"""Schedule-free AdamW and SGD: an average of the weights takes the place of a decaying learning
rate.

These optimizers need no schedule (``lr_schedule=constant``), so the length of the training need not
be known. Gradients are taken at weights between the average and the weights that move: the higher
``beta1`` or ``momentum``, the nearer to the average. The average is what is evaluated: the training
switches to it with ``eval()`` and back with ``train()``. Running statistics of batch norms belong
to the weights at which gradients are taken, not to the average: with few steps that costs accuracy,
which group norm does not.

Settings are those of ``autotune.training.optimizers.decoupled``; the learning rate rises linearly
over ``warmup_fraction`` of the steps.

Source: Defazio et al., "The Road Less Scheduled" (2024), in the authors' package ``schedulefree``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import schedulefree
import torch
from torch import nn

from autotune.errors import check_fractions
from autotune.training.optimizers.decoupled import REFERENCE_SAMPLES, scaled_groups


def schedule_free_adamw(
    model: nn.Module,
    *,
    batch_size: int,
    total_steps: int,
    beta1: float,
    beta2: float,
    foreach: bool = True,
    **settings: Any,
) -> torch.optim.Optimizer:
    """Schedule-free AdamW with a linear warm-up."""
    make = partial(schedulefree.AdamWScheduleFree, betas=(beta1, beta2), foreach=foreach)
    return _made(make, model, batch_size, total_steps, **settings)


def schedule_free_sgd(
    model: nn.Module,
    *,
    batch_size: int,
    total_steps: int,
    momentum: float,
    foreach: bool = True,
    **settings: Any,
) -> torch.optim.Optimizer:
    """Schedule-free SGD with a linear warm-up."""
    make = partial(schedulefree.SGDScheduleFree, momentum=momentum, foreach=foreach)
    return _made(make, model, batch_size, total_steps, **settings)


def _made(
    make: Callable[..., torch.optim.Optimizer],
    model: nn.Module,
    batch_size: int,
    total_steps: int,
    *,
    lr: float,
    weight_decay: float,
    warmup_fraction: float,
    **scales: Any,
) -> torch.optim.Optimizer:
    check_fractions("optimizer", warmup_fraction=warmup_fraction)
    groups = scaled_groups(model, batch_size / REFERENCE_SAMPLES, lr, weight_decay, **scales)
    optimizer = make(groups, warmup_steps=round(warmup_fraction * total_steps))
    optimizer.train()  # type: ignore[attr-defined]  # it starts in evaluation mode
    return optimizer
