"""Averages of the weights over a training, evaluated and saved in place of the last weights.

Contract: ``average(model, total_steps)`` returns None, or an object with the methods of
``ExponentialMovingAverage``, which is updated after every optimizer step.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from autotune.errors import check_counts, check_fractions


def none(model: nn.Module, total_steps: int) -> None:
    """No average: the trained model itself is evaluated and saved."""


def ema(
    model: nn.Module,
    total_steps: int,
    *,
    decay: float,
    every_steps: int,
    start_fraction: float,
) -> "ExponentialMovingAverage":
    """An exponential moving average of the weights.

    Args:
        model: the trained model.
        total_steps: number of steps of the whole schedule.
        decay: weight of the old average in an update, 0 to 1.
        every_steps: number of steps between updates.
        start_fraction: fraction of the schedule after which the average begins, 0 to 1.

    Raises:
        ConfigError: a value is outside its range.
    """
    check_counts("averaging", every_steps=every_steps)
    check_fractions("averaging", decay=decay, start_fraction=start_fraction)
    return ExponentialMovingAverage(
        model,
        decay=decay,
        every_steps=every_steps,
        start_step=max(1, round(start_fraction * total_steps)),
    )


class ExponentialMovingAverage:
    """Exponential moving average: average <- decay * average + (1 - decay) * weights, every
    ``every_steps`` from ``start_step`` on.

    The average starts as the weights after ``start_step``; before that, the trained model itself is
    evaluated. Running statistics of norm layers are averaged like weights; all other buffers
    (counters, masks) are copied.

    The update is ``torch.optim.swa_utils.get_ema_multi_avg_fn``, applied to a plain copy of the
    model. ``AveragedModel`` is not used, because it averages masks and counts updates in a tensor
    that it moves to the device each time: the host would wait for the device. The copy of a
    compiled model is not compiled.

    For weights with fewer bits than float32, the average keeps separate values in float32, and the
    copy of the model holds them rounded: most updates, scaled by ``1 - decay``, are too small to
    change a bfloat16 number.
    """

    def __init__(
        self, model: nn.Module, *, decay: float, every_steps: int, start_step: int
    ) -> None:
        self._trained = model
        self._average = _plain_copy(model)
        self._every_steps = every_steps
        self._start_step = start_step
        self._has_begun = False
        # missing in torch's stubs
        self._mix = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._weights, buffers = _averaged_and_copied(model)
        self._averages, copies = _averaged_and_copied(self._average)
        # of float32 weights the averages themselves
        self._values = [average.float() for average in self._averages]
        self._is_rounded = True
        self._copied = list(zip(copies, buffers, strict=True))

    @property
    def model(self) -> nn.Module:
        """Copy of the model that holds the average; the trained model before the average begins."""
        if not self._has_begun:
            return self._trained
        if not self._is_rounded:
            for average, value in zip(self._averages, self._values, strict=True):
                average.copy_(value)
            self._is_rounded = True
        return self._average

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after a step, if an update is due at that step."""
        since_start = step - self._start_step
        if since_start < 0 or since_start % self._every_steps:
            return
        weights = [weight.float() for weight in self._weights]
        if self._has_begun:
            self._mix(self._values, weights, 0)
        else:
            torch._foreach_copy_(self._values, weights)
        for buffer, current in self._copied:
            buffer.copy_(current)
        self._has_begun, self._is_rounded = True, False

    def state_dict(self) -> dict[str, Any]:
        """State of the average: whether it has begun, its model and its float32 values."""
        return {
            "has_begun": self._has_begun,
            "average": self._average.state_dict(),
            "values": self._values,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        self._has_begun = state["has_begun"]
        self._average.load_state_dict(state["average"])
        torch._foreach_copy_(self._values, state["values"])
        self._is_rounded = False


def _plain_copy(model: nn.Module) -> nn.Module:
    """Deep copy of a model.

    Tensor attributes computed from weights (masked weights) are cloned, because deepcopy refuses
    non-leaves.
    """
    computed = {
        id(attribute): attribute.detach().clone()
        for module in model.modules()
        for attribute in vars(module).values()
        if isinstance(attribute, Tensor) and not attribute.is_leaf
    }
    return copy.deepcopy(model, computed)


def _averaged_and_copied(
    model: nn.Module,
) -> tuple[list[Tensor], list[Tensor]]:
    """A model's weights with the running means and variances of all norm layers, and all other
    buffers.
    """
    averaged = [parameter.detach() for parameter in model.parameters()]
    copied: list[Tensor] = []
    for name, buffer in model.named_buffers():
        is_statistic = name.rpartition(".")[2] in ("running_mean", "running_var")
        (averaged if is_statistic else copied).append(buffer)
    return averaged, copied
