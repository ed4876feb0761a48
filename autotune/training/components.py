"""Making the parts of a configuration's training, for one data set.

A part's callable is given, beside the configuration's values, those of the offered arguments that its signature names and the
configuration does not say: a model ``input_shape`` and ``num_classes``, an augmentation ``num_samples`` and ``device``, a
technique ``input_shape``, ``num_classes``, ``device`` and ``allowed_targets``, an optimizer ``model``, ``batch_size`` and
``total_steps``. An optimizer that does not name ``model`` is given the model's parameters, as torch's own take them.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from autotune.config.build import accepted_arguments, build, build_partial, call
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.training.averaging import WeightAverage
from autotune.training.data import LoadedData
from autotune.training.parallel.ranks import Ranks
from autotune.training.parallel.strategy import SharedModel, Strategy
from autotune.training.precision import FLOAT8_ROWS, Precision
from autotune.training.runtime import checkpoint_activations
from autotune.training.techniques.technique import Technique

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Views = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]

_INITIALISE_SAMPLES = 5_000
"""Training samples that a model which starts from data is shown."""


class Augmentation(Protocol):
    """What changes the inputs of a training batch, on the device."""

    def __call__(self, inputs: torch.Tensor, *, samples: torch.Tensor, epoch: int, progress: float) -> torch.Tensor:
        """The batch's inputs, changed.

        Args:
            inputs: ``[batch, ...]``.
            samples: index of each in the training split, ``[batch]``.
            epoch: passes over the training split so far.
            progress: fraction of the steps done.
        """


@dataclass(frozen=True, kw_only=True)
class Components:
    """What a training is made of, fresh."""

    model: torch.nn.Module
    shared: SharedModel
    """The model as this rank trains it."""
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler | None
    average: WeightAverage | None
    augment: Augmentation
    technique: Technique
    loss: Score
    metric: Score
    """A callable with the contract of ``autotune.training.metrics``."""
    views: Views
    scaler: torch.amp.GradScaler | None

    @property
    def evaluated_model(self) -> torch.nn.Module:
        """The model that is scored and kept: the average of the weights, where there is one."""
        return self.model if self.average is None else self.average.model


def make_components(
    config: TrialConfig,
    data: LoadedData,
    device: torch.device,
    total_steps: int,
    *,
    reuse: Components | None = None,
    ranks: Ranks | None = None,
) -> Components:
    """Make everything anew; random numbers are drawn from torch's global generator.

    Args:
        config: what to make.
        data: what it is for.
        device: where it is to be.
        total_steps: steps of the schedule.
        reuse: components whose model, technique and loss are taken again, the model's weights set to those of a fresh one:
            compiled code and CUDA graphs are bound to them.
        ranks: those that train together; None where nothing is to be trained, so that none need be there.

    Raises:
        ConfigError: a component refuses its values.
    """
    allowed = config.allowed_targets
    precision = Precision(config.precision, device)
    offered = {"device": device, "input_shape": data.input_shape, "num_classes": data.num_classes, "allowed_targets": allowed}
    technique = make_part(config.technique, allowed, "technique", **offered)
    model = _make_model(config, data, device, precision, offered)
    strategy = make_strategy(config)
    strategy.check(config, model, batch_size=min(config.batch_size, len(data.train)))
    if reuse is None:
        _check_float8_rows(config, data, model, precision, strategy.part_of_batch(0)[1])
    technique.start(model)
    if reuse is None:
        if config.runtime.activation_checkpointing:
            checkpoint_activations(model, recompute_statistics=config.runtime.compile is not None)
        loss = make_part(config.loss, allowed, "loss")
        shared = SharedModel(model)
        if ranks is not None and ranks.size > 1:
            shared = strategy.share(model, ranks, device, _loss_of_outputs(loss, precision))
    else:
        _take_over(reuse.model, model)
        model, technique, loss, shared = reuse.model, reuse.technique, reuse.loss, reuse.shared
    optimizer = _make_optimizer(config, shared, len(data.train), total_steps)
    return Components(
        model=model,
        shared=shared,
        optimizer=optimizer,
        schedule=call(build_partial(config.lr_schedule, allowed, "lr_schedule"), "lr_schedule", optimizer, total_steps),
        average=call(build_partial(config.averaging, allowed, "averaging"), "averaging", model, total_steps),
        augment=make_part(config.augmentation, allowed, "augmentation", num_samples=len(data.train), device=device),
        technique=technique,
        loss=loss,
        metric=make_part(config.metric, allowed, "metric"),
        views=make_part(config.views, allowed, "views"),
        scaler=precision.make_scaler(),
    )


def make_strategy(config: TrialConfig) -> Strategy:
    """The configuration's ``parallelism``.

    Raises:
        ConfigError: it refuses its values, or is something else.
    """
    made = make_part(config.parallelism, config.allowed_targets, "parallelism")
    if not isinstance(made, Strategy):
        raise ConfigError(f"parallelism: {config.parallelism['_target_']} is no Strategy; accepted is a subclass of autotune's")
    return made


def _loss_of_outputs(loss: Score, precision: Precision) -> Score:
    return lambda outputs, targets: loss(precision.outputs(outputs), targets)


def _make_model(
    config: TrialConfig, data: LoadedData, device: torch.device, precision: Precision, offered: Mapping[str, Any]
) -> torch.nn.Module:
    made = build_partial(config.model, config.allowed_targets, "model")
    model = call(made, "model", **accepted_arguments(made, {key: offered[key] for key in ("input_shape", "num_classes")}))
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model: {config.model['_target_']} returned {type(model).__name__}, accepted is a torch.nn.Module")
    model = precision.convert(model.to(device))
    if config.runtime.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs
    if callable(initialise_from := getattr(model, "initialise_from", None)):
        inputs = data.train.inputs[:: max(1, len(data.train) // _INITIALISE_SAMPLES)][:_INITIALISE_SAMPLES].to(device)
        initialise_from(data.transform(inputs))
    return model


def _check_float8_rows(config: TrialConfig, data: LoadedData, model: torch.nn.Module, precision: Precision, num_parts: int) -> None:
    """Refuse batches that float8 cannot multiply: what its layers are given of one sample, times the samples at once."""
    if not config.precision.float8:
        return
    whole = min(config.batch_size, len(data.train))
    size = whole // num_parts // config.parallelism.get("num_micro_batches", 1)
    at_once = min(size, config.runtime.micro_batch_size or size)
    key, found = ("batch_size", config.batch_size) if at_once == size else ("runtime.micro_batch_size", at_once)
    there = f" ({whole} are there)" if key == "batch_size" and whole < found else ""
    inputs = data.transform(data.train.inputs[:1].to(precision.device))
    for rows in precision.float8_rows(model, inputs):
        for samples in (at_once, size % at_once):
            if samples * rows % FLOAT8_ROWS:
                raise ConfigError(
                    f"{key}: found {found}{there}, which gives a float8 layer {samples * rows} rows at once; "
                    f"accepted are multiples of {FLOAT8_ROWS} rows"
                )


def _take_over(kept: torch.nn.Module, fresh: torch.nn.Module) -> None:
    """Give a model that has been trained the state of a fresh one of the same make, in place."""
    kept.load_state_dict(fresh.state_dict())
    for own, other in zip(kept.parameters(), fresh.parameters(), strict=True):
        own.requires_grad_(other.requires_grad)
        own.grad = None


def _make_optimizer(config: TrialConfig, shared: SharedModel, num_samples: int, total_steps: int) -> torch.optim.Optimizer:
    made = build_partial(config.optimizer, config.allowed_targets, "optimizer")
    offered = {"model": shared.model, "batch_size": min(config.batch_size, num_samples), "total_steps": total_steps}
    given = accepted_arguments(made, offered) | _kernel_arguments(config, made)
    if shared.mixes_tensors and "foreach" in inspect.signature(made.func).parameters:
        given["foreach"] = False
    positional = () if "model" in given else ([each for each in shared.model.parameters() if not each.is_meta],)
    optimizer = call(made, "optimizer", *positional, **given)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer: {config.optimizer['_target_']} returned {type(optimizer).__name__}, accepted is a torch Optimizer")
    return optimizer


def _kernel_arguments(config: TrialConfig, made: "partial[Any]") -> dict[str, bool]:
    """``fused`` and ``foreach`` as ``runtime.optimizer_kernels`` says, of an optimizer that has them."""
    kernels = config.runtime.optimizer_kernels
    wanted = {None: {}, "fused": {"fused": True}, "foreach": {"foreach": True}, "for_loop": {"foreach": False}}[kernels]
    if unknown := set(wanted) - set(inspect.signature(made.func).parameters):
        raise ConfigError(
            f"runtime.optimizer_kernels: found {kernels}, and {config.optimizer['_target_']} has no {', '.join(unknown)}; accepted is null"
        )
    return wanted


def make_part(node: Mapping[str, Any], allowed: tuple[str, ...], where: str, **offered: Any) -> Any:
    """A part from its node: a class is made into its object, a function is taken with its settings bound.

    Raises:
        ConfigError: it refuses its values, or a loss, metric, augmentation or views cannot be called.
    """
    made = build_partial(node, allowed, where)
    if not inspect.isclass(made.func):
        return made
    arguments = accepted_arguments(made, offered)
    part = call(made, where, **arguments) if arguments else build(node, allowed, where)
    if where not in ("technique", "parallelism") and not callable(part):
        raise ConfigError(f"{where}: {node['_target_']} made {type(part).__name__}, accepted is something that can be called")
    return part
