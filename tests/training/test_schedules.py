"""Learning rates at the start, the peak and the end of each schedule."""

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from autotune.training.schedules import constant, cosine, linear, one_cycle, warmup_stable_decay

PEAK = 0.5


def optimizer_of(*groups: dict[str, Any], **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], **group} for group in groups or ({},)],
        lr=PEAK,
        **settings,
    )


def rates_of_groups(
    schedule: Any, num_steps: int, *groups: dict[str, Any], **settings: Any
) -> list[list[float]]:
    """The rate of each step, and the one left after the last, of every param group."""
    optimizer = optimizer_of(*groups)
    scheduler = schedule(optimizer, num_steps, **settings)
    found = [[group["lr"]] for group in optimizer.param_groups]
    for _ in range(num_steps):
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        for rates, group in zip(found, optimizer.param_groups, strict=True):
            rates.append(group["lr"])
    return found


def rates(schedule: Any, num_steps: int, **settings: Any) -> list[float]:
    return rates_of_groups(schedule, num_steps, **settings)[0]


@pytest.mark.parametrize("warmup_fraction", [0.02, 0.3, 0.55, 1.0])
def test_one_cycle_is_that_of_torch(warmup_fraction: float) -> None:
    def of_torch(optimizer: torch.optim.Optimizer, total_steps: int) -> OneCycleLR:
        return OneCycleLR(
            optimizer, PEAK, total_steps + 1, pct_start=warmup_fraction, cycle_momentum=False
        )

    assert rates(one_cycle, 80, warmup_fraction=warmup_fraction) == pytest.approx(
        rates(of_torch, 80)
    )


@pytest.mark.parametrize(
    ("schedule", "settings", "fractions"),
    [
        (cosine, {"warmup_fraction": 0.0, "floor_fraction": 0.0}, [1, 0.5, 0]),
        (linear, {"warmup_fraction": 0.0, "floor_fraction": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        (
            linear,
            {"warmup_fraction": 1 / 3, "floor_fraction": 0.0},
            [0.5, 0.75, 1, 0.75, 0.5, 0.25, 0],
        ),
        (
            warmup_stable_decay,
            {"warmup_fraction": 0.2, "decay_fraction": 0.4, "floor_fraction": 0.1},
            [0.5, 0.75, *[1] * 5, 0.775, 0.55, 0.325, 0.1],
        ),
    ],
)
def test_rates_are_those_worked_out_by_hand(
    schedule: Any, settings: dict[str, float], fractions: list[float]
) -> None:
    found = rates(schedule, len(fractions) - 1, **settings)
    assert found == pytest.approx([PEAK * fraction for fraction in fractions])


SETTINGS: dict[Any, dict[str, float]] = {
    constant: {},
    one_cycle: {},
    cosine: {"floor_fraction": 0.1},
    linear: {"floor_fraction": 0.1},
    warmup_stable_decay: {"floor_fraction": 0.1, "decay_fraction": 0.4},
}


@pytest.mark.parametrize("schedule", SETTINGS)
def test_a_group_with_a_schedule_fraction_has_its_schedule_in_that_part_of_the_steps(
    schedule: Any,
) -> None:
    settings = SETTINGS[schedule] | ({"warmup_fraction": 0.25} if schedule is not constant else {})
    whole, part = rates_of_groups(
        schedule, 40, {}, {"lr": 3.0, "schedule_fraction": 0.3}, **settings
    )
    assert whole == pytest.approx(rates(schedule, 40, **settings))
    assert part[:12] == pytest.approx([6 * each for each in rates(schedule, 12, **settings)[:12]])
    assert part[12:] == [0.0] * 29
