"""Pruning: train to weights of which a given share is zero, taken out step by step while the rest goes on learning.

The target is then accuracy at that sparsity: no evaluation counts before the last pruning. Sparsity is therefore part of the
task, as the target is, while the schedule is what may be searched.
"""

import logging
from collections.abc import Mapping

import torch
from torch.nn.utils import prune

from autotune.errors import ConfigError
from autotune.training.techniques.layers import head_of, weighted_layers
from autotune.training.techniques.technique import Score

_log = logging.getLogger(__name__)


class Pruning:
    """Masks on the weights of convolutions and linear layers, renewed in place ``num_prunings`` times along the schedule.

    A masked weight is zero, gets no gradient and does not come back. What is masked stays in place, so that compiled code and
    CUDA graphs go on; ``finish`` leaves a plain model with zeros. Layers that do not train, or share their weights with
    another one, are left whole.

    Args:
        structured: mask whole output filters, with their biases, of every layer but the last, the same share of each, those of
            least L1 norm; else single weights of all layers together, those of least magnitude.
        sparsity: the share that is zero in the end, above 0 and below 1.
        start_fraction: the fraction of the steps after which pruning begins.
        end_fraction: the fraction of the steps after which it has come to its end.
        num_prunings: how many times it is pruned between these, evenly spaced.

    Raises:
        ConfigError: a value outside its range.

    Source: Zhu & Gupta, "To prune, or not to prune" (2017), section 3, for the schedule and masks that stay; Li et al., "Pruning
    Filters for Efficient ConvNets" (2017) for filters by their L1 norm. Which weights are least is decided by
    torch.nn.utils.prune.
    """

    def __init__(self, *, structured: bool, sparsity: float, start_fraction: float, end_fraction: float, num_prunings: int) -> None:
        if not 0 < sparsity < 1:
            raise ConfigError(f"technique.sparsity: found {sparsity}, accepted is above 0 and below 1")
        if not 0 <= start_fraction <= end_fraction <= 1:
            found = f"{start_fraction} and {end_fraction}"
            raise ConfigError(f"technique.start_fraction, technique.end_fraction: found {found}, accepted is 0 to 1, in this order")
        if num_prunings < 1:
            raise ConfigError(f"technique.num_prunings: found {num_prunings}, accepted is a whole number from 1")
        self._structured = structured
        self._sparsity = sparsity
        self._start_fraction = start_fraction
        self._end_fraction = end_fraction
        self._num_prunings = num_prunings
        self._schedule: tuple[int, Mapping[int, float]] = (0, {})

    def start(self, model: torch.nn.Module) -> None:
        """Put a mask of ones on every layer that is to be pruned.

        Raises:
            ConfigError: there is none.
        """
        layers = self._prunable(model)
        if not layers:
            raise ConfigError(f"technique: {type(model).__name__} has no layer to prune; accepted is another technique, or another model")
        with torch.no_grad():  # the masked weight that torch keeps beside the original one is then no part of a graph
            for layer in layers:
                prune.custom_from_mask(layer, "weight", torch.ones_like(_tensor(layer, "weight")))  # type: ignore[no-untyped-call]  # in torch
                if self._structured and getattr(layer, "bias", None) is not None:
                    prune.custom_from_mask(layer, "bias", torch.ones_like(_tensor(layer, "bias")))  # type: ignore[no-untyped-call]  # likewise

    def before_step(self, model: torch.nn.Module, step: int, total_steps: int) -> None:
        """Prune where the schedule says so."""
        sparsity = self._scheduled(total_steps).get(step)
        if sparsity is not None:
            self.prune(model, sparsity)

    @torch.no_grad()
    def prune(self, model: torch.nn.Module, sparsity: float) -> None:
        """Mask a share of the weights or filters, what was masked before included."""
        layers = _masked_layers(model)
        if self._structured:
            for layer in layers:
                _prune_filters(layer, sparsity)
        else:
            _prune_weights(layers, sparsity)

    def loss(self, loss: Score, outputs: torch.Tensor, targets: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The loss as it is."""
        return loss(outputs, targets)

    def counts(self, model: torch.nn.Module, step: int, total_steps: int) -> bool:
        """Whether the last pruning came before one of the first ``step`` steps, and the model has it: an average takes it later."""
        if step <= max(self._scheduled(total_steps)):
            return False
        layers = _masked_layers(model)
        masks = [_tensor(layer, "weight_mask") for layer in layers]
        if not self._structured:
            return sum(int((mask == 0).sum()) for mask in masks) >= round(self._sparsity * sum(mask.numel() for mask in masks))
        filters = [mask.movedim(_filter_dim(layer), 0).flatten(1).amax(1) for layer, mask in zip(layers, masks, strict=True)]
        return all(int((each == 0).sum()) >= _num_pruned(len(each), self._sparsity) for each in filters)

    def finish(self, model: torch.nn.Module) -> None:
        """Put the zeros into the weights themselves, and take masks and hooks away."""
        for module in model.modules():
            for name in ("weight", "bias"):
                if hasattr(module, f"{name}_mask"):
                    prune.remove(module, name)  # type: ignore[no-untyped-call]  # in torch
        _log.info(f"{sparsity_of(model):.4f} of the weights of convolutions and linear layers are zero")

    def _prunable(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        owners: dict[int, int] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        head = head_of(model) if self._structured else None
        layers = {name: layer for name, layer in weighted_layers(model).items() if name != head}
        return [layer for layer in layers.values() if owners[id(layer.weight)] == 1 and _tensor(layer, "weight").requires_grad]

    def _scheduled(self, total_steps: int) -> Mapping[int, float]:
        if self._schedule[0] != total_steps:
            steps = pruning_schedule(
                total_steps, self._sparsity, start=self._start_fraction, end=self._end_fraction, num_prunings=self._num_prunings
            )
            self._schedule = (total_steps, steps)
        return self._schedule[1]


def pruning_schedule(total_steps: int, sparsity: float, *, start: float, end: float, num_prunings: int) -> dict[int, float]:
    """The steps before which it is pruned, counted from 0, each with the share that is zero from then on.

    The i-th of n prunings comes at ``start + (end - start) * i / n`` of the steps and leaves ``sparsity * (1 - (1 - i / n)^3)``
    zero; of those that fall on one step, the last one counts, and the last step is the latest.
    """
    steps: dict[int, float] = {}
    for number in range(1, num_prunings + 1):
        part = number / num_prunings
        steps[min(total_steps - 1, round(total_steps * (start + (end - start) * part)))] = sparsity * (1 - (1 - part) ** 3)
    return steps


def sparsity_of(model: torch.nn.Module) -> float:
    """The share of zeros among the weights of convolutions and linear layers, those of the last one included."""
    weights = [_masked(layer) if hasattr(layer, "weight_mask") else _tensor(layer, "weight") for layer in weighted_layers(model).values()]
    num_zeros = sum(int((weight == 0).sum()) for weight in weights)
    return num_zeros / sum(weight.numel() for weight in weights)


def _prune_weights(layers: list[torch.nn.Module], sparsity: float) -> None:
    """Mask the weights of least magnitude of all layers together."""
    masks = [_tensor(layer, "weight_mask") for layer in layers]
    weights = torch.cat([_masked(layer).flatten() for layer in layers])
    method = prune.L1Unstructured(amount=round(sparsity * weights.numel()))
    chosen = method.compute_mask(weights, torch.cat([mask.flatten() for mask in masks]))  # type: ignore[no-untyped-call]  # in torch
    for mask, part in zip(masks, chosen.split([mask.numel() for mask in masks]), strict=True):
        mask.copy_(part.view_as(mask))


def _prune_filters(layer: torch.nn.Module, sparsity: float) -> None:
    """Mask the output filters of least L1 norm of one layer, all but one at most."""
    weight, mask = _masked(layer), _tensor(layer, "weight_mask")
    dim = _filter_dim(layer)
    method = prune.LnStructured(amount=_num_pruned(weight.shape[dim], sparsity), n=1, dim=dim)
    mask.copy_(method.compute_mask(weight, mask.clone()))  # type: ignore[no-untyped-call]  # in torch
    if hasattr(layer, "bias_mask"):
        _tensor(layer, "bias_mask").copy_(mask.movedim(dim, 0).flatten(1).amax(1))


def _num_pruned(num_filters: int, sparsity: float) -> int:
    """Filters of a layer that are masked: all but one at most."""
    return min(round(sparsity * num_filters), num_filters - 1)


def _filter_dim(layer: torch.nn.Module) -> int:
    """The dimension of a layer's weights that counts its output filters."""
    return 1 if getattr(layer, "transposed", False) else 0


def _masked_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if hasattr(module, "weight_mask")]


def _masked(layer: torch.nn.Module) -> torch.Tensor:
    """A layer's weights as it computes with them."""
    return _tensor(layer, "weight_orig").detach() * _tensor(layer, "weight_mask")


def _tensor(layer: torch.nn.Module, name: str) -> torch.Tensor:
    tensor = getattr(layer, name)
    assert isinstance(tensor, torch.Tensor)
    return tensor
