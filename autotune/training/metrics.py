"""Metrics: what a target is stated in.

Contract: ``metric(outputs, targets)`` returns a scalar tensor, the mean over the samples given; an evaluation weighs its
batches by their size.
"""

import torch


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Fraction of samples whose highest output is the target's.

    Args:
        outputs: [samples, classes].
        targets: [samples], class indices.
    """
    return (outputs.argmax(dim=-1) == targets).float().mean()
