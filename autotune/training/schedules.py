"""Learning-rate schedules over a known number of steps.

Contract: ``schedule(optimizer, total_steps)`` returns a scheduler that is stepped after every optimizer step, or None where
the rate stays as it is. The optimizer's own rate is the schedule's highest.
"""

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR


def constant(optimizer: torch.optim.Optimizer, total_steps: int) -> None:
    """The optimizer's rate throughout."""


def one_cycle(optimizer: torch.optim.Optimizer, total_steps: int, *, warmup_fraction: float) -> LRScheduler:
    """Up to the optimizer's rate and down to nearly nothing.

    Source: Smith & Topin, "Super-Convergence" (2017), as torch.optim.lr_scheduler.OneCycleLR. Momentum stays as the optimizer
    has it, so that searching over it means something; the paper cycles it the other way round.
    """
    highest = [group["lr"] for group in optimizer.param_groups]
    if warmup_fraction * (total_steps + 1) <= 1:  # no step to warm up in, and OneCycleLR would divide by none
        warmup_fraction = 0.0
    return OneCycleLR(optimizer, max_lr=highest, total_steps=total_steps + 1, pct_start=warmup_fraction, cycle_momentum=False)


def cosine(optimizer: torch.optim.Optimizer, total_steps: int, *, warmup_fraction: float) -> LRScheduler:
    """A linear warm-up over ``warmup_fraction`` of the steps, then half a cosine down to zero.

    Source: Loshchilov & Hutter, "SGDR" (2017), without restarts, as torch.optim.lr_scheduler.CosineAnnealingLR.
    """
    warmup_steps = round(total_steps * warmup_fraction)
    decay = CosineAnnealingLR(optimizer, T_max=max(1, total_steps - warmup_steps))
    if warmup_steps == 0:
        return decay
    warmup = LinearLR(optimizer, start_factor=1 / warmup_steps, total_iters=warmup_steps)
    return SequentialLR(optimizer, [warmup, decay], milestones=[warmup_steps])
