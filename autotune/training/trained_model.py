"""The model that a weights file belongs to, made again from the file's own header."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autotune.config.build import accepted_arguments, build_partial, call
from autotune.errors import DataError, explained
from autotune.training.checkpoint import read_weights_once
from autotune.training.components import make_part


def trained_model(path: Path, allowed_targets: Sequence[str]) -> nn.Module:
    """A weights file's model with its weights, on the CPU and in evaluation mode.

    Its parameters take no gradients.

    Raises:
        ConfigError: the model cannot be made.
        DataError: the file cannot be read, or does not hold the weights of the model that it names.
    """
    weights, metadata = read_weights_once(path)
    config = metadata.get("config")
    if (
        not isinstance(config, Mapping)
        or not {"model", "views"} <= set(config)
        or not {"input_shape", "num_classes"} <= set(metadata)
    ):
        raise DataError(
            f"{path}: does not say what model its weights are of; use a file that a"
            " training of autotune wrote"
        )
    if config.get("training") is not None:
        raise DataError(
            f"{path}: a training function of your own made its model; use a training of autotune's"
        )
    where = f"{path}: model"
    make_model = build_partial(config["model"], tuple(allowed_targets), where, key="model")
    with explained(f"{path}: does not hold the weights of its own model"):
        shapes = {
            "input_shape": tuple(metadata["input_shape"]),
            "num_classes": metadata["num_classes"],
        }
        make = partial(call, make_model, where, **accepted_arguments(make_model, shapes))
        with torch.device("meta"):  # without memory: a file can name a model of any size
            sketch = make().state_dict()
        if {name: tensor.shape for name, tensor in sketch.items()} != {
            name: tensor.shape for name, tensor in weights.items()
        }:
            raise DataError(
                f"{path}: does not hold the weights of its own model, which has others; use"
                " what autotune wrote"
            )
        model: nn.Module = make()
        model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


def scored_model(path: Path, allowed_targets: Sequence[str]) -> tuple[nn.Module, Tensor]:
    """A weights file's model as evaluations score it, by its configuration's views, and a batch of
    two inputs of zeros for it.

    Raises:
        ConfigError: the model or the views cannot be made.
        DataError: as ``trained_model``.
    """
    model = trained_model(path, allowed_targets)
    _, metadata = read_weights_once(path)
    views = make_part(metadata["config"]["views"], tuple(allowed_targets), "views")
    # a file of an earlier version does not say it
    dtype = getattr(torch, metadata.get("input_dtype", "float32"))
    return _Scored(model, views), torch.zeros(2, *metadata["input_shape"], dtype=dtype)


class _Scored(nn.Module):
    """A model whose forward pass applies views."""

    def __init__(self, model: nn.Module, views: Any) -> None:
        super().__init__()
        self.model = model
        self._views = views

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs that metric and loss are given."""
        outputs: Tensor = self._views(self.model, inputs)
        return outputs
