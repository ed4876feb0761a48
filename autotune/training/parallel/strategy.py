"""The strategies by which several ranks share one training: base classes, and the strategy of a
single process.

A *strategy* is what the configuration's ``parallelism`` names, and exists before the model. It
turns a model into a ``SharedModel``: the model as one rank trains and scores it. The base class
``SharedModel`` is a model that one process trains alone.
"""

import contextlib
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError, check_choice, check_counts
from autotune.training.parallel.ranks import Ranks
from autotune.training.runtime import Precision


class SharedModel:
    """A model as one rank holds it.

    Args:
        model: the model that is trained.
    """

    scores_alone = False
    """Whether ranks exchange nothing as they score the model, so that one that fails there leaves
    none waiting."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, inputs: Tensor) -> Tensor:
        """The model's outputs in training."""
        outputs: Tensor = self.model(inputs)
        return outputs

    def before_step(self) -> None:
        """Hook before the forward pass of a step: a technique may have frozen or unfrozen
        parameters since the last step.
        """

    def accumulating(self) -> contextlib.AbstractContextManager[object]:
        """Context for every backward pass of an update but the last one."""
        return contextlib.nullcontext()

    def gradient_norm(self) -> Tensor:
        """The Euclidean norm of the gradients of all parameters, including those on other ranks.

        A scalar on the device.
        """
        # no kernel takes distributed tensors of different layouts together
        layouts: dict[Any, list[Tensor]] = defaultdict(list)
        for parameter in self.model.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                layouts[gradient.device_mesh, gradient.placements].append(gradient)
            elif gradient is not None:
                layouts[None].append(gradient)
        norms = [get_total_norm(gradients) for gradients in layouts.values()] or [torch.zeros(())]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        total: Tensor = torch.stack([norm.float() for norm in whole]).norm()
        return total

    def clip_gradients(self, max_norm: float) -> None:
        """Scale this rank's gradients so that the gradient norm over all ranks is at most
        ``max_norm``.

        Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural
        networks" (ICML 2013).
        """
        # distributed tensors and others do not go into one foreach kernel
        clip_grads_with_norm_(
            self.model.parameters(), max_norm, self.gradient_norm(), foreach=False
        )


class Strategy:
    """How ranks share a training's work.

    Args:
        num_workers: number of ranks.
        backend: torch.distributed backend, nccl or gloo; None for nccl between GPUs and gloo
            between CPUs.
        tensor_size: number of neighbouring ranks that share every layer, and take the same part of
            each batch; None for all, which then take whole batches.

    Raises:
        ConfigError: the number of ranks is below 1 or no multiple of ``tensor_size``, or the
            backend is unknown.
    """

    divides_model = False
    """Whether each rank holds a part of the model only: then ``share`` is given the whole model in
    host memory, and brings this rank's part of it to the device."""

    def __init__(
        self, *, num_workers: int, backend: str | None = None, tensor_size: int | None = None
    ) -> None:
        check_counts("parallelism", num_workers=num_workers, tensor_size=tensor_size)
        check_choice("parallelism.backend", backend, (None, "nccl", "gloo"))
        self.num_workers, self.tensor_size = num_workers, tensor_size or num_workers
        if num_workers % self.tensor_size:
            raise ConfigError(
                f"parallelism.tensor_size: found {tensor_size}, use a divisor of"
                f" parallelism.num_workers = {num_workers}"
            )

    def part_of_batch(self, rank: int) -> tuple[int, int]:
        """Which part of a batch a rank takes, and the number of parts."""
        return rank // self.tensor_size, self.num_workers // self.tensor_size

    def check(self, config: TrialConfig, model: nn.Module, *, batch_size: int) -> None:
        """Refuse a training that does not work with this strategy.

        Args:
            config: the training's configuration.
            model: the model before it is shared.
            batch_size: samples in a step, over all ranks.

        Raises:
            ConfigError: the training is refused; the message has the key, what was found and what
                to use.
        """
        num_parts = self.part_of_batch(0)[1]
        if batch_size % num_parts:
            whole = " (the whole training split)" if batch_size < config.batch_size else ""
            raise ConfigError(
                f"batch_size: found {batch_size}{whole}, use a multiple of {num_parts}, the number"
                " of workers that share a batch"
            )
        if config.runtime.cuda_graph and self.num_workers > 1:
            raise ConfigError("runtime.cuda_graph: found true, use false with several workers")
        if self.divides_model:
            _refuse_whole_weight_settings(config)

    def share(self, model: nn.Module, ranks: Ranks, precision: Precision) -> SharedModel:
        """The model as one rank trains and scores it, on the precision's device."""
        return SharedModel(model)


class Single(Strategy):
    """One process trains alone.

    Raises:
        ConfigError: the number of workers is not 1.
    """

    def __init__(self, *, num_workers: int) -> None:
        super().__init__(num_workers=num_workers)
        if num_workers != 1:
            raise ConfigError(
                f"parallelism.num_workers: found {num_workers}, use 1 with parallelism=single;"
                " others: ddp, fsdp, ..."
            )


def _refuse_whole_weight_settings(config: TrialConfig) -> None:
    """Refuse settings that read or write a model's weights or gradients as whole tensors on one
    rank.
    """
    for key, needs_whole, use in (
        ("averaging", not config.averaging["_target_"].endswith(".averaging.none"), "none"),
        ("technique", not config.technique["_target_"].endswith(".NoTechnique"), "none"),
        ("runtime.compile", config.runtime.compile is not None, "null"),
        (
            "precision.autocast_dtype",
            config.precision.autocast_dtype == "float16",
            "bfloat16 or null",
        ),
    ):
        if needs_whole:
            strategy = config.parallelism["_target_"].rpartition(".")[2]
            raise ConfigError(
                f"{key}: {strategy} divides weights, and this needs whole ones; use {use}"
            )
