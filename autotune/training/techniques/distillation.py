"""Distillation: train on the outputs of a trained model, the teacher, as well as on the targets."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.errors import ConfigError, check_fractions
from autotune.training.checkpoint import read_weights_once
from autotune.training.techniques.technique import Loss, Technique
from autotune.training.techniques.transfer import checkpoint_path
from autotune.training.trained_model import trained_model


class Distillation(Technique):
    """A mixture of the targets' loss and the distance from a teacher's softened outputs.

    The loss is ``(1 - mix) * loss + mix * T^2 * KL(softmax(teacher / T) || softmax(outputs / T))``,
    where the divergence is a mean over samples and positions, in float32. The teacher gets the
    inputs that the model gets, in evaluation mode and without gradients. A process loads the
    teacher once and keeps it on the device.

    Args:
        source: experiment that the checkpoint comes from, if the configuration names an experiment.
        checkpoint: file of weights that autotune wrote, or its URL; it also says what model the
            weights belong to.
        temperature: T, above 0; the higher, the more weight the teacher's unlikely classes have.
        mix: weight of the teacher in the loss, 0 to 1.
        device: device of the training.
        input_shape: shape of one sample.
        num_classes: number of classes of the data.
        allowed_targets: packages that the teacher's model may come from, besides autotune's own
            list.

    Raises:
        ConfigError: a value is outside its range, there is no checkpoint, or the teacher is for
            other data.
        DataError: the checkpoint cannot be read or does not describe its model.

    Source: Hinton, Vinyals & Dean, "Distilling the Knowledge in a Neural Network" (2015), section
    2.
    """

    def __init__(
        self,
        *,
        source: str | None,
        checkpoint: str | None,
        temperature: float,
        mix: float,
        device: torch.device,
        input_shape: Sequence[int],
        num_classes: int | None,
        allowed_targets: Sequence[str],
    ) -> None:
        if not temperature > 0:
            raise ConfigError(f"technique.temperature: found {temperature}, must be above 0")
        check_fractions("technique", mix=mix)
        path = checkpoint_path(checkpoint)
        _, metadata = read_weights_once(path)
        shape, classes = metadata.get("input_shape"), metadata.get("num_classes")
        if num_classes is None or (shape, classes) != (list(input_shape), num_classes):
            raise ConfigError(
                f"technique.checkpoint: {path} is for inputs of {shape} and {classes} classes, and"
                f" the data has inputs of {list(input_shape)} and {num_classes or 'no'} classes"
            )
        self._temperature, self._mix = temperature, mix
        self._teacher = _teacher(
            path.absolute(), path.stat().st_mtime_ns, tuple(allowed_targets), device
        )

    def loss(self, loss: Loss, outputs: Tensor, targets: Tensor, inputs: Tensor) -> Tensor:
        """The mixed loss of a batch; outputs are logits ``[batch, ..., classes]``."""
        if self._mix == 0:
            return loss(outputs, targets)
        with torch.no_grad():
            teacher_outputs = self._teacher(
                inputs.float() if inputs.is_floating_point() else inputs
            )
        student = functional.log_softmax(outputs.float() / self._temperature, dim=-1)
        teacher = functional.log_softmax(teacher_outputs.float() / self._temperature, dim=-1)
        divergence = functional.kl_div(
            student.flatten(0, -2), teacher.flatten(0, -2), reduction="batchmean", log_target=True
        )
        distance = divergence * self._temperature**2
        return (1 - self._mix) * loss(outputs, targets) + self._mix * distance


@lru_cache(maxsize=1)
def _teacher(
    path: Path, modified_ns: int, allowed_targets: tuple[str, ...], device: torch.device
) -> nn.Module:
    """Build a checkpoint's model with its weights, on a device, in evaluation mode.

    A changed file is loaded anew.
    """
    return trained_model(path, allowed_targets).to(device)
