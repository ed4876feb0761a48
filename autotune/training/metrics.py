"""Metrics: what a target is stated in.

Contract: ``metric(outputs, targets)`` returns a scalar tensor, the mean over the samples given; an evaluation weighs its
batches by their size.
"""

import math

import torch
from torch.nn import functional


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Fraction of samples whose highest output is the target's.

    Args:
        outputs: [samples, classes].
        targets: [samples], class indices.
    """
    return (outputs.argmax(dim=-1) == targets).float().mean()


def bits_per_character(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean of -log2 p of the character that comes next: what writing one down takes, where the model says how likely each is.

    Lower is better; a model that knows nothing has log2 of the number of classes. All samples are of one length, so that the mean over
    samples and positions is the mean over characters, in batches of any size.

    Args:
        outputs: logits [samples, length, classes].
        targets: [samples, length], class indices.
    """
    return functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten()) / math.log(2)
