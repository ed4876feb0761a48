"""Techniques: what a training does beside plain steps, such as starting from other weights or pruning on the way."""

from collections.abc import Callable
from typing import Protocol

import torch

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Technique(Protocol):
    """What a training asks of a technique."""

    def start(self, model: torch.nn.Module) -> None:
        """Change the model in place, before its optimizer is made."""

    def before_step(self, model: torch.nn.Module, step: int, total_steps: int) -> None:
        """Change the model in place before a step; ``step`` counts from 0."""

    def loss(self, loss: Score, outputs: torch.Tensor, targets: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""

    def counts(self, model: torch.nn.Module, step: int, total_steps: int) -> bool:
        """Whether an evaluation after so many steps may reach the target; ``model`` is what was scored, an average of the weights maybe."""

    def finish(self, model: torch.nn.Module) -> None:
        """Make the model plain before its weights are kept."""


class NoTechnique:
    """Plain training."""

    def start(self, model: torch.nn.Module) -> None:
        """Nothing."""

    def before_step(self, model: torch.nn.Module, step: int, total_steps: int) -> None:
        """Nothing."""

    def loss(self, loss: Score, outputs: torch.Tensor, targets: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The loss as it is."""
        return loss(outputs, targets)

    def counts(self, model: torch.nn.Module, step: int, total_steps: int) -> bool:
        """Always."""
        return True

    def finish(self, model: torch.nn.Module) -> None:
        """Nothing."""
