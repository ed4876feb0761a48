"""Techniques: what a training does besides plain steps, such as starting from other weights, or pruning."""

from collections.abc import Callable
from typing import Protocol

import torch

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Loss of a batch's outputs and targets."""


class Technique(Protocol):
    """The methods by which a training calls its technique."""

    def start(self, model: torch.nn.Module) -> None:
        """Change the model in place, before its optimizer is made."""

    def before_step(self, model: torch.nn.Module, step: int, total_steps: int) -> None:
        """Change the model in place before a step; ``step`` counts from 0."""

    def loss(self, loss: Score, outputs: torch.Tensor, targets: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The loss that a batch is trained on, where ``loss`` is the plain loss function."""

    def counts(self, model: torch.nn.Module, step: int, total_steps: int) -> bool:
        """Whether an evaluation after ``step`` steps may reach the target; ``model`` was scored, and may be an average of the weights."""

    def finish(self, model: torch.nn.Module) -> None:
        """Turn the model into a plain one before its weights are kept."""


class PlainTechnique:
    """Base class of techniques, which leaves a training as it is."""

    def start(self, model: torch.nn.Module) -> None:
        """Leave the model as it is."""

    def before_step(self, model: torch.nn.Module, step: int, total_steps: int) -> None:
        """Leave the model as it is."""

    def loss(self, loss: Score, outputs: torch.Tensor, targets: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The plain loss of a batch."""
        return loss(outputs, targets)

    def counts(self, model: torch.nn.Module, step: int, total_steps: int) -> bool:
        """Let every evaluation count."""
        return True

    def finish(self, model: torch.nn.Module) -> None:
        """Leave the model as it is: it is plain."""


class NoTechnique(PlainTechnique):
    """Plain training."""
