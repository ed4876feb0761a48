"""SGD and AdamW whose settings stay meaningful when batch size or momentum changes.

torch's learning rate is that of one step: with another batch size or momentum the same value means
another training. Here it is stated for 1,024 samples seen, so that it can be searched together with
batch size and momentum instead of against them.

``lr`` is the distance that weights move along a constant gradient while 1,024 samples are seen,
divided by that gradient (SGD) or by its sign (AdamW). ``weight_decay`` is the fraction of a weight
that is lost over the same samples at the highest learning rate, whatever that rate is: it fixes
learning rate times torch's ``weight_decay``. The learning-rate schedule scales both.
"""

import torch
from torch import nn

from autotune.errors import ConfigError
from autotune.training.optimizers.groups import REFERENCE_SAMPLES, scaled_groups


def sgd(
    model: nn.Module,
    *,
    batch_size: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    bias_lr_scale: float,
    head_lr_scale: float,
    decay_biases: bool,
    fused: bool | None = None,
    foreach: bool | None = None,
) -> torch.optim.SGD:
    """SGD with Nesterov momentum, or plain SGD where ``momentum`` is 0.

    With momentum m, torch's SGD keeps b <- m b + g and moves the weights by rate (g + m b): a
    gradient moves them by rate (1 + m) in its own step and by rate m^(k+1) k steps later, in all by
    rate / (1 - m). 1,024 samples are 1,024 / B steps with batches of B samples, hence rate = lr (B
    / 1024) (1 - m). Weight decay is part of the gradient and moves the weights in the same way,
    hence torch's ``weight_decay`` is this ``weight_decay`` / ``lr`` for any B and m.

    Source: Jordan, github.com/KellerJordan/cifar10-airbench, which divides by 1 + 1 / (1 - m)
    instead: twice as much as a gradient moves the weights for m = 0, and nearly the same for m near
    1. Its losses are summed over the batch: a rate r there is r B for the mean losses here, that is
    ``lr`` = 1024 r / (1 - m).
    """
    _check_momentum("momentum", momentum)
    step_share = batch_size / REFERENCE_SAMPLES * (1 - momentum)
    groups = scaled_groups(
        model,
        step_share,
        lr,
        weight_decay,
        bias_lr_scale=bias_lr_scale,
        head_lr_scale=head_lr_scale,
        decay_biases=decay_biases,
    )
    return torch.optim.SGD(
        groups, momentum=momentum, nesterov=momentum > 0, fused=fused, foreach=foreach
    )


def adamw(
    model: nn.Module,
    *,
    batch_size: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    bias_lr_scale: float,
    head_lr_scale: float,
    decay_biases: bool,
    fused: bool | None = None,
    foreach: bool | None = None,
) -> torch.optim.AdamW:
    """AdamW; its momentum ``beta1`` does not change how far the weights move along a constant
    gradient.

    Along a constant gradient each step moves the weights by rate times its sign, hence rate = lr B
    / 1024 for a batch of B samples; in a step, weight decay takes ``weight_decay`` B / 1024 of a
    weight.

    Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019); Wang & Aitchison,
    "How to set AdamW's weight decay as you scale model and dataset size" (2024), for the decay held
    fixed per sample.
    """
    for key, value in (("beta1", beta1), ("beta2", beta2)):
        _check_momentum(key, value)
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
    return torch.optim.AdamW(groups, betas=(beta1, beta2), fused=fused, foreach=foreach)


def _check_momentum(key: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"optimizer.{key}: found {value}, accepted is 0 to below 1")
