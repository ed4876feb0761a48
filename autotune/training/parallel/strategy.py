"""How several processes share the work of one training; the base classes are one process that does all of it.

A *strategy* is the configuration's ``parallelism``: what is settled before there is a model. What it makes of a model is a
``SharedModel``: the model as this rank trains and scores it.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.training.parallel.ranks import Ranks

_LEAST_NORM = 1e-6
"""Added to the norm, as in ``torch.nn.utils.clip_grad_norm_``."""

Views = Callable[[nn.Module, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
"""Of outputs and targets."""


class SharedModel:
    """A model as one rank holds it.

    Args:
        model: whose parameters are trained and scored; those that another rank holds are on the meta device.
    """

    adds_gradients = False
    """Whether it runs forward and backward pass itself, by ``add_gradients``."""
    mixes_tensors = False
    """Whether some parameters are distributed tensors and others are not, so that no kernel takes them together."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, inputs: Tensor) -> Tensor:
        """The model's outputs, as it is trained."""
        outputs: Tensor = self.model(inputs)
        return outputs

    def add_gradients(self, inputs: Tensor, targets: Tensor) -> None:
        """Add the gradients of the batch's mean loss to this rank's parameters."""
        raise NotImplementedError

    def before_step(self) -> None:
        """Before the forward pass of a step: a technique may have let other parameters train since the one before."""

    def accumulating(self) -> contextlib.AbstractContextManager[object]:
        """Around a backward pass that is not the last one before the update."""
        return contextlib.nullcontext()

    def trained_parameters(self) -> Iterable[nn.Parameter]:
        """The parameters that this rank's optimizer steps, or their parts."""
        return self.model.parameters()

    def gradient_norm(self) -> Tensor:
        """The Euclidean norm of the gradients of all parameters, those that other ranks hold included; a scalar on the device."""
        return norm_of(each.grad for each in self.trained_parameters())

    def clip_gradients(self, max_norm: float) -> None:
        """Scale this rank's gradients down by what brings the norm over all ranks down to ``max_norm``.

        Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks" (ICML 2013).
        """
        scale = (max_norm / (self.gradient_norm() + _LEAST_NORM)).clamp(max=1.0)
        gradients = [each.grad for each in self.trained_parameters() if each.grad is not None]
        for gradient in (each.to_local() if isinstance(each, DTensor) else each for each in gradients):
            gradient.mul_(scale)

    def after_update(self) -> None:
        """After the optimizer's step."""

    def synchronise(self, model: nn.Module) -> None:
        """Make a model, the trained one or an average of its weights, one model: the same on every rank that holds it."""

    @contextlib.contextmanager
    def scoring(self, model: nn.Module) -> Iterator[None]:
        """Around scoring a model: all ranks score one, and go on training with what each of them had before."""
        self.synchronise(model)
        yield

    def outputs(self, model: nn.Module, views: Views, inputs: Tensor) -> Tensor | None:
        """The outputs of the model that is scored, its own or an average of its weights; None on a rank that has none."""
        return views(model, inputs)

    @property
    def counts(self) -> bool:
        """Whether this rank's scores are to be summed; another one may hold the same."""
        return True

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The state of the model that is scored, whole, on the first rank; every rank calls it."""
        return model.state_dict()


def norm_of(gradients: Iterable[Tensor | None]) -> Tensor:
    """The Euclidean norm of gradients, None left out; of distributed tensors that of the whole ones, on every rank."""
    groups: dict[Any, list[Tensor]] = {}
    for each in gradients:
        if each is not None:
            groups.setdefault((each.device_mesh, each.placements) if isinstance(each, DTensor) else None, []).append(each)
    norms = [get_total_norm(each) for each in groups.values()]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in norms]
    return torch.stack([each.float() for each in whole]).norm() if whole else torch.zeros(())


BACKENDS = (None, "nccl", "gloo")


class Strategy:
    """How ranks share a training's work; by itself, every one does all of it.

    Args:
        num_workers: ranks.
        backend: what they exchange by, nccl or gloo; None for nccl between GPUs and gloo between CPUs.

    Raises:
        ConfigError: for no ranks, or another backend.
    """

    def __init__(self, *, num_workers: int, backend: str | None = None) -> None:
        if num_workers < 1:
            raise ConfigError(f"parallelism.num_workers: found {num_workers}, accepted is a whole number from 1")
        if backend not in BACKENDS:
            raise ConfigError(f"parallelism.backend: found {backend!r}, accepted are null, nccl, gloo")
        self.num_workers = num_workers

    def part_of_batch(self, rank: int) -> tuple[int, int]:
        """Which part of a batch a rank takes, of how many; ranks that share a layer take the same."""
        return 0, 1

    def check(self, config: TrialConfig, model: nn.Module, *, batch_size: int) -> None:
        """Refuse what cannot be trained in this way.

        Args:
            config: the training's.
            model: as it is before it is shared.
            batch_size: samples a step, over all ranks.

        Raises:
            ConfigError: with the key, what was found and what is accepted.
        """
        num_parts = self.part_of_batch(0)[1]
        if batch_size % num_parts:
            found = f"{batch_size}{' (the whole training split)' if batch_size < config.batch_size else ''}"
            raise ConfigError(f"batch_size: found {found}, accepted with {num_parts} workers that share a batch is a multiple of that")
        if config.runtime["cuda_graph"]:
            raise ConfigError("runtime.cuda_graph: found true, accepted with several workers is false")

    def share(self, model: nn.Module, ranks: Ranks, device: torch.device, loss: Loss) -> SharedModel:
        """The model as one rank holds it; its parameters are changed in place where they are shared out."""
        raise NotImplementedError


class Single(Strategy):
    """One process trains alone.

    Raises:
        ConfigError: for more than one worker.
    """

    def __init__(self, *, num_workers: int) -> None:
        if num_workers != 1:
            raise ConfigError(
                f"parallelism.num_workers: found {num_workers}, accepted with parallelism=single is 1; others: ddp, fsdp, ..."
            )
        super().__init__(num_workers=1)

    def check(self, config: TrialConfig, model: nn.Module, *, batch_size: int) -> None:
        """Anything can be trained so."""

    def share(self, model: nn.Module, ranks: Ranks, device: torch.device, loss: Loss) -> SharedModel:
        """The model as it is."""
        return SharedModel(model)


def needs_whole_weights(config: TrialConfig, strategy: str) -> None:
    """Refuse what reads or writes a model's weights as whole tensors on one rank.

    Raises:
        ConfigError: with the key.
    """
    for key, node, accepted in (
        ("averaging", config.averaging, "autotune.training.averaging.none"),
        ("technique", config.technique, "autotune.training.techniques.technique.NoTechnique"),
    ):
        if node["_target_"] != accepted:
            raise ConfigError(
                f"{key}: {node['_target_'].rpartition('.')[2]} needs whole weights; accepted with parallelism={strategy} is none"
            )
    if config.runtime["compile"] is not None:
        raise ConfigError(f"runtime.compile: found {config.runtime['compile']}, accepted with parallelism={strategy} is null")
    if config.precision["autocast_dtype"] == "float16":
        raise ConfigError(
            f"precision.autocast_dtype: float16 needs whole gradients; accepted with parallelism={strategy} are bfloat16, null"
        )
