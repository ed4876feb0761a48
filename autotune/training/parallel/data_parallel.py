"""Data parallelism: every rank takes its part of each batch, and gradients are averaged over ranks.

``DDP`` keeps a whole model on each rank, ``FSDP`` a part of every weight. Both may be crossed with tensor parallelism: ranks are then a
mesh of two dimensions, of which one shares the batch and the other every layer.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.training.parallel.ranks import Ranks
from autotune.training.parallel.strategy import Loss, SharedModel, Strategy, needs_whole_weights, norm_of
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
        group = mesh["data"].get_group()
        register = self._exchange(group, ranks)

        def wrapped(*, init_sync: bool) -> nn.parallel.DistributedDataParallel:
            made = nn.parallel.DistributedDataParallel(model, process_group=group, init_sync=init_sync, **self._arguments)
            register(made)
            return made

        average_every = None if self._local_steps == 1 else (self._local_steps, self._local_after)
        return _Replicated(model, wrapped, mesh, names, parts, average_every)

    def _exchange(self, group: distributed.ProcessGroup, ranks: Ranks) -> Callable[[nn.parallel.DistributedDataParallel], None]:
        """What has a wrapped model exchange its gradients otherwise than torch's DDP would; every rank of all calls it."""
        if self._local_steps > 1:
            from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook  # noqa: PLC0415  # few want it

            alone = [distributed.new_group([rank]) for rank in range(ranks.size)][ranks.rank]
            state = PostLocalSGDState(process_group=group, subgroup=alone, start_localSGD_iter=self._local_after)  # type: ignore[no-untyped-call]  # torch's
            return lambda made: made.register_comm_hook(state, post_localSGD_hook)
        if self._compression is None:
            return lambda made: None
        compression, rank = self._compression, self._powersgd_rank
        return lambda made: _compress(made, compression, rank)


class _Replicated(SharedModel):
    """A whole model on every rank, or on every row of the mesh.

    Args:
        model: that is shared.
        wrapped: makes torch's DDP of it, for the parameters that then train; ``init_sync`` is whether ranks take the first one's weights.
        mesh: of the ranks.
        names: of the model's state.
        parts: its parameters that ranks of a row share, as distributed tensors. torch's DDP is given their local parts, which take the
            tensors' place as parameters until the model is first called.
        average_every: updates from one averaging of the weights to the next, and the number of updates before the first one; None where
            gradients are exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        wrapped: Callable[..., nn.parallel.DistributedDataParallel],
        mesh: DeviceMesh,
        names: Sequence[str],
        parts: Mapping[str, DTensor],
        average_every: tuple[int, int] | None,
    ) -> None:
        super().__init__(model)
        self._wrapped, self._made = wrapped, wrapped(init_sync=True)
        self._mesh, self._names, self._parts = mesh, names, parts
        self._parameters = dict(model.named_parameters())
        self._trained = self._which_train()
        self._average_every, self._num_updates = average_every, 0

    def __call__(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._made(inputs)
        return outputs

    def before_step(self) -> None:
        """Make torch's DDP anew where other parameters train than when it was made: it exchanges the gradients of those alone."""
        if (trained := self._which_train()) != self._trained:
            self._made._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # noqa: SLF001  # the old one would go on exchanging
            self._made, self._trained = self._wrapped(init_sync=False), trained

    def _which_train(self) -> list[bool]:
        return [each.requires_grad for each in self._parameters.values()]

    def accumulating(self) -> contextlib.AbstractContextManager[object]:
        return self._made.no_sync()

    def trained_parameters(self) -> Iterable[nn.Parameter]:
        """Those that torch's DDP was given: of layers that ranks of a row share, the model itself has none once it was called."""
        return self._parameters.values()

    def gradient_norm(self) -> Tensor:
        """The norm over the whole layers, of which ranks of a row of the mesh may hold parts."""
        split = {name for name, part in self._parts.items() if not all(each.is_replicate() for each in part.placements)}
        own = norm_of(each.grad for name, each in self._parameters.items() if name not in split).square()
        if split:
            shared = norm_of(self._parameters[name].grad for name in split).square()
            distributed.all_reduce(shared, group=self._mesh["tensor"].get_group())
            own = own + shared
        return own.sqrt()

    def after_update(self) -> None:
        """Average the weights, where ranks train by themselves and it is time."""
        if self._average_every is not None:
            period, first = self._average_every
            if self._num_updates >= first and (self._num_updates - first) % period == 0:
                _average(list(self._parameters.values()), self._mesh["data"].get_group())
            self._num_updates += 1

    def synchronise(self, model: nn.Module) -> None:
        """Weights are averaged where ranks train by themselves; buffers, as statistics of normalisation, are the first rank's."""
        group = self._mesh["data"].get_group()
        if self._average_every is not None:
            _average(self._weights_of(model), group)
        _take_buffers_of_first(model, group)

    @contextlib.contextmanager
    def scoring(self, model: nn.Module) -> Iterator[None]:
        """Ranks that train by themselves go on with their own weights: when they are evaluated is no part of what they learn."""
        weights = [] if self._average_every is None else self._weights_of(model)
        own = [each.detach().clone() for each in weights]
        with super().scoring(model):
            try:
                yield
            finally:
                with torch.no_grad():
                    for weight, before in zip(weights, own, strict=True):
                        weight.copy_(before)

    def _weights_of(self, model: nn.Module) -> list[Tensor]:
        return list(self._parameters.values() if model is self.model else model.parameters())

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


@torch.no_grad()
def _average(weights: Sequence[Tensor], group: distributed.ProcessGroup) -> None:
    """Put the mean over a group's ranks in the place of each tensor, which stays where it lies: averages of the weights look there."""
    for dtype in dict.fromkeys(each.dtype for each in weights):
        same = [each for each in weights if each.dtype is dtype]
        flat = torch.cat([each.reshape(-1) for each in same]) / distributed.get_world_size(group)
        distributed.all_reduce(flat, group=group)
        for weight, mean in zip(same, torch.split(flat, [each.numel() for each in same]), strict=True):
            weight.copy_(mean.view(weight.shape))


@torch.no_grad()
def _take_buffers_of_first(model: nn.Module, group: distributed.ProcessGroup) -> None:
    for buffer in model.buffers():
        distributed.broadcast(buffer.to_local() if isinstance(buffer, DTensor) else buffer, group=group, group_src=0)


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

    def synchronise(self, model: nn.Module) -> None:
        """Buffers, which are not shared out, are the first rank's."""
        _take_buffers_of_first(model, self._mesh["data"].get_group())

    @property
    def counts(self) -> bool:
        return self._mesh.get_local_rank("tensor") == 0

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
