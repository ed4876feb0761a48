"""SGD and AdamW whose settings stay meaningful when batch size or momentum changes.

torch's learning rate is that of one step: with another batch size or momentum the same value means
another training. Here it is stated for 1,024 samples seen, so that it can be searched together with
batch size and momentum instead of against them.

``lr`` is the distance that weights move along a constant gradient while 1,024 samples are seen,
divided by that gradient (SGD) or by its sign (AdamW). ``weight_decay`` is the fraction of a weight
that is lost over the same samples at the highest learning rate, whatever that rate is: it fixes
learning rate times torch's ``weight_decay``. The learning-rate schedule scales both.

``bias_lr_scale`` and ``head_lr_scale`` are the learning rates of biases and norms, and of the last
layer, as multiples of ``lr``; ``decay_biases`` says whether biases and norms decay too.

Parameters are of several kinds: ``filters`` are the matrices and convolution filters between input
and output, ``head`` the weights of the last layer, ``embeddings`` those of embedding layers,
``biases`` all biases and the scales and shifts of norms, ``whitening_bias`` the bias of a frozen
first layer, which only a model that has one can name.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autotune.errors import ConfigError
from autotune.training.techniques.technique import head_of

KINDS = ("filters", "head", "embeddings", "biases", "whitening_bias")
BIAS_KINDS = ("biases", "whitening_bias")
"""Kinds of parameters without weight decay unless ``decay_biases`` is set."""

REFERENCE_SAMPLES = 1024
"""Number of samples that learning rates and weight decays are stated for."""


def sgd(
    model: nn.Module,
    *,
    batch_size: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    fused: bool | None = None,
    foreach: bool | None = None,
    **scales: Any,
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
    if not 0 <= momentum < 1:
        raise ConfigError(f"optimizer.momentum: found {momentum}, must be 0 to below 1")
    step_share = batch_size / REFERENCE_SAMPLES * (1 - momentum)
    return torch.optim.SGD(
        scaled_groups(model, step_share, lr, weight_decay, **scales),
        momentum=momentum,
        nesterov=momentum > 0,
        fused=fused,
        foreach=foreach,
    )


def adamw(
    model: nn.Module,
    *,
    batch_size: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    fused: bool | None = None,
    foreach: bool | None = None,
    **scales: Any,
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
    groups = scaled_groups(model, batch_size / REFERENCE_SAMPLES, lr, weight_decay, **scales)
    return torch.optim.AdamW(groups, betas=(beta1, beta2), fused=fused, foreach=foreach)


def scaled_groups(
    model: nn.Module,
    step_share: float,
    lr: float,
    weight_decay: float,
    *,
    bias_lr_scale: float,
    head_lr_scale: float,
    decay_biases: bool,
) -> list[dict[str, Any]]:
    """Param groups as torch's optimizers take them: one for each kind of parameters, with the kind
    as its ``name``.

    Args:
        model: the model whose parameters are grouped.
        step_share: what one step takes of ``lr`` and ``weight_decay``, which are stated for
            ``REFERENCE_SAMPLES``.
        lr: learning rate.
        weight_decay: fraction of a weight that weight decay takes at that rate.
        bias_lr_scale: learning rate of biases and norms as a multiple of ``lr``.
        head_lr_scale: learning rate of the head as a multiple of ``lr``.
        decay_biases: whether biases and norms decay too.
    """
    rate = lr * step_share
    rates = {
        **dict.fromkeys(KINDS, rate),
        **dict.fromkeys(BIAS_KINDS, rate * bias_lr_scale),
        "head": rate * head_lr_scale,
    }
    return groups_by_kind(model, rates, weight_decay * step_share, decay_biases=decay_biases)


def groups_by_kind(
    model: nn.Module, rates: Mapping[str, float], decay_fraction: float, *, decay_biases: bool
) -> list[dict[str, Any]]:
    """Param groups of the kinds of parameters that ``rates`` has a learning rate for.

    ``decay_fraction`` is what weight decay takes of a weight in a step at that rate.

    Raises:
        ConfigError: a learning rate or the lost fraction is below 0.
    """
    groups = []
    for kind, parameters in parameters_by_kind(model).items():
        if kind not in rates:
            continue
        lr, decay = rates[kind], decay_fraction
        if kind in BIAS_KINDS and not decay_biases:
            decay = 0.0
        for key, value in (("lr", lr), ("weight_decay", decay)):
            if value < 0:
                raise ConfigError(f"optimizer: the {key} of {kind} is {value}, must be 0 and above")
        groups.append(
            {
                "name": kind,
                "params": parameters,
                "lr": lr,
                "weight_decay": decay / lr if lr > 0 else 0.0,
            }
        )
    return groups


def parameters_by_kind(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """All parameters of a model by kind, frozen ones too since they may be unfrozen.

    Kinds without parameters are left out.

    A model that has a method ``parameter_groups()`` decides by itself. For any other model, the
    head is the last linear or convolutional layer that it registered, unless that shares its
    weights with an embedding, and a parameter that has fewer than two dimensions or belongs to a
    norm is a bias.

    Raises:
        ConfigError: the model names an unknown kind, or leaves out parameters that are trained.
    """
    model_groups = getattr(model, "parameter_groups", None)
    groups = _groups_by_layer(model) if model_groups is None else dict(model_groups())
    if unknown := [kind for kind in groups if kind not in KINDS]:
        raise ConfigError(
            f"model: parameter_groups() has {', '.join(unknown)}; its kinds are {', '.join(KINDS)}"
        )
    grouped = {id(parameter) for group in groups.values() for parameter in group}
    if missing := [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in grouped
    ]:
        raise ConfigError(
            f"model: parameter_groups() leaves out {', '.join(missing)}, which are trained"
        )
    return {kind: list(groups[kind]) for kind in KINDS if groups.get(kind)}


def _groups_by_layer(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    head = head_of(model)
    kinds: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            # a norm's scales may have two or more dimensions
            if parameter.ndim < 2 or hasattr(module, "normalized_shape"):
                kinds[parameter] = "biases"
            elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
                kinds[parameter] = "embeddings"
            elif kinds.get(parameter) != "embeddings":
                kinds[parameter] = "head" if name == head else "filters"
    groups: dict[str, list[nn.Parameter]] = defaultdict(list)
    for parameter, kind in kinds.items():
        groups[kind].append(parameter)
    return groups
