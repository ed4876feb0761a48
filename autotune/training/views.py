"""Views: how a model is asked about one batch when it is evaluated.

Contract of ``views:`` in the configuration: ``views(model, inputs)`` returns the outputs that metric and loss are given.
Averaging over views of the same images costs evaluation, never training, and saves training: a target is reached sooner.
What is exported is one model; whoever uses it asks it in the same views for the same quality.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.training.data import is_channels_last


def plain(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's outputs."""
    outputs: Tensor = model(inputs)
    return outputs


def mirrored(model: nn.Module, inputs: Tensor) -> Tensor:
    """The mean of the outputs for images ``[batch, channels, height, width]`` and for their mirror images, left and right."""
    return (plain(model, inputs) + plain(model, inputs.flip(3))) / 2


def six_views(model: nn.Module, inputs: Tensor) -> Tensor:
    """The mean of the outputs for images and for the same moved by a pixel, half of the weight each.

    Both are asked as ``mirrored`` does; the moved ones are the mean of one pixel up and left, and one down and right, with the
    image's own reflection at the edge.

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024), section 3.5.
    """
    memory_format = torch.channels_last if is_channels_last(inputs) else torch.contiguous_format
    padded = functional.pad(inputs, (1, 1, 1, 1), mode="reflect")
    moved = [each.contiguous(memory_format=memory_format) for each in (padded[:, :, 2:, 2:], padded[:, :, :-2, :-2])]
    return mirrored(model, inputs) / 2 + (mirrored(model, moved[0]) + mirrored(model, moved[1])) / 4
