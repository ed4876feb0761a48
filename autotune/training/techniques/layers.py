"""A model's layers as techniques and optimizers need them: the layers with weights, and the one that makes the outputs."""

import torch

_WEIGHTED = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)  # noqa: SLF001  # no public name for all convolutions
_NEVER_CALLED = torch.nn.modules.linear.NonDynamicallyQuantizableLinear
"""Type of the last layer of torch's attention, which uses that layer's weights without calling the layer."""


def weighted_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """A model's convolutions and linear layers by name, in the order in which the model registered them."""
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, _WEIGHTED) and not isinstance(module, _NEVER_CALLED)}


def head_of(model: torch.nn.Module) -> str | None:
    """Name of the layer that makes a model's outputs, its last convolution or linear layer; None if it has none."""
    return next(reversed(weighted_layers(model)), None)
