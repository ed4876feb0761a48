"""Pruning: train to sparse weights, set to zero a part at a time while the rest goes on learning.

The target is then accuracy at the given sparsity: no evaluation counts before the last pruning.
Sparsity is therefore part of the task, as the target is, while the schedule of prunings may be
searched.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from autotune.errors import ConfigError, check_counts, check_fractions
from autotune.training.techniques.technique import Technique, head_of, weighted_layers


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
    norm. torch.nn.utils.prune applies the masks.
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
        self._structured, self._sparsity = structured, sparsity
        self._start_fraction, self._end_fraction = start_fraction, end_fraction
        self._num_prunings = num_prunings
        self._layers: list[Any] = []

    def start(self, model: nn.Module) -> None:
        """Put a mask of ones on every layer that is to be pruned.

        Raises:
            ConfigError: the model has no layer to prune.
        """
        self._layers = self._prunable(model)
        if not self._layers:
            raise ConfigError(
                f"technique: {type(model).__name__} has no layer to prune; another technique or"
                " model is needed"
            )
        # keeps the masked weight, which torch holds beside the original one, out of any autograd
        # graph
        with torch.no_grad():
            for layer in self._layers:
                for name in ("weight", "bias") if self._structured else ("weight",):
                    if getattr(layer, name) is not None:
                        prune.identity(layer, name)  # type: ignore[no-untyped-call]  # torch's

    def before_step(self, model: nn.Module, step: int, total_steps: int) -> None:
        """Prune if the schedule has a pruning before this step."""
        sparsity = self.schedule(total_steps).get(step)
        if sparsity is not None:
            self.prune(sparsity)

    @torch.no_grad()
    def prune(self, sparsity: float) -> None:
        """Mask the share ``sparsity`` of the weights or filters, those included that are masked
        already.
        """
        if self._structured:
            for layer in self._layers:
                _prune_filters(layer, sparsity)
        else:
            _prune_weights(self._layers, sparsity)

    def counts(self, model: nn.Module, step: int, total_steps: int) -> bool:
        """Whether the last pruning is done and ``model`` has its sparsity, which an average of
        the weights reaches later.
        """
        if step <= max(self.schedule(total_steps)):
            return False
        return _num_masked(model.modules()) >= _num_masked(self._layers)

    def finish(self, model: nn.Module) -> None:
        """Set the masked weights to zero, and remove masks and hooks."""
        for module in model.modules():
            for name in ("weight", "bias"):
                if hasattr(module, f"{name}_mask"):
                    prune.remove(module, name)  # type: ignore[no-untyped-call]  # torch's

    def _prunable(self, model: nn.Module) -> list[Any]:
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

    def schedule(self, total_steps: int) -> dict[int, float]:
        """The sparsity that each pruning leaves, by the step before which the pruning happens.

        Steps count from 0.

        The i-th of n prunings happens at the fraction ``start + (end - start) * i / n`` of the
        steps, but no later than before the last step, and leaves the share ``sparsity * (1 - (1 - i
        / n)^3)`` zero. Of several prunings before the same step, the last one counts.
        """
        start, length = self._start_fraction, self._end_fraction - self._start_fraction
        parts = [number / self._num_prunings for number in range(1, self._num_prunings + 1)]
        return {
            min(total_steps - 1, round(total_steps * (start + length * part))): (
                self._sparsity * (1 - (1 - part) ** 3)
            )
            for part in parts
        }


def _prune_weights(layers: list[Any], sparsity: float) -> None:
    """Mask the weights of least magnitude among those of all layers together."""
    masks = [layer.weight_mask for layer in layers]
    magnitudes = torch.cat([_masked(layer).abs().flatten() for layer in layers])
    new_mask = torch.cat([mask.flatten() for mask in masks])
    new_mask[magnitudes.topk(round(sparsity * len(magnitudes)), largest=False).indices] = 0
    sizes = [mask.numel() for mask in masks]
    for mask, part in zip(masks, torch.split(new_mask, sizes), strict=True):
        mask.copy_(part.view_as(mask))


def _prune_filters(layer: Any, sparsity: float) -> None:
    """Mask the output filters of least L1 norm in one layer, but never all of them."""
    # the dimension along which output filters lie
    dim = 1 if getattr(layer, "transposed", False) else 0
    filters = _masked(layer).movedim(dim, 0)
    num_pruned = min(round(sparsity * len(filters)), len(filters) - 1)
    pruned = filters.flatten(1).norm(p=1, dim=1).topk(num_pruned, largest=False).indices
    layer.weight_mask.index_fill_(dim, pruned, 0)
    if hasattr(layer, "bias_mask"):
        layer.bias_mask[pruned] = 0


def _masked(layer: Any) -> Tensor:
    """A layer's weights with its mask applied."""
    masked: Tensor = layer.weight_orig.detach() * layer.weight_mask
    return masked


def _num_masked(modules: Iterable[Any]) -> int:
    """Number of weights that are masked."""
    return sum(
        int((module.weight_mask == 0).sum()) for module in modules if hasattr(module, "weight_mask")
    )
