"""Averages of the weights along a training, which are evaluated and kept in place of the last weights.

Contract: ``average(model, total_steps)`` returns None, or a ``WeightAverage`` that is updated after every optimizer step.
"""

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from autotune.errors import ConfigError


class WeightAverage(Protocol):
    """An average of the weights of one model in training."""

    @property
    def model(self) -> torch.nn.Module:
        """What is evaluated and saved: a module of the same structure as the one that is trained."""

    def update(self, step: int) -> None:
        """Take account of the weights after an optimizer step; steps count from 1."""

    def state_dict(self) -> dict[str, Any]:
        """All that a training needs to go on with this average."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""


def none(model: torch.nn.Module, total_steps: int) -> None:
    """No average: the weights after the last step."""


def ema(model: torch.nn.Module, total_steps: int, *, decay: float, every_steps: int, start_fraction: float) -> "ExponentialMovingAverage":
    """An exponential moving average of the weights.

    Args:
        model: what is trained.
        total_steps: steps of the whole schedule.
        decay: the share of the average that an update keeps, 0 to 1.
        every_steps: steps from one update to the next.
        start_fraction: the fraction of the steps after which the average begins, 0 to 1.

    Raises:
        ConfigError: a value outside its range.
    """
    if every_steps < 1:
        raise ConfigError(f"averaging.every_steps: found {every_steps}, accepted is a whole number from 1")
    for key, value in (("decay", decay), ("start_fraction", start_fraction)):
        if not 0 <= value <= 1:
            raise ConfigError(f"averaging.{key}: found {value}, accepted is 0 to 1")
    return ExponentialMovingAverage(model, decay=decay, every_steps=every_steps, start_step=max(1, round(start_fraction * total_steps)))


class ExponentialMovingAverage:
    """From ``start_step`` on, every ``every_steps``: average <- decay * average + (1 - decay) * weights.

    The average begins as the weights after ``start_step``; before that the trained model itself is what is evaluated. Running
    statistics of norms are averaged as weights are; all other buffers (counters, masks) are taken as they stand.

    The update is ``torch.optim.swa_utils.get_ema_multi_avg_fn``. Around it is a plain copy of the model instead of
    ``AveragedModel``, which counts updates in a tensor, averages masks, and moves that tensor to the device each time: the host
    would wait for the device. The copy of a compiled model is not compiled.

    Where weights have fewer bits than float32 the average keeps values of its own in float32, and the copy has them rounded: an
    update's share of ``1 - decay`` is mostly below what bfloat16 can tell apart.
    """

    def __init__(self, model: torch.nn.Module, *, decay: float, every_steps: int, start_step: int) -> None:
        self._trained = model
        self._average = _plain_copy(model)
        self._every_steps = every_steps
        self._start_step = start_step
        self._has_begun = False
        self._mix = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # missing in torch's stubs
        self._weights, averages = _averaged_tensors(model), _averaged_tensors(self._average)
        self._values = [_in_float32(each) for each in averages]
        self._rounded = [(average, value) for average, value in zip(averages, self._values, strict=True) if average is not value]
        self._is_rounded = True
        self._copied = list(zip(_copied_buffers(self._average), _copied_buffers(model), strict=True))

    @property
    def model(self) -> torch.nn.Module:
        """The copy that holds the average; the trained model while there is none yet."""
        if not self._has_begun:
            return self._trained
        if not self._is_rounded:
            with torch.no_grad():
                for average, value in self._rounded:
                    average.copy_(value)
            self._is_rounded = True
        return self._average

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take account of the weights after a step, where it is one of those that count."""
        since_start = step - self._start_step
        if since_start < 0 or since_start % self._every_steps:
            return
        weights = [_in_float32(each) for each in self._weights]
        if self._has_begun:
            self._mix(self._values, weights, 0)
        else:
            torch._foreach_copy_(self._values, weights)
        for buffer, current in self._copied:
            buffer.copy_(current)
        self._has_begun, self._is_rounded = True, False

    def state_dict(self) -> dict[str, Any]:
        """Whether the average has begun, and its values."""
        return {"has_begun": self._has_begun, "average": self._average.state_dict(), "values": self._values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self._has_begun = state["has_begun"]
        self._average.load_state_dict(state["average"])
        torch._foreach_copy_(self._values, state["values"])
        self._is_rounded = False


def _plain_copy(model: torch.nn.Module) -> torch.nn.Module:
    """A deep copy. Attributes that were computed from weights, as masked ones are, are copied by value: a graph cannot be."""
    computed = [each for module in model.modules() for each in vars(module).values() if isinstance(each, torch.Tensor) and not each.is_leaf]
    return copy.deepcopy(model, {id(each): each.detach().clone() for each in computed})


def _averaged_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [each.detach() for each in (*model.parameters(), *_norm_statistics(model).values())]


def _in_float32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its values in float32 where it has fewer bits."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _copied_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    statistics = _norm_statistics(model)
    return [each for each in model.buffers() if id(each) not in statistics]


def _norm_statistics(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Running means and variances by identity."""
    norms = (each for each in model.modules() if hasattr(each, "running_mean") and hasattr(each, "running_var"))
    return {id(each): each for norm in norms for each in (norm.running_mean, norm.running_var) if isinstance(each, torch.Tensor)}
