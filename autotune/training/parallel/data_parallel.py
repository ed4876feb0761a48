"""Data parallelism: every rank takes its part of each batch, and gradients are averaged over ranks.

``DDP`` keeps a whole model on each rank, ``FSDP`` a part of every weight. Both may be crossed with tensor parallelism: ranks are then a
mesh of two dimensions, of which one shares the batch and the other every layer.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.training.parallel.ranks import Ranks
from autotune.training.parallel.strategy import Loss, SharedModel, Strategy, needs_whole_weights
from autotune.training.parallel.tensor_parallel import check_plan, share_layers

_COMPRESSIONS = (None, "bf16", "fp16", "powersgd")
_POWERSGD_WARM_UP = 2
"""Updates before gradients are compressed: ``start_powerSGD_iter`` must be above 1."""


class _DataParallel(Strategy):
    """What both have: a mesh whose first dimension shares the batch."""

    def __init__(self, *, num_workers: int, backend: str | None, tensor_size: int) -> None:
        super().__init__(num_workers=num_workers, backend=backend)
        if tensor_size < 1 or num_workers % tensor_size:
            raise ConfigError(
                f"parallelism.tensor_size: found {tensor_size}, accepted is a divisor of parallelism.num_workers = {num_workers}"
            )
        self.tensor_size = tensor_size

    def part_of_batch(self, rank: int) -> tuple[int, int]:
        """Ranks of one row of the mesh take the same part of a batch."""
        return rank // self.tensor_size, self.num_workers // self.tensor_size

    def check(self, config: TrialConfig, model: nn.Module, *, batch_size: int) -> None:
        """Refuse what cannot be trained in this way.

        Raises:
            ConfigError: the model has no plan for sharing its layers.
        """
        super().check(config, model, batch_size=batch_size)
        if self.tensor_size > 1:
            check_plan(config, model, self.tensor_size)

    def _mesh(self, device: torch.device) -> DeviceMesh:
        shape = (self.num_workers // self.tensor_size, self.tensor_size)
        return init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))


class DDP(_DataParallel):
    """torch's DistributedDataParallel, with gradients compressed or, with ``local_steps``, weights averaged in their place.

    Args:
        num_workers: ranks.
        tensor_size: of them, how many share every layer.
        bucket_megabytes: gradients that are reduced at once; None is torch's own.
        gradient_as_bucket_view: gradients lie in the buckets, which saves a copy of them.
        static_graph: the same parameters are used in every step.
        find_unused_parameters: some may not be.
        compression: of the gradients that are exchanged: None, ``bf16``, ``fp16`` or ``powersgd``.
        powersgd_rank: of the matrices that approximate a gradient.
        local_steps: with n above 1, ranks train by themselves and average their weights every n updates (local SGD).
        local_after: updates until then, with gradients averaged as ever (post-local SGD).

    Raises:
        ConfigError: values that do not go together.

    Source: Vogels et al., "PowerSGD" (2019); Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (2020).
    """

    def __init__(
        self,
        *,
        num_workers: int,
        backend: str | None = None,
        tensor_size: int = 1,
        bucket_megabytes: int | None = None,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        compression: str | None = None,
        powersgd_rank: int = 1,
        local_steps: int = 1,
        local_after: int = 0,
    ) -> None:
        super().__init__(num_workers=num_workers, backend=backend, tensor_size=tensor_size)
        if compression not in _COMPRESSIONS:
            raise ConfigError(f"parallelism.compression: found {compression!r}, accepted are null, bf16, fp16, powersgd")
        for key, value, least in (
            ("bucket_megabytes", bucket_megabytes, 1),
            ("powersgd_rank", powersgd_rank, 1),
            ("local_steps", local_steps, 1),
            ("local_after", local_after, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"parallelism.{key}: found {value}, accepted is a whole number from {least}")
        if local_steps > 1 and compression is not None:
            raise ConfigError(f"parallelism.local_steps: found {local_steps} beside compression={compression}, accepted beside it is 1")
        if compression == "powersgd" and static_graph:
            raise ConfigError("parallelism.compression: powersgd cannot be had with static_graph=true; accepted beside it is false")
        self._arguments: dict[str, Any] = {
            "bucket_cap_mb": bucket_megabytes,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
        }
        self._compression, self._powersgd_rank = compression, powersgd_rank
        self._local_steps, self._local_after = local_steps, local_after

    def share(self, model: nn.Module, ranks: Ranks, device: torch.device, loss: Loss) -> SharedModel:
        """A whole model on every rank, or on every row of the mesh."""
        if self._compression == "bf16" and device.type != "cuda":
            raise ConfigError("parallelism.compression: found bf16, which needs NCCL; accepted without a GPU are null, fp16, powersgd")
        mesh, names, parts = self._mesh(device), list(model.state_dict()), {}
        if self.tensor_size > 1:
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform  # noqa: PLC0415  # as torch's tutorial has it

            share_layers(model, mesh["tensor"])
            parts = {name: value for name, value in model.named_parameters() if isinstance(value, DTensor)}
            _pre_dp_module_transform(model)
        made = nn.parallel.DistributedDataParallel(model, process_group=mesh["data"].get_group(), **self._arguments)
        shared = _Replicated(model, made, mesh, ranks, names, parts)
        if self._local_steps > 1:
            shared.average_every(self._local_steps, after=self._local_after)
        elif self._compression is not None:
            _compress(made, self._compression, self._powersgd_rank)
        return shared


class _Replicated(SharedModel):
    """A whole model on every rank, or on every row of the mesh.

    Args:
        names: of the model's state.
        parts: its parameters that ranks of a row share, as distributed tensors. torch's DDP is given their local parts, which take the
            tensors' place as parameters until the model is first called.
    """

    def __init__(
        self,
        model: nn.Module,
        made: nn.parallel.DistributedDataParallel,
        mesh: DeviceMesh,
        ranks: Ranks,
        names: Sequence[str],
        parts: Mapping[str, DTensor],
    ) -> None:
        super().__init__(model)
        self._made, self._mesh, self._ranks, self._names, self._parts = made, mesh, ranks, names, parts
        self._parameters = dict(model.named_parameters())
        self._averager: Any = None

    def __call__(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._made(inputs)
        return outputs

    def average_every(self, steps: int, *, after: int) -> None:
        """Average weights every so many updates, and no gradients then."""
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook  # noqa: PLC0415
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager  # noqa: PLC0415  # few want it

        group = self._mesh["data"].get_group()
        alone = [distributed.new_group([rank]) for rank in range(self._ranks.size)][self._ranks.rank]
        state = PostLocalSGDState(process_group=group, subgroup=alone, start_localSGD_iter=after)  # type: ignore[no-untyped-call]  # torch's
        self._made.register_comm_hook(state, post_localSGD_hook)
        self._averager = PeriodicModelAverager(period=steps, warmup_steps=after, process_group=group)

    def accumulating(self) -> contextlib.AbstractContextManager[object]:
        return self._made.no_sync()

    def after_update(self) -> None:
        if self._averager is not None:
            self._averager.average_parameters(iter(self._parameters.values()))

    def before_scoring(self) -> None:
        """Weights are averaged where ranks train by themselves; statistics of normalisation are the first rank's."""
        group = self._mesh["data"].get_group()
        with torch.no_grad():
            if self._averager is not None:
                for parameter in self._parameters.values():
                    distributed.all_reduce(parameter, group=group)
                    parameter.div_(distributed.get_world_size(group))
            for buffer in self.model.buffers():
                distributed.broadcast(buffer, group=group, group_src=0)

    @property
    def counts(self) -> bool:
        return self._mesh.get_local_rank("tensor") == 0

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        if not self._parts:
            return model.state_dict()
        state = model.state_dict() | {name: value.detach() for name, value in self._parameters.items()}
        for name, part in self._parts.items():
            local = DTensor.from_local(state[name], part.device_mesh, part.placements)
            state[name] = local.full_tensor()
        return {name: state[name] for name in self._names}


def _compress(made: nn.parallel.DistributedDataParallel, compression: str, rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: PLC0415  # few want it

    if compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=made.process_group, matrix_approximation_rank=rank, start_powerSGD_iter=_POWERSGD_WARM_UP
        )
        made.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hook = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[compression]
        made.register_comm_hook(made.process_group, hook)


class FSDP(_DataParallel):
    """torch's ``fully_shard``: every rank holds a part of each weight, its gradient and the optimizer's state.

    Args:
        num_workers: ranks.
        tensor_size: of them, how many share every layer.
        reshard_after_forward: weights are gathered once more for the backward pass, in place of being kept since the forward pass.
        cpu_offload: weights, gradients and optimizer lie in host memory (GPUs only).

    Raises:
        ConfigError: values that do not go together.

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

    def check(self, config: TrialConfig, model: nn.Module, *, batch_size: int) -> None:
        """Refuse what cannot be trained with weights in parts.

        Raises:
            ConfigError: a part of the training needs whole weights.
        """
        super().check(config, model, batch_size=batch_size)
        needs_whole_weights(config, "fsdp")

    def share(self, model: nn.Module, ranks: Ranks, device: torch.device, loss: Loss) -> SharedModel:
        """A part of every weight on each rank; the blocks that a model names are gathered one by one."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard  # noqa: PLC0415  # DDP does without

        mesh = self._mesh(device)
        if self.tensor_size > 1:
            share_layers(model, mesh["tensor"])
        offload = CPUOffloadPolicy() if self._cpu_offload and device.type == "cuda" else OffloadPolicy()
        blocks = list(model.blocks()) if callable(getattr(model, "blocks", None)) else []  # type: ignore[operator]  # a module may be called
        for part in [*blocks, model]:
            fully_shard(part, mesh=mesh["data"], reshard_after_forward=self._reshard_after_forward, offload_policy=offload)
        return _Sharded(model, mesh)


class _Sharded(SharedModel):
    """A model of distributed tensors."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(model)
        self._mesh = mesh

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)  # type: ignore[operator]  # of FSDPModule
        yield
        self.model.set_requires_gradient_sync(True)  # type: ignore[operator]  # of FSDPModule

    @property
    def counts(self) -> bool:
        return self._mesh.get_local_rank("tensor") == 0

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
