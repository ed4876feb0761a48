"""Techniques: what a training does besides plain steps, such as starting from other weights, or
pruning.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
"""Loss of a batch's outputs and targets."""
# no public name for all convolutions
_WEIGHTED = (nn.Linear, nn.modules.conv._ConvNd)  # noqa: SLF001
_NEVER_CALLED = nn.modules.linear.NonDynamicallyQuantizableLinear
"""Type of the last layer of torch's attention, which uses that layer's weights without calling
the layer."""


class Technique:
    """The methods by which a training calls its technique.

    Those of this class leave the training as it is.
    """

    def start(self, model: nn.Module) -> None:
        """Change the model in place, before its optimizer is made."""

    def before_step(self, model: nn.Module, step: int, total_steps: int) -> None:
        """Change the model in place before a step; ``step`` counts from 0."""

    def loss(self, loss: Loss, outputs: Tensor, targets: Tensor, inputs: Tensor) -> Tensor:
        """The loss that a batch is trained on, where ``loss`` is the plain loss function."""
        return loss(outputs, targets)

    def counts(self, model: nn.Module, step: int, total_steps: int) -> bool:
        """Whether an evaluation after ``step`` steps may reach the target.

        ``model`` was scored, and may be an average of the weights.
        """
        return True

    def finish(self, model: nn.Module) -> None:
        """Turn the model into a plain one before its weights are kept."""


class NoTechnique(Technique):
    """Plain training."""


def weighted_layers(model: nn.Module) -> dict[str, Any]:
    """A model's convolutions and linear layers by name, in the order in which the model
    registered them.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _WEIGHTED) and not isinstance(module, _NEVER_CALLED)
    }


def head_of(model: nn.Module) -> str | None:
    """Name of the layer that makes a model's outputs, its last convolution or linear layer.

    None if it has none.
    """
    return next(reversed(weighted_layers(model)), None)
