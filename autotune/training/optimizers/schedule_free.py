"""Schedule-free AdamW and SGD: an average of the weights takes the place of a decaying learning
rate.

These optimizers need no schedule (``lr_schedule=constant``), so the length of the training need not
be known. Gradients are taken at weights between the average and the weights that move. The average
is what is evaluated: the training switches to it with ``eval()`` and back with ``train()``. Running
statistics of batch norms belong to the weights at which gradients are taken, not to the average:
with few steps that costs accuracy, which group norm does not.

Learning rates and weight decays are stated for 1,024 samples, as in
``autotune.training.optimizers.decoupled``.

Source: Defazio et al., "The Road Less Scheduled" (2024), in the authors' package ``schedulefree``.
"""

import schedulefree
import torch
from torch import nn

from autotune.errors import check_fractions
from autotune.training.optimizers.groups import REFERENCE_SAMPLES, scaled_groups


def schedule_free_adamw(
    model: nn.Module,
    *,
    batch_size: int,
    total_steps: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    warmup_fraction: float,
    bias_lr_scale: float,
    head_lr_scale: float,
    decay_biases: bool,
    foreach: bool | None = None,
) -> torch.optim.Optimizer:
    """Schedule-free AdamW with a linear warm-up.

    The higher ``beta1``, the nearer to the average gradients are taken.
    """
    step_share = batch_size / REFERENCE_SAMPLES
    groups = scaled_groups(
        model,
        step_share,
        lr,
        weight_decay,
        bias_lr_scale=bias_lr_scale,
        head_lr_scale=head_lr_scale,
        decay_biases=decay_biases,
    )
    optimizer = schedulefree.AdamWScheduleFree(
        groups,
        betas=(beta1, beta2),
        warmup_steps=_warmup_steps(warmup_fraction, total_steps),
        foreach=foreach is not False,
    )
    return _in_training(optimizer)


def schedule_free_sgd(
    model: nn.Module,
    *,
    batch_size: int,
    total_steps: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    warmup_fraction: float,
    bias_lr_scale: float,
    head_lr_scale: float,
    decay_biases: bool,
    foreach: bool | None = None,
) -> torch.optim.Optimizer:
    """Schedule-free SGD with a linear warm-up.

    The higher ``momentum``, the nearer to the average gradients are taken.
    """
    step_share = batch_size / REFERENCE_SAMPLES
    groups = scaled_groups(
        model,
        step_share,
        lr,
        weight_decay,
        bias_lr_scale=bias_lr_scale,
        head_lr_scale=head_lr_scale,
        decay_biases=decay_biases,
    )
    optimizer = schedulefree.SGDScheduleFree(
        groups,
        momentum=momentum,
        warmup_steps=_warmup_steps(warmup_fraction, total_steps),
        foreach=foreach is not False,
    )
    return _in_training(optimizer)


def _warmup_steps(warmup_fraction: float, total_steps: int) -> int:
    check_fractions("optimizer", warmup_fraction=warmup_fraction)
    return round(warmup_fraction * total_steps)


def _in_training(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, switched to training: schedule-free optimizers start in evaluation mode and
    refuse to step.
    """
    optimizer.train()  # type: ignore[attr-defined]  # schedule-free optimizers have it
    return optimizer
