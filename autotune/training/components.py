"""Making model, optimizer, schedule, loss and metric of a configuration, for one data set.

A model's (or a training function's) callable is given ``input_shape`` and ``num_classes`` where its signature has them and
the configuration does not say them.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from autotune.config.build import build, build_partial, call
from autotune.config.schema import TrialConfig
from autotune.errors import ConfigError
from autotune.training.data import LoadedData

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Components:
    """What a training is made of, fresh."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler | None
    loss: Score
    metric: Score
    """A callable with the contract of ``autotune.training.metrics``."""


def make_components(config: TrialConfig, data: LoadedData, device: torch.device, total_steps: int) -> Components:
    """Make everything anew; random numbers are drawn from torch's global generator.

    Raises:
        ConfigError: a component refuses its values.
    """
    allowed = config.allowed_targets
    made = build_partial(config.model, allowed, "model")
    model = call(made, "model", **accepted_arguments(made, {"input_shape": data.input_shape, "num_classes": data.num_classes}))
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model: {config.model['_target_']} returned {type(model).__name__}, accepted is a torch.nn.Module")
    model = model.to(device)
    if config.runtime["channels_last"]:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs
    optimizer = call(build_partial(config.optimizer, allowed, "optimizer"), "optimizer", model.parameters())
    schedule = call(build_partial(config.lr_schedule, allowed, "lr_schedule"), "lr_schedule", optimizer, total_steps)
    return Components(model, optimizer, schedule, make_score(config.loss, allowed, "loss"), make_score(config.metric, allowed, "metric"))


def make_score(node: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> Score:
    """A loss or metric: a class is made into its object, a function is taken with its settings bound."""
    made = build_partial(node, allowed, where)
    score = build(node, allowed, where) if inspect.isclass(made.func) else made
    if not callable(score):
        raise ConfigError(f"{where}: {node['_target_']} made {type(score).__name__}, accepted is something that can be called")
    return score


def accepted_arguments(made: "partial[Any]", offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the offered arguments that a callable's signature names and that are not bound yet."""
    try:
        names = inspect.signature(made.func).parameters
    except (TypeError, ValueError):
        return {}
    return {key: value for key, value in offered.items() if key in names and key not in made.keywords}
