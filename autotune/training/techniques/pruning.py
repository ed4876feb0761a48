"""Pruning: train to sparse weights, set to zero a part at a time while the rest goes on learning.

The target is then accuracy at the given sparsity: no evaluation counts before the last pruning.
Sparsity is therefore part of the task, as the target is, while the schedule of prunings may be
searched.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch.nn.utils import prune

from autotune.errors import ConfigError, check_counts, check_fractions
from autotune.training.techniques.technique import Technique, head_of, weighted_layers

_log = logging.getLogger(__name__)


class Pruning(Technique):
    """Masks on the weights of convolutions and linear layers, updated in place ``num_prunings``
    times during training.

    A masked weight is zero, gets no gradient and does not come back. Masks and weights keep their
    memory, so that compiled code and CUDA graphs stay valid; ``finish`` leaves a plain model with
    zeros. Layers that do not train, or that share their weights with another layer, are not pruned.

    Args:
        structured: if true, mask output filters of least L1 norm with their biases, the same share
            of every layer but the last; else mask single weights of least magnitude among all
            layers together.
        sparsity: share of weights or filters that is zero in the end, above 0 and below 1.
        start_fraction: fraction of the steps after which pruning begins.
        end_fraction: fraction of the steps after which pruning is complete.
        num_prunings: number of prunings between start and end, evenly spaced.

    Raises:
        ConfigError: a value is outside its range.

    Source: Zhu & Gupta, "To prune, or not to prune" (2017), section 3, for the schedule and masks
    that stay; Li et al., "Pruning Filters for Efficient ConvNets" (2017) for filters by their L1
    norm. torch.nn.utils.prune decides which weights are least.
    """

    def __init__(
        self,
        *,
        structured: bool,
        sparsity: float,
        start_fraction: float,
        end_fraction: float,
        num_prunings: int,
    ) -> None:
        if not 0 < sparsity < 1:
            raise ConfigError(f"technique.sparsity: found {sparsity}, must be above 0 and below 1")
        check_fractions("technique", start_fraction=start_fraction, end_fraction=end_fraction)
        if start_fraction > end_fraction:
            raise ConfigError(
                f"technique.start_fraction: found {start_fraction}, must be up to end_fraction"
                f" = {end_fraction}"
            )
        check_counts("technique", num_prunings=num_prunings)
        self._structured = structured
        self._sparsity = sparsity
        self._start_fraction = start_fraction
        self._end_fraction = end_fraction
        self._num_prunings = num_prunings

    def start(self, model: torch.nn.Module) -> None:
        """Put a mask of ones on every layer that is to be pruned.

        Raises:
            ConfigError: the model has no layer to prune.
        """
        layers = self._prunable(model)
        if not layers:
            raise ConfigError(
                f"technique: {type(model).__name__} has no layer to prune; another technique or"
                " model is needed"
            )
        # keeps the masked weight, which torch holds beside the original one, out of any autograd
        # graph
        with torch.no_grad():
            for layer in layers:
                _keep_all(layer, "weight")
                if self._structured and layer.bias is not None:
                    _keep_all(layer, "bias")

    def before_step(self, model: torch.nn.Module, step: int, total_steps: int) -> None:
        """Prune if the schedule has a pruning before this step."""
        sparsity = self._schedule(total_steps).get(step)
        if sparsity is not None:
            self.prune(model, sparsity)

    @torch.no_grad()
    def prune(self, model: torch.nn.Module, sparsity: float) -> None:
        """Mask the share ``sparsity`` of the weights or filters, those included that are masked
        already.
        """
        layers = _masked_layers(model)
        if self._structured:
            for layer in layers:
                _prune_filters(layer, sparsity)
        else:
            _prune_weights(layers, sparsity)

    def counts(self, model: torch.nn.Module, step: int, total_steps: int) -> bool:
        """Whether the last pruning is done and ``model`` has its sparsity, which an average of
        the weights reaches later.
        """
        if step <= max(self._schedule(total_steps)):
            return False
        layers = _masked_layers(model)
        num_masked = sum(int((layer.weight_mask == 0).sum()) for layer in layers)
        if not self._structured:
            num_weights: int = sum(layer.weight_mask.numel() for layer in layers)
            wanted = round(self._sparsity * num_weights)
        else:
            wanted = 0
            for layer in layers:
                num_filters = layer.weight_mask.shape[_filter_dim(layer)]
                filter_size = layer.weight_mask.numel() // num_filters
                wanted += _num_pruned(num_filters, self._sparsity) * filter_size
        return num_masked >= wanted

    def finish(self, model: torch.nn.Module) -> None:
        """Set the masked weights to zero, and remove masks and hooks."""
        for module in model.modules():
            for name in ("weight", "bias"):
                if hasattr(module, f"{name}_mask"):
                    prune.remove(module, name)  # type: ignore[no-untyped-call]  # torch's
        weights = [layer.weight for layer in weighted_layers(model).values()]
        num_zeros = sum(int((weight == 0).sum()) for weight in weights)
        share = num_zeros / sum(weight.numel() for weight in weights)
        _log.info(f"{share:.4f} of the weights of convolutions and linear layers are zero")

    def _prunable(self, model: torch.nn.Module) -> list[Any]:
        num_owners = Counter(
            id(parameter)
            for module in model.modules()
            for parameter in module.parameters(recurse=False)
        )
        head = head_of(model) if self._structured else None
        return [
            layer
            for name, layer in weighted_layers(model).items()
            if name != head and num_owners[id(layer.weight)] == 1 and layer.weight.requires_grad
        ]

    def _schedule(self, total_steps: int) -> Mapping[int, float]:
        return pruning_schedule(
            total_steps,
            self._sparsity,
            start=self._start_fraction,
            end=self._end_fraction,
            num_prunings=self._num_prunings,
        )


@cache  # asked for before every step
def pruning_schedule(
    total_steps: int, sparsity: float, *, start: float, end: float, num_prunings: int
) -> dict[int, float]:
    """The sparsity that each pruning leaves, by the step before which the pruning happens.

    Steps count from 0.

    The i-th of n prunings happens at the fraction ``start + (end - start) * i / n`` of the steps,
    but no later than before the last step, and leaves the share ``sparsity * (1 - (1 - i / n)^3)``
    zero. Of several prunings before the same step, the last one counts.
    """
    steps: dict[int, float] = {}
    for number in range(1, num_prunings + 1):
        part = number / num_prunings
        steps[min(total_steps - 1, round(total_steps * (start + (end - start) * part)))] = (
            sparsity * (1 - (1 - part) ** 3)
        )
    return steps


def _prune_weights(layers: list[Any], sparsity: float) -> None:
    """Mask the weights of least magnitude among those of all layers together."""
    masks = [layer.weight_mask for layer in layers]
    weights = torch.cat([_masked(layer).flatten() for layer in layers])
    method = prune.L1Unstructured(amount=round(sparsity * weights.numel()))
    flat = torch.cat([mask.flatten() for mask in masks])
    new_mask = method.compute_mask(weights, flat)  # type: ignore[no-untyped-call]
    for mask, part in zip(masks, new_mask.split([mask.numel() for mask in masks]), strict=True):
        mask.copy_(part.view_as(mask))


def _prune_filters(layer: Any, sparsity: float) -> None:
    """Mask the output filters of least L1 norm in one layer, but never all of them."""
    weight, mask, dim = _masked(layer), layer.weight_mask, _filter_dim(layer)
    method = prune.LnStructured(amount=_num_pruned(weight.shape[dim], sparsity), n=1, dim=dim)
    # torch's
    mask.copy_(method.compute_mask(weight, mask.clone()))  # type: ignore[no-untyped-call]
    if hasattr(layer, "bias_mask"):
        layer.bias_mask.copy_(mask.movedim(dim, 0).flatten(1).amax(1))


def _num_pruned(num_filters: int, sparsity: float) -> int:
    """Number of a layer's filters to mask; at least one filter stays."""
    return min(round(sparsity * num_filters), num_filters - 1)


def _filter_dim(layer: Any) -> int:
    """The dimension of a layer's weights along which its output filters lie."""
    return 1 if getattr(layer, "transposed", False) else 0


def _masked_layers(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "weight_mask")]


def _masked(layer: Any) -> torch.Tensor:
    """A layer's weights with its mask applied."""
    masked: torch.Tensor = layer.weight_orig.detach() * layer.weight_mask
    return masked


def _keep_all(layer: Any, name: str) -> None:
    """Mask a parameter with ones, so that it has a mask to prune."""
    ones = torch.ones_like(getattr(layer, name))
    prune.custom_from_mask(layer, name, ones)  # type: ignore[no-untyped-call]
