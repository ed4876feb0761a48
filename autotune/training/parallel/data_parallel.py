"""Data parallelism: every rank takes its part of each batch, and gradients are averaged over ranks.

``DDP`` keeps a whole model on each rank, ``FSDP`` a part of every weight. ``FSDP`` may be combined
with tensor parallelism: ranks then form a mesh of two dimensions; ranks along the first one divide
each batch and every weight, ranks along the second one (a row of the mesh) divide every layer.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from autotune.errors import ConfigError, check_choice, check_counts
from autotune.training.parallel.ranks import Ranks
from autotune.training.parallel.strategy import SharedModel, Strategy
from autotune.training.parallel.tensor_parallel import DividedModel, TensorParallel, share_layers
from autotune.training.runtime import Precision


class DDP(Strategy):
    """torch's DistributedDataParallel, optionally with compressed gradients.

    Args:
        num_workers: number of ranks.
        backend: torch.distributed backend; None for nccl between GPUs and gloo between CPUs.
        bucket_megabytes: size of the buckets of gradients that are reduced at once; None for
            torch's own.
        gradient_as_bucket_view: whether gradients lie in the buckets, which saves a copy of them.
        static_graph: whether the same parameters are used in every step.
        find_unused_parameters: whether some parameters may be unused in a step.
        compression: how exchanged gradients are compressed: None, ``bf16``, ``fp16`` or
            ``powersgd``.
        powersgd_rank: rank of the matrices by which PowerSGD approximates a gradient.

    Raises:
        ConfigError: a value outside its range, or values that do not go together.

    Source: Vogels et al., "PowerSGD" (2019).
    """

    def __init__(
        self,
        *,
        num_workers: int,
        backend: str | None = None,
        bucket_megabytes: int | None = None,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        compression: str | None = None,
        powersgd_rank: int = 1,
    ) -> None:
        super().__init__(num_workers=num_workers, backend=backend, tensor_size=1)
        check_choice("parallelism.compression", compression, (None, "bf16", "fp16", "powersgd"))
        check_counts("parallelism", bucket_megabytes=bucket_megabytes, powersgd_rank=powersgd_rank)
        if static_graph and compression == "powersgd":
            raise ConfigError(
                "parallelism: static_graph=true does not go with compression=powersgd"
            )
        self._arguments: dict[str, Any] = {
            "bucket_cap_mb": bucket_megabytes,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
        }
        self._compression, self._powersgd_rank = compression, powersgd_rank

    def share(self, model: nn.Module, ranks: Ranks, precision: Precision) -> SharedModel:
        """Give every rank the whole model."""
        if self._compression == "bf16" and precision.device.type != "cuda":
            raise ConfigError(
                "parallelism.compression: found bf16, which needs NCCL; use null, fp16 or powersgd"
                " without a GPU"
            )
        return _Replicated(model, self)

    def wrapped(self, model: nn.Module) -> DistributedDataParallel:
        """The model in torch's DDP, which gives all ranks the first one's weights, and exchanges
        the gradients of the parameters that train now.
        """
        ddp = DistributedDataParallel(model, **self._arguments)
        if self._compression == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                ddp.process_group,
                matrix_approximation_rank=self._powersgd_rank,
                start_powerSGD_iter=2,
            )
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self._compression is not None:
            hook = getattr(default_hooks, f"{self._compression}_compress_hook")
            ddp.register_comm_hook(ddp.process_group, hook)
        return ddp


class _Replicated(SharedModel):
    """A model that every rank holds as a whole, in torch's DDP as ``settings`` say."""

    scores_alone = True

    def __init__(self, model: nn.Module, settings: DDP) -> None:
        super().__init__(model)
        self._settings = settings
        self._ddp = settings.wrapped(model)
        self._requires_grad = self._which_require_grad()

    def __call__(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._ddp(inputs)
        return outputs

    def before_step(self) -> None:
        """Wrap the model in torch's DDP anew if other parameters train now: DDP exchanges the
        gradients of those it was made for.
        """
        if (requires_grad := self._which_require_grad()) != self._requires_grad:
            # the old one would go on exchanging
            self._ddp._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # noqa: SLF001
            self._ddp = self._settings.wrapped(self.model)
            self._requires_grad = requires_grad

    def _which_require_grad(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.model.parameters()]

    def accumulating(self) -> contextlib.AbstractContextManager[object]:
        return self._ddp.no_sync()


class FSDP(TensorParallel):
    """torch's ``fully_shard``: every rank holds a part of each weight, its gradient and the
    optimizer's state; with ``tensor_size`` above 1, a part of what tensor parallelism leaves it.

    Args:
        num_workers: number of ranks.
        backend: torch.distributed backend; None for nccl between GPUs and gloo between CPUs.
        tensor_size: number of ranks that share every layer.
        reshard_after_forward: whether weights are gathered again for the backward pass instead of
            being kept since the forward pass.
        cpu_offload: whether weights, gradients and optimizer state lie in host memory (GPUs only).

    Raises:
        ConfigError: a value outside its range.

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023).
    """

    def __init__(
        self,
        *,
        num_workers: int,
        backend: str | None = None,
        tensor_size: int = 1,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
    ) -> None:
        super().__init__(num_workers=num_workers, backend=backend, tensor_size=tensor_size)
        self._reshard_after_forward, self._cpu_offload = reshard_after_forward, cpu_offload

    def share(self, model: nn.Module, ranks: Ranks, precision: Precision) -> SharedModel:
        """Divide layers by the model's plan, and every weight over the ranks that divide a batch.

        The blocks that the model's ``blocks()`` returns are moved and gathered one at a time.

        Under bfloat16 autocast weights are gathered in bfloat16, to which autocast would round them
        anyway; norms, which it computes in float32, are gathered by themselves. Gradients are
        reduced in float32, in which weights and optimizer state are kept.
        """
        mesh = ranks.mesh(precision.device, self.part_of_batch(0)[1], self.tensor_size)
        settings: dict[str, Any] = {
            "mesh": mesh["shard"],
            "reshard_after_forward": self._reshard_after_forward,
        }
        if self._cpu_offload and precision.device.type == "cuda":
            settings["offload_policy"] = fsdp.CPUOffloadPolicy()
        share_layers(model, mesh)
        if precision.settings.autocast_dtype == "bfloat16":
            for module in list(filter(_is_computed_in_float32, model.modules())):
                fsdp.fully_shard(module, **settings)
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    # sums with it stay in float32
                    module.register_forward_hook(lambda module, inputs, outputs: outputs.float())
            settings["mp_policy"] = fsdp.MixedPrecisionPolicy(
                torch.bfloat16, torch.float32, cast_forward_inputs=False
            )
        blocks_of = getattr(model, "blocks", list)
        for module in [*blocks_of(), model]:
            fsdp.fully_shard(module, **settings)
        return DividedModel(model)


def _is_computed_in_float32(module: nn.Module) -> bool:
    """Whether a module is a norm, or another layer whose parameters are all vectors."""
    parameters = list(module.parameters(recurse=False))
    is_vectors = hasattr(module, "normalized_shape") or all(
        parameter.ndim < 2 for parameter in parameters
    )
    return bool(parameters) and is_vectors and not any(module.children())
