"""States of models and optimizers whose tensors are divided among ranks (``fully_shard``, DTensor):
written and read by all ranks together, by ``torch.distributed.checkpoint``.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from autotune.errors import DataError


def sharded_names(objects: Mapping[str, Any]) -> list[str]:
    """Names of the models with divided parameters, and of the optimizers of such."""
    return [
        name
        for name, value in objects.items()
        if any(isinstance(parameter, DTensor) for parameter in _parameters(value))
    ]


def save_sharded(folder: Path, objects: Mapping[str, Any]) -> None:
    """Write the states of objects of which ``sharded_names`` are all; every rank calls this."""
    state_dict_saver.save(_states(objects), checkpoint_id=folder)


def load_sharded(folder: Path, objects: Mapping[str, Any]) -> None:
    """Give objects back the states that ``save_sharded`` wrote; every rank calls this."""
    states = _states(objects)
    state_dict_loader.load(states, checkpoint_id=folder)
    for name, model, optimizer in _pairs(objects):
        if optimizer is None:
            set_model_state_dict(model, states[name])
        else:
            set_optimizer_state_dict(model, optimizer, states[name])


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The state of a model; of a divided one, gathered on the first rank by all of them."""
    if not sharded_names({"": model}):
        return model.state_dict()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def _states(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: get_model_state_dict(model)
        if optimizer is None
        else get_optimizer_state_dict(model, optimizer)
        for name, model, optimizer in _pairs(objects)
    }


def _pairs(
    objects: Mapping[str, Any],
) -> Iterator[tuple[str, nn.Module, torch.optim.Optimizer | None]]:
    """Each model, and each optimizer with the model of its parameters.

    Raises:
        DataError: the model of an optimizer is not among the objects.
    """
    models = [value for value in objects.values() if isinstance(value, nn.Module)]
    for name, value in objects.items():
        if isinstance(value, nn.Module):
            yield name, value, None
            continue
        trained = set(_parameters(value))
        owners = (model for model in models if not trained.isdisjoint(model.parameters()))
        if (owner := next(owners, None)) is None:
            raise DataError(f"checkpoint: {name} is divided among ranks; save its model, too")
        yield name, owner, value


def _parameters(value: Any) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from group["params"]
