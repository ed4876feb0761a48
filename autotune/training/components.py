"""Makes the components of a configuration's training: model, optimizer, schedule, loss, metric and
the others.

A component's callable receives the configuration's values, and further arguments if its signature
names them and the configuration does not set them: a model ``input_shape`` and ``num_classes``, an
augmentation ``num_samples`` and ``device``, a technique ``input_shape``, ``num_classes``,
``device`` and ``allowed_targets``, an optimizer ``model``, ``batch_size`` and ``total_steps``. An
optimizer whose signature does not name ``model`` receives the model's parameters as its first
argument, like torch's optimizers.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from autotune.config.build import accepted_arguments, build, build_partial, call
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.training.averaging import ExponentialMovingAverage
from autotune.training.data import LoadedData
from autotune.training.parallel.ranks import ALONE, Ranks
from autotune.training.parallel.strategy import SharedModel, Strategy
from autotune.training.runtime import Precision, checkpoint_activations
from autotune.training.techniques.technique import Technique

Score = Callable[[Tensor, Tensor], Tensor]
Views = Callable[[nn.Module, Tensor], Tensor]

_INITIALISE_SAMPLES = 5_000
"""Upper limit on the training samples that are passed to a model's ``initialise_from``."""
_KERNELS: dict[str | None, dict[str, bool]] = {
    None: {},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for_loop": {"foreach": False},
}
"""Arguments of torch's optimizers by value of ``runtime.optimizer_kernels``."""


class Augmentation(Protocol):
    """Callable that augments the inputs of a training batch on the device.

    The contract is in ``autotune.training.augmentation``.
    """

    def __call__(self, inputs: Tensor, *, samples: Tensor, epoch: int, progress: float) -> Tensor:
        """The augmented inputs of a batch.

        Args:
            inputs: inputs of the batch, ``[batch, ...]``.
            samples: indices of the samples in the training split, ``[batch]``.
            epoch: number of whole passes over the training split so far.
            progress: fraction of the schedule's steps done.
        """


@dataclass(frozen=True, kw_only=True)
class BoundParts:
    """The components that compiled code and CUDA graphs are bound to: later trainings that use
    those use these.
    """

    model: nn.Module
    shared: SharedModel
    """The model as this rank trains and scores it."""
    technique: Technique
    loss: Score


@dataclass(frozen=True, kw_only=True)
class Components(BoundParts):
    """The components that one training is made of."""

    optimizer: torch.optim.Optimizer
    schedule: LRScheduler | None
    average: ExponentialMovingAverage | None
    augment: Augmentation
    metric: Score
    """Metric that the target is stated in; the contract is in ``autotune.training.metrics``."""
    views: Views
    scaler: torch.amp.GradScaler | None

    @property
    def evaluated_model(self) -> nn.Module:
        """Model that is scored and saved: the average of the weights if there is one, else the
        trained model.
        """
        return self.model if self.average is None else self.average.model


def make_components(
    config: TrialConfig,
    data: LoadedData,
    device: torch.device,
    total_steps: int,
    *,
    reuse: BoundParts | None = None,
    ranks: Ranks = ALONE,
) -> Components:
    """Make the components of a training; random numbers are drawn from torch's global generator.

    Args:
        config: configuration of the training.
        data: data set that the components are made for.
        device: device of the model.
        total_steps: number of steps of the schedule.
        reuse: components of an earlier training that are used again, because compiled code and CUDA
            graphs are bound to them; the model gets the weights of a fresh model.
        ranks: the ranks that train together.

    Raises:
        ConfigError: a component refuses its values.
    """
    allowed = config.allowed_targets
    precision = Precision(config.precision, device)
    shapes = {"input_shape": tuple(data.example.shape), "num_classes": data.num_classes}
    technique = make_part(
        config.technique, allowed, "technique", device=device, allowed_targets=allowed, **shapes
    )
    strategy = make_strategy(config)
    is_divided = strategy.divides_model and ranks.is_joined
    # No device need hold the whole of a model that ranks divide. Of a model for a bound one only
    # the state is needed, so it takes no memory of the device, unless it computes on the data
    # there.
    is_on_host = is_divided or (reuse is not None and not hasattr(reuse.model, "initialise_from"))
    place = torch.device("cpu") if is_on_host else device
    model = _make_model(config, data, place, precision, shapes)
    strategy.check(config, model, batch_size=min(config.batch_size, len(data.train)))
    technique.start(model)
    if reuse is None:
        if config.runtime.activation_checkpointing:
            checkpoint_activations(model, recompute_statistics=config.runtime.compile is not None)
        loss = make_part(config.loss, allowed, "loss")
        shared = strategy.share(model, ranks, precision) if ranks.is_joined else SharedModel(model)
    else:
        reset_model(reuse.model, model)
        model, technique, loss, shared = reuse.model, reuse.technique, reuse.loss, reuse.shared
    optimizer = _make_optimizer(
        config,
        model,
        len(data.train),
        total_steps,
        mixes_tensors=is_divided and strategy.tensor_size > 1,
    )
    return Components(
        model=model,
        shared=shared,
        optimizer=optimizer,
        schedule=build(config.lr_schedule, allowed, "lr_schedule", optimizer, total_steps),
        average=build(config.averaging, allowed, "averaging", model, total_steps),
        augment=make_part(
            config.augmentation, allowed, "augmentation", num_samples=len(data.train), device=device
        ),
        technique=technique,
        loss=loss,
        metric=make_part(config.metric, allowed, "metric"),
        views=make_part(config.views, allowed, "views"),
        scaler=precision.make_scaler(),
    )


def make_strategy(config: TrialConfig) -> Strategy:
    """Make the strategy that the configuration's ``parallelism`` names.

    Raises:
        ConfigError: the strategy refuses its values, or the target is not a ``Strategy``.
    """
    strategy = make_part(config.parallelism, config.allowed_targets, "parallelism")
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"parallelism: {config.parallelism['_target_']} is no Strategy; use a subclass"
            " of autotune's"
        )
    return strategy


def _make_model(
    config: TrialConfig,
    data: LoadedData,
    device: torch.device,
    precision: Precision,
    shapes: Mapping[str, Any],
) -> nn.Module:
    """The model with its initial weights on a device."""
    model = build(config.model, config.allowed_targets, "model", **shapes)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model: {config.model['_target_']} returned {type(model).__name__}; it must return a"
            " torch.nn.Module"
        )
    model = precision.convert(model.to(device))
    if config.runtime.channels_last:
        # missing in torch's stubs
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if callable(initialise_from := getattr(model, "initialise_from", None)):
        every = max(1, len(data.train) // _INITIALISE_SAMPLES)
        inputs = data.train.inputs[::every][:_INITIALISE_SAMPLES]
        initialise_from(data.transform(inputs.to(device)))
    return model


def reset_model(trained: nn.Module, fresh: nn.Module) -> None:
    """Give a trained model, in place, the state of a fresh model of the same configuration."""
    trained.load_state_dict(fresh.state_dict())
    for parameter, fresh_parameter in zip(trained.parameters(), fresh.parameters(), strict=True):
        parameter.requires_grad_(fresh_parameter.requires_grad)
        parameter.grad = None


def _make_optimizer(
    config: TrialConfig,
    model: nn.Module,
    num_samples: int,
    total_steps: int,
    *,
    mixes_tensors: bool,
) -> torch.optim.Optimizer:
    """The optimizer; with ``mixes_tensors`` no kernel can take all parameters together, since
    they are distributed tensors of several kinds, or only some of them are.
    """
    factory = build_partial(config.optimizer, config.allowed_targets, "optimizer")
    offered = {
        "model": model,
        "batch_size": min(config.batch_size, num_samples),
        "total_steps": total_steps,
    }
    known = inspect.signature(factory.func).parameters
    kernels = _KERNELS[config.runtime.optimizer_kernels]
    if unknown := set(kernels) - set(known):
        raise ConfigError(
            f"runtime.optimizer_kernels: found {config.runtime.optimizer_kernels}, and"
            f" {config.optimizer['_target_']} has no {', '.join(unknown)}; use null"
        )
    arguments = accepted_arguments(factory, offered) | kernels
    if mixes_tensors and "foreach" in known:
        arguments["foreach"] = False
    positional = () if "model" in arguments else (list(model.parameters()),)
    optimizer = call(factory, "optimizer", *positional, **arguments)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: {config.optimizer['_target_']} returned {type(optimizer).__name__},"
            " must be a torch Optimizer"
        )
    return optimizer


def make_part(node: Mapping[str, Any], allowed: Sequence[str], where: str, **offered: Any) -> Any:
    """Make a component from its configuration node: an object if the target is a class, else a
    partial with the node's values bound.

    Raises:
        ConfigError: the target refuses its values, or the object is a loss, metric, augmentation or
            views that is not callable.
    """
    factory = build_partial(node, allowed, where)
    if not inspect.isclass(factory.func):
        return factory
    part = call(factory, where, **accepted_arguments(factory, offered))
    if where not in ("technique", "parallelism") and not callable(part):
        raise ConfigError(
            f"{where}: {node['_target_']} made {type(part).__name__}, must be something that"
            " can be called"
        )
    return part
