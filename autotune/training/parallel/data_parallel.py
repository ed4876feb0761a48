"""Data parallelism: every rank takes its part of each batch, and gradients are averaged over ranks.

``DDP`` keeps a whole model on each rank, ``FSDP`` a part of every weight. Both may be combined with
tensor parallelism: ranks then form a mesh of two dimensions; ranks along the first one divide each
batch, ranks along the second one (a row of the mesh) divide every layer.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError, check_counts
from autotune.training.parallel.ranks import Ranks
from autotune.training.parallel.strategy import (
    Loss,
    SharedModel,
    Strategy,
    global_norm,
    refuse_whole_weight_settings,
)
from autotune.training.parallel.tensor_parallel import check_plan, share_layers
from autotune.training.runtime import Precision

_COMPRESSIONS = (None, "bf16", "fp16", "powersgd")
_POWERSGD_WARM_UP = 2
"""Number of updates before gradients are compressed: torch wants ``start_powerSGD_iter`` above
1."""


class _DataParallel(Strategy):
    """Base class of ``DDP`` and ``FSDP``: a device mesh whose first dimension divides the batch."""

    def __init__(self, *, num_workers: int, backend: str | None, tensor_size: int) -> None:
        super().__init__(num_workers=num_workers, backend=backend)
        if tensor_size < 1 or num_workers % tensor_size:
            raise ConfigError(
                f"parallelism.tensor_size: found {tensor_size}, accepted is a divisor of"
                f" parallelism.num_workers = {num_workers}"
            )
        self.tensor_size = tensor_size

    def part_of_batch(self, rank: int) -> tuple[int, int]:
        """Which part of a batch a rank takes, and the number of parts.

        Ranks in one row of the mesh take the same part.
        """
        return rank // self.tensor_size, self.num_workers // self.tensor_size

    def check(self, config: TrialConfig, model: nn.Module, *, batch_size: int) -> None:
        """Refuse a training that cannot be data-parallel.

        Raises:
            ConfigError: a setting does not allow it, or ``tensor_size`` is above 1 and the model
                has no plan for sharing its layers.
        """
        super().check(config, model, batch_size=batch_size)
        if self.tensor_size > 1:
            check_plan(config, model, self.tensor_size)

    @property
    def divides_model(self) -> bool:
        """Whether ranks in a row of the mesh share the layers."""
        return self.tensor_size > 1

    def divide(self, model: nn.Module, ranks: Ranks, precision: Precision) -> None:
        """Split the layers that the model's plan names over the ranks in a row of the mesh."""
        self._share_layers(model, ranks, precision.device)
        model.to(precision.device)

    def _share_layers(self, model: nn.Module, ranks: Ranks, device: torch.device) -> None:
        if self.tensor_size > 1:
            share_layers(model, self._mesh(ranks, device)["tensor"])

    def _mesh(self, ranks: Ranks, device: torch.device) -> DeviceMesh:
        return ranks.mesh(
            device, data=self.num_workers // self.tensor_size, tensor=self.tensor_size
        )


class DDP(_DataParallel):
    """torch's DistributedDataParallel, optionally with compressed gradients, or with weights
    averaged instead of gradients.

    Args:
        num_workers: number of ranks.
        backend: torch.distributed backend; None for nccl between GPUs and gloo between CPUs.
        tensor_size: number of ranks that share every layer.
        bucket_megabytes: size of the buckets of gradients that are reduced at once; None for
            torch's own.
        gradient_as_bucket_view: whether gradients lie in the buckets, which saves a copy of them.
        static_graph: whether the same parameters are used in every step.
        find_unused_parameters: whether some parameters may be unused in a step.
        compression: how exchanged gradients are compressed: None, ``bf16``, ``fp16`` or
            ``powersgd``.
        powersgd_rank: rank of the matrices by which PowerSGD approximates a gradient.
        local_steps: with n above 1, ranks train by themselves and average their weights every n
            updates (local SGD).
        local_after: number of updates before that, with gradients averaged in each (post-local
            SGD).

    Raises:
        ConfigError: a value outside its range, or values that do not go together.

    Source: Vogels et al., "PowerSGD" (2019); Lin et al., "Don't Use Large Mini-Batches, Use Local
    SGD" (2020).
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
            raise ConfigError(
                f"parallelism.compression: found {compression!r}, accepted are null, bf16, fp16,"
                " powersgd"
            )
        check_counts(
            "parallelism",
            bucket_megabytes=bucket_megabytes,
            powersgd_rank=powersgd_rank,
            local_steps=local_steps,
        )
        check_counts("parallelism", 0, local_after=local_after)
        if local_steps > 1 and compression is not None:
            raise ConfigError(
                f"parallelism.local_steps: found {local_steps} beside compression={compression},"
                " accepted beside it is 1"
            )
        if compression == "powersgd" and static_graph:
            raise ConfigError(
                "parallelism.compression: powersgd cannot be had with static_graph=true; accepted"
                " beside it is false"
            )
        self._arguments: dict[str, Any] = {
            "bucket_cap_mb": bucket_megabytes,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
        }
        self._compression, self._powersgd_rank = compression, powersgd_rank
        self._local_steps, self._local_after = local_steps, local_after

    def share(
        self, model: nn.Module, ranks: Ranks, device: torch.device, loss: Loss
    ) -> SharedModel:
        """Give every rank, or every row of the mesh, the whole model."""
        if self._compression == "bf16" and device.type != "cuda":
            raise ConfigError(
                "parallelism.compression: found bf16, which needs NCCL; accepted without a GPU are"
                " null, fp16, powersgd"
            )
        mesh, names, dtensors = self._mesh(ranks, device), list(model.state_dict()), {}
        if self.tensor_size > 1:
            # as torch's tutorial has it
            from torch.distributed.tensor.parallel.ddp import (  # noqa: PLC0415
                _pre_dp_module_transform,
            )

            dtensors = {
                name: parameter
                for name, parameter in model.named_parameters()
                if isinstance(parameter, DTensor)
            }
            _pre_dp_module_transform(model)
        group = mesh["data"].get_group()
        register_hook = self._hook_registration(group)

        def wrap(*, init_sync: bool) -> nn.parallel.DistributedDataParallel:
            ddp = nn.parallel.DistributedDataParallel(
                model, process_group=group, init_sync=init_sync, **self._arguments
            )
            register_hook(ddp)
            return ddp

        average_every = None if self._local_steps == 1 else (self._local_steps, self._local_after)
        return _Replicated(model, wrap, mesh, names, dtensors, average_every)

    def _hook_registration(
        self, group: distributed.ProcessGroup
    ) -> Callable[[nn.parallel.DistributedDataParallel], None]:
        """A function that registers the communication hook of these settings with a DDP model."""
        if self._local_steps > 1:
            from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: PLC0415  # rare
                post_localSGD_hook as local_sgd,
            )

            state = local_sgd.PostLocalSGDState(  # type: ignore[no-untyped-call]  # torch's
                group, None, self._local_after, post_local_gradient_allreduce=False
            )
            return lambda ddp: ddp.register_comm_hook(state, local_sgd.post_localSGD_hook)
        if self._compression is None:
            return lambda ddp: None
        compression, rank = self._compression, self._powersgd_rank
        return lambda ddp: _compress(ddp, compression, rank)


class _Replicated(SharedModel):
    """A model that every rank, or every row of the mesh, holds as a whole.

    Args:
        model: the model that is trained.
        wrap: wraps the model in torch's DDP for the parameters that train at that time; with
            ``init_sync``, ranks take the first rank's weights.
        mesh: device mesh of the ranks, with the dimensions ``data`` and ``tensor``.
        names: keys of the model's state, in order.
        dtensors: the parameters that ranks in a row of the mesh share, as distributed tensors.
            torch's DDP is given their local parts, which replace them as the model's parameters
            until the model is first called.
        average_every: updates from one averaging of the weights to the next, and the number of
            updates before the first one; None if gradients are exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        wrap: Callable[..., nn.parallel.DistributedDataParallel],
        mesh: DeviceMesh,
        names: Sequence[str],
        dtensors: Mapping[str, DTensor],
        average_every: tuple[int, int] | None,
    ) -> None:
        super().__init__(model)
        self._wrap, self._ddp = wrap, wrap(init_sync=True)
        self._mesh, self._names, self._dtensors = mesh, names, dtensors
        self._parameters = dict(model.named_parameters())
        self._requires_grad = self._which_require_grad()
        self._average_every, self._num_updates = average_every, 0

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
            self._ddp, self._requires_grad = self._wrap(init_sync=False), requires_grad

    def _which_require_grad(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters.values()]

    def accumulating(self) -> contextlib.AbstractContextManager[object]:
        return self._ddp.no_sync()

    def trained_parameters(self) -> Iterable[nn.Parameter]:
        """The parameters that torch's DDP was given.

        After its first call the model no longer lists those that a row of the mesh shares.
        """
        return self._parameters.values()

    def gradient_norm(self) -> Tensor:
        """The Euclidean norm of the gradients of the whole layers, of which the ranks in a row
        of the mesh may hold parts.
        """
        split = {
            name
            for name, value in self._dtensors.items()
            if not all(placement.is_replicate() for placement in value.placements)
        }
        squared = global_norm(
            parameter.grad for name, parameter in self._parameters.items() if name not in split
        ).square()
        if split:
            split_squared = global_norm(self._parameters[name].grad for name in split).square()
            distributed.all_reduce(split_squared, group=self._mesh["tensor"].get_group())
            squared = squared + split_squared
        return squared.sqrt()

    def after_update(self) -> None:
        """Average the weights over ranks if they train by themselves and ``average_every`` says
        that it is time.
        """
        if self._average_every is not None:
            period, first = self._average_every
            if self._num_updates >= first and (self._num_updates - first) % period == 0:
                _average(list(self._parameters.values()), self._mesh["data"].get_group())
            self._num_updates += 1

    def synchronise(self, model: nn.Module) -> None:
        """Average a model's weights if ranks train by themselves.

        Give all ranks the first one's buffers, such as norm statistics.
        """
        group = self._mesh["data"].get_group()
        if self._average_every is not None:
            _average(self._weights_of(model), group)
        _broadcast_buffers(model, group)

    @contextlib.contextmanager
    def scoring(self, model: nn.Module) -> Iterator[None]:
        """Synchronise a model for scoring.

        Ranks that train by themselves get their own weights back, so that training is not changed.
        """
        weights = [] if self._average_every is None else self._weights_of(model)
        own_weights = [weight.detach().clone() for weight in weights]
        with super().scoring(model):
            try:
                yield
            finally:
                with torch.no_grad():
                    for weight, own_weight in zip(weights, own_weights, strict=True):
                        weight.copy_(own_weight)

    def _weights_of(self, model: nn.Module) -> list[Tensor]:
        return list(self._parameters.values() if model is self.model else model.parameters())

    @property
    def scores_alone(self) -> bool:
        return self._mesh.size(1) == 1  # no layer is divided

    @property
    def counts(self) -> bool:
        return self._mesh.get_local_rank("tensor") == 0

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        if not self._dtensors:
            return model.state_dict()
        state = model.state_dict() | {
            name: parameter.detach() for name, parameter in self._parameters.items()
        }
        for name, dtensor in self._dtensors.items():
            state[name] = DTensor.from_local(
                state[name], dtensor.device_mesh, dtensor.placements
            ).full_tensor()
        return {name: state[name] for name in self._names}


@torch.no_grad()
def _average(weights: Sequence[Tensor], group: distributed.ProcessGroup) -> None:
    """Set each weight to its mean over a group's ranks, in place, since a ``WeightAverage``
    refers to the same tensors.
    """
    for dtype in dict.fromkeys(weight.dtype for weight in weights):
        alike = [weight for weight in weights if weight.dtype is dtype]
        flat = torch.cat([weight.reshape(-1) for weight in alike]) / distributed.get_world_size(
            group
        )
        distributed.all_reduce(flat, group=group)
        for weight, mean in zip(
            alike, torch.split(flat, [weight.numel() for weight in alike]), strict=True
        ):
            weight.copy_(mean.view(weight.shape))


@torch.no_grad()
def _broadcast_buffers(model: nn.Module, group: distributed.ProcessGroup) -> None:
    for buffer in model.buffers():
        distributed.broadcast(
            buffer.to_local() if isinstance(buffer, DTensor) else buffer, group=group, group_src=0
        )


def _compress(ddp: nn.parallel.DistributedDataParallel, compression: str, rank: int) -> None:
    # few want it
    from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: PLC0415
        default_hooks,
        powerSGD_hook,
    )

    if compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=ddp.process_group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=_POWERSGD_WARM_UP,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hook = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[
            compression
        ]
        ddp.register_comm_hook(ddp.process_group, hook)


class FSDP(_DataParallel):
    """torch's ``fully_shard``: every rank holds a part of each weight, its gradient and the
    optimizer's state.

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

    def check(self, config: TrialConfig, model: nn.Module, *, batch_size: int) -> None:
        """Refuse a training that cannot have its weights sharded.

        Raises:
            ConfigError: a setting does not allow it, such as a technique or an averaging that needs
                whole weights.
        """
        super().check(config, model, batch_size=batch_size)
        refuse_whole_weight_settings(config, "fsdp")

    @property
    def divides_model(self) -> bool:
        """Always."""
        return True

    def divide(self, model: nn.Module, ranks: Ranks, precision: Precision) -> None:
        """Shard every weight over the ranks.

        The blocks that the model's ``blocks()`` returns are moved and gathered one at a time.

        Under bfloat16 autocast weights are gathered in bfloat16, to which autocast would round them
        anyway; norms, which it computes in float32, are gathered by themselves. Gradients are
        reduced in float32, in which weights and optimizer state are kept.
        """
        from torch.distributed.fsdp import (  # noqa: PLC0415  # DDP does without
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        device = precision.device
        self._share_layers(model, ranks, device)
        offloads = self._cpu_offload and device.type == "cuda"
        settings: dict[str, Any] = {
            "mesh": self._mesh(ranks, device)["data"],
            "reshard_after_forward": self._reshard_after_forward,
            "offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy(),
        }
        if precision.settings.autocast_dtype == "bfloat16":
            for module in [module for module in model.modules() if _is_computed_in_float32(module)]:
                fully_shard(module, **settings)
            for embedding in [
                module for module in model.modules() if isinstance(module, nn.Embedding)
            ]:
                # sums with it stay in float32
                embedding.register_forward_hook(lambda module, inputs, outputs: outputs.float())
            settings["mp_policy"] = MixedPrecisionPolicy(
                torch.bfloat16, torch.float32, cast_forward_inputs=False
            )
        blocks_of = getattr(model, "blocks", None)
        blocks = list(blocks_of()) if callable(blocks_of) else []
        for module in [*blocks, model]:
            fully_shard(module, **settings)

    def share(
        self, model: nn.Module, ranks: Ranks, device: torch.device, loss: Loss
    ) -> SharedModel:
        """The divided model, whose state is gathered from all ranks."""
        return _Sharded(model, self._mesh(ranks, device))


def _is_computed_in_float32(module: nn.Module) -> bool:
    """Whether a module is a norm, or another layer whose parameters are all vectors."""
    parameters = list(module.parameters(recurse=False))
    is_vectors = hasattr(module, "normalized_shape") or all(
        parameter.ndim < 2 for parameter in parameters
    )
    return bool(parameters) and is_vectors and not any(module.children())


class _Sharded(SharedModel):
    """A model under torch's ``fully_shard``: its parameters are distributed tensors."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(model)
        self._mesh = mesh

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)  # type: ignore[operator]  # of FSDPModule
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)  # type: ignore[operator]  # of FSDPModule

    def synchronise(self, model: nn.Module) -> None:
        """Give all ranks the first rank's buffers, which are not sharded."""
        _broadcast_buffers(model, self._mesh["data"].get_group())

    @property
    def counts(self) -> bool:
        return self._mesh.get_local_rank("tensor") == 0

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        return get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
