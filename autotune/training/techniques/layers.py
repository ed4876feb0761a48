"""What techniques need to know of a model's layers: those that hold weights, and the one that makes its outputs."""

import torch

_WEIGHTED = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)  # noqa: SLF001  # no public name for all convolutions
_NEVER_CALLED = torch.nn.modules.linear.NonDynamicallyQuantizableLinear
"""Attention's last layer in torch, whose weights are used without it."""


def weighted_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Convolutions and linear layers by name, in the order in which the model registered them."""
    named = model.named_modules()
    return {name: module for name, module in named if isinstance(module, _WEIGHTED) and not isinstance(module, _NEVER_CALLED)}


def head_of(model: torch.nn.Module) -> str | None:
    """The name of the layer that makes the outputs: the last one with weights; None where there is none."""
    return next(reversed(weighted_layers(model)), None)
