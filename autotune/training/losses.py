"""Losses beyond torch's own classes.

Contract: ``loss(outputs, targets)`` returns a scalar tensor, the mean over the samples given.
"""

from torch import Tensor
from torch.nn import functional


def token_cross_entropy(outputs: Tensor, targets: Tensor, *, label_smoothing: float) -> Tensor:
    """Cross-entropy in nats per token: the mean over samples and positions, computed in float32.

    Args:
        outputs: logits [samples, ..., classes].
        targets: class indices [samples, ...].
        label_smoothing: share of a target that is spread evenly over all classes, 0 to 1.
    """
    return functional.cross_entropy(
        outputs.float().flatten(0, -2), targets.flatten(), label_smoothing=label_smoothing
    )
