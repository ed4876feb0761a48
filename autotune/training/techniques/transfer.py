"""Transfer: start from the weights of another training, and optionally freeze them at first."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch import Tensor, nn

from autotune.errors import ConfigError, check_fractions
from autotune.remote import fetched
from autotune.training.checkpoint import read_weights_once
from autotune.training.techniques.technique import Technique, head_of

_log = logging.getLogger(__name__)


class Transfer(Technique):
    """Take every layer that fits from a checkpoint, and freeze the layers taken for the first part
    of the schedule.

    A layer is a module with tensors of its own, and fits if the checkpoint has all of them in the
    same shapes. Frozen weights get no gradient, and frozen norms neither update their running
    statistics nor use those of the batch.

    Args:
        source: experiment that the checkpoint comes from, if the configuration names an experiment.
        checkpoint: file of weights that autotune wrote, or its URL.
        fresh_head: whether the last layer starts as the model made it even if it fits, since its
            classes are others.
        unfreeze_at: fraction of the steps after which all layers train; 0 freezes none, 1 keeps
            them frozen to the end.

    Raises:
        ConfigError: a value is outside its range, or there is no checkpoint.
        DataError: the checkpoint is at a URL, and cannot be fetched.

    Source: Yosinski et al., "How transferable are features in deep neural networks?" (2014).
    """

    def __init__(
        self, *, source: str | None, checkpoint: str | None, fresh_head: bool, unfreeze_at: float
    ) -> None:
        check_fractions("technique", unfreeze_at=unfreeze_at)
        self._path = checkpoint_path(checkpoint)
        self._fresh_head = fresh_head
        self._unfreeze_at = unfreeze_at
        self._frozen: list[nn.Parameter] = []
        self._frozen_norms: list[nn.Module] = []

    def start(self, model: nn.Module) -> None:
        """Copy the layers that fit into the model, and freeze them.

        Raises:
            ConfigError: no layer fits, or all layers would be frozen.
            DataError: the checkpoint cannot be read.
        """
        weights, _ = read_weights_once(self._path)
        head = head_of(model) if self._fresh_head else None
        layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, value in model.state_dict().items():
            if isinstance(value, Tensor):
                layers[key.rpartition(".")[0]][key] = value
        taken = [
            name
            for name, tensors in layers.items()
            if name != head
            and all(
                key in weights and weights[key].shape == tensor.shape
                for key, tensor in tensors.items()
            )
        ]
        for name in taken:
            for key, tensor in layers[name].items():
                tensor.copy_(weights[key])
        fresh = [name for name in layers if name not in taken]
        if not taken:
            raise ConfigError(
                f"technique.checkpoint: no layer of the model is in {self._path} in its shape"
            )
        _log_once(
            f"{self._path.name}: {len(taken)} layers taken; fresh: {', '.join(fresh) or 'none'}"
        )
        if self._unfreeze_at > 0:
            self._freeze(model, [model.get_submodule(name) for name in taken])

    def before_step(self, model: nn.Module, step: int, total_steps: int) -> None:
        """Unfreeze the frozen layers once the fraction ``unfreeze_at`` of the steps is over."""
        if self._frozen and step >= round(self._unfreeze_at * total_steps):
            for parameter in self._frozen:
                parameter.requires_grad_(True)
            for norm in self._frozen_norms:
                norm.train()
            self._frozen, self._frozen_norms = [], []

    def _freeze(self, model: nn.Module, taken: Sequence[nn.Module]) -> None:
        self._frozen = [
            parameter
            for module in taken
            for parameter in module.parameters(recurse=False)
            if parameter.requires_grad
        ]
        self._frozen_norms = [
            module for module in taken if getattr(module, "running_mean", None) is not None
        ]
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        for norm in self._frozen_norms:
            norm.eval()
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                f"technique.unfreeze_at: found {self._unfreeze_at}, and all layers were taken, so"
                " that nothing would train before; use 0, or fresh_head=true"
            )


def checkpoint_path(checkpoint: str | None) -> Path:
    """Path on this machine of the file that ``technique.checkpoint`` names.

    Raises:
        ConfigError: ``technique.checkpoint`` is null.
        DataError: the file is at a URL, and cannot be fetched.
    """
    if checkpoint is None:
        raise ConfigError(
            "technique.checkpoint: found null, must be a file of weights, or"
            " technique.source=EXPERIMENT that makes it"
        )
    return fetched(checkpoint, "technique.checkpoint")


@cache
def _log_once(text: str) -> None:
    """Log a line once in a process: a training starts its technique more than once."""
    _log.info(text)
