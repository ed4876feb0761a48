"""Tensor parallelism: ranks share the weights of every layer, and take the same batches.

The model itself says which of its layers are split by rows and which by columns:
``tensor_plan(size)`` returns torch's parallel styles by submodule name, and raises ``ConfigError``
if ``size`` ranks cannot share the model.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.training.parallel.ranks import Ranks
from autotune.training.parallel.strategy import (
    Loss,
    SharedModel,
    Strategy,
    refuse_whole_weight_settings,
)
from autotune.training.runtime import Precision


class TensorParallel(Strategy):
    """Every rank holds a part of each layer that the model's plan names, and the whole of every
    other layer.

    Raises:
        ConfigError: the number of workers is below 1, or the backend is unknown.

    Source: Shoeybi et al., "Megatron-LM" (2019); torch's DTensor.
    """

    def check(self, config: TrialConfig, model: nn.Module, *, batch_size: int) -> None:
        """Refuse a training whose layers cannot be split.

        Raises:
            ConfigError: the model has no plan for so many ranks, or a setting does not allow it.
        """
        super().check(config, model, batch_size=batch_size)
        check_plan(config, model, self.num_workers)

    @property
    def divides_model(self) -> bool:
        """Always."""
        return True

    def divide(self, model: nn.Module, ranks: Ranks, precision: Precision) -> None:
        """Split the layers that the model's plan names over the ranks."""
        share_layers(model, ranks.mesh(precision.device, tensor=self.num_workers))
        model.to(precision.device)

    def share(
        self, model: nn.Module, ranks: Ranks, device: torch.device, loss: Loss
    ) -> SharedModel:
        """The divided model, whose state is gathered from all ranks."""
        return _Split(model, ranks)


class _Split(SharedModel):
    mixes_tensors = True

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(model)
        self._ranks = ranks

    @property
    def counts(self) -> bool:
        return self._ranks.is_first

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        return get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )


def check_plan(config: TrialConfig, model: nn.Module, size: int) -> None:
    """Refuse a model whose layers ``size`` ranks cannot share, and settings that do not work with
    split weights.

    Raises:
        ConfigError: the model or a setting is refused; the message has the key, what was found and
            what is accepted.
    """
    plan_of(model, size)
    refuse_whole_weight_settings(config, "tensor")
    if config.runtime.optimizer_kernels not in (None, "for_loop"):
        raise ConfigError(
            "runtime.optimizer_kernels: split and whole weights need a loop each; accepted with"
            " tensor parallelism is for_loop"
        )


def plan_of(model: nn.Module, size: int) -> Mapping[str, ParallelStyle]:
    """The parallel styles by submodule name that a model's ``tensor_plan`` returns for ``size``
    ranks.

    Raises:
        ConfigError: the model has no ``tensor_plan``, or none for so many ranks.
    """
    plan = getattr(model, "tensor_plan", None)
    if not callable(plan):
        raise ConfigError(
            f"parallelism: {type(model).__name__} has no tensor_plan, so ranks cannot share its"
            " layers; accepted are single, ddp, fsdp"
        )
    return plan(size)  # type: ignore[no-any-return]  # the contract in the module docstring


def share_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers that the model's plan names, in place."""
    parallelize_module(model, mesh, dict(plan_of(model, mesh.size())))
