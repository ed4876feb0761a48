"""Learning rates at the start, the peak and the end of each schedule."""

from typing import Any

import pytest
import torch

from autotune.training.schedules import constant, cosine, one_cycle

PEAK = 0.5


def optimizer_of(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **settings: Any) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.zeros(1))], lr=PEAK, **settings)  # type: ignore[call-arg]  # every optimizer of torch has lr


def rates(schedule: Any, num_steps: int, **settings: Any) -> list[float]:
    """The rate of each step, and the one left after the last."""
    optimizer = optimizer_of()
    scheduler = schedule(optimizer, num_steps, **settings)
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(num_steps):
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_constant_keeps_the_rate() -> None:
    assert rates(constant, 5) == [PEAK] * 6


def test_one_cycle_goes_up_to_the_rate_and_down_to_nearly_nothing() -> None:
    found = rates(one_cycle, 99, warmup_fraction=0.3)
    assert found[0] == pytest.approx(PEAK / 25)
    assert found[29] == pytest.approx(PEAK)
    assert max(found) == pytest.approx(PEAK)
    assert found[-1] == pytest.approx(PEAK / 25e4)
    assert found[:30] == sorted(found[:30])
    assert found[29:] == sorted(found[29:], reverse=True)


def test_cosine_goes_down_to_zero() -> None:
    found = rates(cosine, 10, warmup_fraction=0.0)
    assert found[0] == PEAK
    assert found[5] == pytest.approx(PEAK / 2)
    assert found[-1] == pytest.approx(0)


def test_cosine_warms_up_in_equal_steps() -> None:
    found = rates(cosine, 20, warmup_fraction=0.2)
    assert found[:5] == pytest.approx([PEAK / 4, PEAK * 7 / 16, PEAK * 10 / 16, PEAK * 13 / 16, PEAK])
    assert found[-1] == pytest.approx(0)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("warmup_fraction", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("schedule", [one_cycle, cosine])
def test_the_shortest_schedules_can_be_run(schedule: Any, num_steps: int, warmup_fraction: float) -> None:
    found = rates(schedule, num_steps, warmup_fraction=warmup_fraction)
    assert all(0 <= rate <= PEAK * 1.0001 for rate in found)


def test_one_cycle_leaves_the_momentum_as_it_was_searched() -> None:
    optimizer = optimizer_of(torch.optim.SGD, momentum=0.8)
    one_cycle(optimizer, 10, warmup_fraction=0.3)
    assert optimizer.param_groups[0]["momentum"] == 0.8
