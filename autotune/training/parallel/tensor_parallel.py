"""Tensor parallelism: ranks share the weights of every layer, and take the same batches.

Which layers are split by rows and which by columns, a model says itself: ``tensor_plan(size)`` returns torch's parallel styles by
submodule name, and raises ``ConfigError`` where so many ranks cannot share it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.training.parallel.ranks import Ranks
from autotune.training.parallel.strategy import Loss, SharedModel, Strategy, needs_whole_weights


class TensorParallel(Strategy):
    """Every rank holds a part of the layers that the model's plan names, and the whole of the others.

    Raises:
        ConfigError: for less than one worker.

    Source: Shoeybi et al., "Megatron-LM" (2019); DTensor of torch.
    """

    def check(self, config: TrialConfig, model: nn.Module, *, batch_size: int) -> None:
        """Refuse what cannot be trained with layers in parts.

        Raises:
            ConfigError: the model has no plan, or something needs whole weights.
        """
        super().check(config, model, batch_size=batch_size)
        check_plan(config, model, self.num_workers)

    def share(self, model: nn.Module, ranks: Ranks, device: torch.device, loss: Loss) -> SharedModel:
        """The model with its layers shared out."""
        share_layers(model, init_device_mesh(device.type, (self.num_workers,), mesh_dim_names=("tensor",)))
        return _InParts(model, ranks)


class _InParts(SharedModel):
    mixes_tensors = True

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(model)
        self._ranks = ranks

    @property
    def counts(self) -> bool:
        return self._ranks.is_first

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def check_plan(config: TrialConfig, model: nn.Module, size: int) -> None:
    """Refuse a model whose layers so many ranks cannot share, and what needs them whole.

    Raises:
        ConfigError: with the key, what was found and what is accepted.
    """
    plan_of(model, size)
    needs_whole_weights(config, "tensor")
    if config.runtime["optimizer_kernels"] not in (None, "for_loop"):
        raise ConfigError(
            "runtime.optimizer_kernels: split and whole weights need a loop each; accepted with tensor parallelism is for_loop"
        )


def plan_of(model: nn.Module, size: int) -> Mapping[str, ParallelStyle]:
    """A model's own plan for ``size`` ranks.

    Raises:
        ConfigError: it has none, or not for so many.
    """
    make = getattr(model, "tensor_plan", None)
    if not callable(make):
        raise ConfigError(
            f"parallelism: {type(model).__name__} has no tensor_plan, so ranks cannot share its layers; accepted are single, ddp, fsdp"
        )
    return make(size)  # type: ignore[no-any-return]  # the contract above


def share_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers that the model's plan names, in place."""
    parallelize_module(model, mesh, dict(plan_of(model, mesh.size())))
