"""Distillation: learn from a trained model's outputs as well as from the targets."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch.nn import functional

from autotune.config.build import accepted_arguments, build_partial, call
from autotune.errors import ConfigError, DataError
from autotune.training.checkpoint import read_weights_once
from autotune.training.techniques.technique import Score
from autotune.training.techniques.transfer import checkpoint_path


class Distillation:
    """A loss that mixes that of the targets with the distance from a teacher's softened outputs.

    ``(1 - mix) * loss + mix * T^2 * KL(softmax(teacher / T) || softmax(outputs / T))``, the divergence a mean over samples and
    positions, in float32. The teacher sees the inputs that the model sees, in evaluation mode and without gradients. A process
    loads it once and keeps it on the device.

    Args:
        source: the experiment that the checkpoint is from, where it is named by that.
        checkpoint: a file of weights that autotune wrote, or its URL; it says what model they belong to.
        temperature: T, above 0; the higher, the more the teacher's unlikely classes say.
        mix: the share of the teacher, 0 to 1.
        device: where the training runs.
        input_shape: of one sample.
        num_classes: of the data.
        allowed_targets: packages that the teacher's model may be of, besides autotune's own list.

    Raises:
        ConfigError: a value outside its range, no checkpoint, or a teacher for other data.
        DataError: the checkpoint cannot be read.

    Source: Hinton, Vinyals & Dean, "Distilling the Knowledge in a Neural Network" (2015), section 2.
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
            raise ConfigError(f"technique.temperature: found {temperature}, accepted is above 0")
        if not 0 <= mix <= 1:
            raise ConfigError(f"technique.mix: found {mix}, accepted is 0 to 1")
        path = checkpoint_path(checkpoint)
        _, metadata = read_weights_once(path)
        if not {"config", "input_shape", "num_classes"} <= set(metadata):
            raise DataError(f"{path}: does not say what model its weights are of; accepted is a file that a training of autotune wrote")
        taught, found = _described(metadata["input_shape"], metadata["num_classes"]), _described(input_shape, num_classes)
        if num_classes is None or taught != found:
            raise ConfigError(f"technique.checkpoint: {path} is for {taught}, and the data has {found}")
        self._temperature, self._mix = temperature, mix
        self._teacher = _teacher(path.absolute(), path.stat().st_mtime_ns, tuple(allowed_targets), device)

    def start(self, model: torch.nn.Module) -> None:
        """Nothing: the model starts as it is."""

    def before_step(self, model: torch.nn.Module, step: int, total_steps: int) -> None:
        """Nothing."""

    def loss(self, loss: Score, outputs: torch.Tensor, targets: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The mixed loss of a batch; outputs are logits ``[batch, ..., classes]``."""
        if self._mix == 0:
            return loss(outputs, targets)
        with torch.no_grad():
            taught = self._teacher(inputs.float() if inputs.is_floating_point() else inputs)
        distance = distillation_loss(outputs, taught, self._temperature)
        return (1 - self._mix) * loss(outputs, targets) + self._mix * distance

    def counts(self, model: torch.nn.Module, step: int, total_steps: int) -> bool:
        """Always."""
        return True

    def finish(self, model: torch.nn.Module) -> None:
        """Nothing: the model is plain."""


def distillation_loss(outputs: torch.Tensor, taught: torch.Tensor, temperature: float) -> torch.Tensor:
    """``T^2 * KL(softmax(taught / T) || softmax(outputs / T))`` of logits ``[..., classes]``, the mean over all but classes."""
    student = functional.log_softmax(outputs.float() / temperature, dim=-1).flatten(0, -2)
    teacher = functional.log_softmax(taught.float() / temperature, dim=-1).flatten(0, -2)
    return functional.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


@lru_cache(maxsize=1)
def _teacher(path: Path, modified_ns: int, allowed_targets: tuple[str, ...], device: torch.device) -> torch.nn.Module:
    """The model of a checkpoint with its weights, on a device, in evaluation mode."""
    weights, metadata = read_weights_once(path)
    where = f"{path}: model"
    made = build_partial(metadata["config"]["model"], allowed_targets, where)
    offered = {"input_shape": tuple(metadata["input_shape"]), "num_classes": metadata["num_classes"]}
    model = call(made, where, **accepted_arguments(made, offered))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise DataError(f"{path}: does not hold the weights of its own model: {' '.join(str(error).split())}") from error
    return model.to(device).eval().requires_grad_(False)  # type: ignore[no-any-return]  # a module, since it has taken weights


def _described(input_shape: Sequence[int], num_classes: int | None) -> str:
    return f"inputs of {list(input_shape)} and {num_classes or 'no'} classes"
