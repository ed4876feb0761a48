"""Views: how an evaluation computes a model's outputs for one batch, for example averaged over
mirrored images (test-time augmentation).

Contract of ``views:`` in the configuration: ``views(model, inputs)`` returns the outputs that
metric and loss are given. Averaging over views of the same images takes evaluation time but no
training time, and a target is reached in less training. What is exported is one model: its user
must apply the same views to get the same quality.
"""

from torch import Tensor, nn
from torch.nn import functional

from autotune.training.data import memory_format_of


def plain(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's outputs for the inputs as they are."""
    outputs: Tensor = model(inputs)
    return outputs


def mirrored(model: nn.Module, inputs: Tensor) -> Tensor:
    """Mean of the outputs for images ``[batch, channels, height, width]`` and for the images
    mirrored left to right.
    """
    return (plain(model, inputs) + plain(model, inputs.flip(3))) / 2


def six_views(model: nn.Module, inputs: Tensor) -> Tensor:
    """Mean of the outputs for six views of the images: unmoved, moved up and left, and moved down
    and right, each also mirrored.

    The two unmoved views have half of the weight, the four moved ones the other half. Images move
    by one pixel each way, with their own reflection at the edge.

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024), section 3.5.
    """
    memory_format = memory_format_of(inputs)
    padded = functional.pad(inputs, (1, 1, 1, 1), mode="reflect")
    moved = [
        images.contiguous(memory_format=memory_format)
        for images in (padded[:, :, 2:, 2:], padded[:, :, :-2, :-2])
    ]
    return mirrored(model, inputs) / 2 + (mirrored(model, moved[0]) + mirrored(model, moved[1])) / 4
