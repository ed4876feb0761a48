"""Metrics: the quantities in which a target is stated.

Contract: ``metric(outputs, targets)`` returns a scalar tensor, the mean over the samples given; an
evaluation weights its batches by size.
"""

import math

from torch import Tensor

from autotune.training.losses import token_cross_entropy


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Fraction of samples whose highest output is at the target class.

    Args:
        outputs: score of each class [samples, classes].
        targets: class indices [samples].
    """
    return (outputs.argmax(dim=-1) == targets).float().mean()


def bits_per_character(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log2 p of the next character: the bits per character that a text takes when it is
    coded with the model's predictions.

    Lower is better; a model that has learned nothing gets log2 of the number of classes. All
    samples have the same length, so the mean over samples and positions is the mean over
    characters, in batches of any size.

    Args:
        outputs: logits [samples, length, classes].
        targets: class indices [samples, length].
    """
    return token_cross_entropy(outputs, targets, label_smoothing=0.0) / math.log(2)
