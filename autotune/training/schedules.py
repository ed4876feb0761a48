"""Learning-rate schedules over a known number of steps.

Contract: ``schedule(optimizer, total_steps)`` returns a scheduler that is stepped after every
optimizer step, or None if the learning rate stays constant. The optimizer's learning rate is the
schedule's highest: a schedule multiplies the rate of each param group by the same factors between 0
and 1. A group with a ``schedule_fraction`` completes its schedule in that fraction of the steps,
and its rate is 0 afterwards.

Each shape is a function of the step alone, so that every group can have its own number of steps,
and a training can resume at any step without further state.
"""

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from autotune.errors import ConfigError, check_fractions

Shape = Callable[[int, int], float]
"""``shape(step, num_steps)``: factor of the learning rate at a step, 0 to ``num_steps``, of a
schedule of ``num_steps`` steps."""


def constant(optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler | None:
    """The optimizer's learning rate, held constant."""
    if all(group.get("schedule_fraction", 1.0) == 1.0 for group in optimizer.param_groups):
        return None
    return _scheduler(optimizer, total_steps, lambda step, num_steps: 1.0)


def one_cycle(
    optimizer: torch.optim.Optimizer, total_steps: int, *, warmup_fraction: float
) -> LRScheduler:
    """Half a cosine up from 1/25 of the optimizer's learning rate to the full rate, then half a
    cosine down to 1/250,000 of it.

    Source: Smith & Topin, "Super-Convergence" (2017), with the shape of
    torch.optim.lr_scheduler.OneCycleLR. The paper also cycles momentum, in the opposite direction;
    here the optimizer's momentum stays constant, so that it can be searched over.
    """
    check_fractions("lr_schedule", warmup_fraction=warmup_fraction)

    def shape(step: int, num_steps: int) -> float:
        peak = warmup_fraction * (num_steps + 1) - 1
        if peak <= 0:  # there is no warm-up step
            peak = -1.0
        if step <= peak:
            return _cosine_between(1 / 25, 1.0, step / peak)
        return _cosine_between(1.0, 1 / 25e4, (step - peak) / (num_steps - peak))

    return _scheduler(optimizer, total_steps, shape)


def cosine(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    *,
    warmup_fraction: float,
    floor_fraction: float,
) -> LRScheduler:
    """A linear warm-up over ``warmup_fraction`` of the steps, then half a cosine down to
    ``floor_fraction`` of the optimizer's rate.

    Source: Loshchilov & Hutter, "SGDR" (2017), without restarts.
    """
    check_fractions("lr_schedule", warmup_fraction=warmup_fraction, floor_fraction=floor_fraction)
    return _scheduler(
        optimizer,
        total_steps,
        _warmed_up(warmup_fraction, lambda done: _cosine_between(1.0, floor_fraction, done)),
    )


def linear(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    *,
    warmup_fraction: float,
    floor_fraction: float,
) -> LRScheduler:
    """A linear warm-up over ``warmup_fraction`` of the steps, then a straight line down to
    ``floor_fraction`` of the optimizer's rate.

    Source: Defazio et al., "Optimal Linear Decay Learning Rate Schedules and Further Refinements"
    (2023).
    """
    return warmup_stable_decay(
        optimizer,
        total_steps,
        warmup_fraction=warmup_fraction,
        decay_fraction=1.0,
        floor_fraction=floor_fraction,
    )


def warmup_stable_decay(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    *,
    warmup_fraction: float,
    decay_fraction: float,
    floor_fraction: float,
) -> LRScheduler:
    """A linear warm-up, a constant rate, then a straight line down to ``floor_fraction`` of that
    rate in the last steps.

    ``warmup_fraction`` and ``decay_fraction`` are fractions of all steps; if they overlap, the
    decay starts right after the warm-up.

    Source: Hu et al., "MiniCPM" (2024), section 4; the straight line as in Haegele et al., "Scaling
    Laws and Compute-Optimal Training Beyond Fixed Training Durations" (2024).
    """
    check_fractions(
        "lr_schedule",
        warmup_fraction=warmup_fraction,
        decay_fraction=decay_fraction,
        floor_fraction=floor_fraction,
    )
    stable = max(0.0, 1.0 - warmup_fraction - decay_fraction) / max(1.0 - warmup_fraction, 1e-12)

    def after_warmup(done: float) -> float:
        return 1.0 - (1.0 - floor_fraction) * max(0.0, done - stable) / max(1.0 - stable, 1e-12)

    return _scheduler(optimizer, total_steps, _warmed_up(warmup_fraction, after_warmup))


def _scheduler(optimizer: torch.optim.Optimizer, total_steps: int, shape: Shape) -> LRScheduler:
    return LambdaLR(
        optimizer,
        [
            _factor(shape, total_steps, group.get("schedule_fraction"))
            for group in optimizer.param_groups
        ],
    )


def _factor(shape: Shape, total_steps: int, fraction: float | None) -> Callable[[int], float]:
    """Factor of one param group's learning rate, as a function of the step.

    Raises:
        ConfigError: the fraction is not above 0 and at most 1.
    """
    if fraction is None:
        return lambda step: shape(min(step, total_steps), total_steps)
    if not 0 < fraction <= 1:
        raise ConfigError(f"schedule_fraction: found {fraction}, must be above 0 and up to 1")
    num_steps = max(1, round(fraction * total_steps))
    return lambda step: shape(step, num_steps) if step < num_steps else 0.0


def _warmed_up(warmup_fraction: float, after: Callable[[float], float]) -> Shape:
    """Shape that rises linearly to 1, then follows ``after``, a function of the fraction done of
    the steps after the warm-up.

    The first factor of a warm-up of n steps is 1/n, not 0, because a step at rate 0 would be
    wasted.
    """

    def shape(step: int, num_steps: int) -> float:
        warmup_steps = round(num_steps * warmup_fraction)
        if step < warmup_steps:
            first = 1 / warmup_steps
            return first + (1 - first) * step / warmup_steps
        return after((step - warmup_steps) / max(1, num_steps - warmup_steps))

    return shape


def _cosine_between(start: float, end: float, done: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2
