"""Tensor parallelism: ranks share the weights of every layer, and take the same batches.

The model itself says which of its layers are split by rows and which by columns:
``tensor_plan(size)`` returns torch's parallel styles by submodule name, and raises ``ConfigError``
if ``size`` ranks cannot share the model.
"""

import contextlib
from collections.abc import Iterator, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.training.parallel.ranks import Ranks
from autotune.training.parallel.strategy import SharedModel, Strategy
from autotune.training.runtime import Precision


class TensorParallel(Strategy):
    """Every rank holds a part of each layer that the model's plan names, and the whole of every
    other layer.

    Raises:
        ConfigError: the number of workers is below 1, or the backend is unknown.

    Source: Shoeybi et al., "Megatron-LM" (2019); torch's DTensor.
    """

    divides_model = True

    def check(self, config: TrialConfig, model: nn.Module, *, batch_size: int) -> None:
        """Refuse a training whose layers cannot be split.

        Raises:
            ConfigError: the model has no plan for so many ranks, or a setting does not allow it.
        """
        super().check(config, model, batch_size=batch_size)
        if self.tensor_size == 1:
            return
        _plan_of(model, self.tensor_size)
        if config.runtime.optimizer_kernels not in (None, "for_loop"):
            raise ConfigError(
                "runtime.optimizer_kernels: split and whole weights need a loop each; use for_loop"
                " with tensor parallelism"
            )

    def share(self, model: nn.Module, ranks: Ranks, precision: Precision) -> SharedModel:
        """Split the layers that the model's plan names over the ranks."""
        share_layers(model, ranks.mesh(precision.device, 1, self.tensor_size))
        return DividedModel(model.to(precision.device))


class DividedModel(SharedModel):
    """A model whose parameters, or some of them, are distributed tensors."""

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let torch's ``fully_shard`` exchange gradients in the last backward pass only."""
        exchange = getattr(self.model, "set_requires_gradient_sync", lambda requires_sync: None)
        exchange(False)
        try:
            yield
        finally:
            exchange(True)


def _plan_of(model: nn.Module, size: int) -> Mapping[str, ParallelStyle]:
    plan = getattr(model, "tensor_plan", None)
    if not callable(plan):
        raise ConfigError(
            f"parallelism: {type(model).__name__} has no tensor_plan, so ranks cannot share its"
            " layers; use single, ddp or fsdp"
        )
    return plan(size)  # type: ignore[no-any-return]  # the contract in the module docstring


def share_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers that the model's plan names over the mesh's dimension ``tensor``."""
    if (size := mesh["tensor"].size()) > 1:
        parallelize_module(model, mesh["tensor"], dict(_plan_of(model, size)))
