"""Averages of weights against what one computes by hand."""

import copy

import pytest
import torch
from torch import nn

from autotune.training.averaging import ema


def set_weights(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(value)


def averages_after(
    num_steps: int, *, total_steps: int, decay: float, every_steps: int, start_fraction: float
) -> list[float]:
    """What is evaluated after each of the steps 1, 2, ... whose weights are 1, 4, 9, ..."""
    model = nn.Linear(1, 1)
    average = ema(
        model, total_steps, decay=decay, every_steps=every_steps, start_fraction=start_fraction
    )
    found = []
    for step in range(1, num_steps + 1):
        set_weights(model, step**2)
        average.update(step)
        found.append(next(average.model.parameters()).item())
    return found


def test_the_average_is_the_sum_of_weights_by_their_age() -> None:
    found = averages_after(6, total_steps=6, decay=0.75, every_steps=1, start_fraction=0.0)
    for step, average in enumerate(found, start=1):
        closed_form = 0.75 ** (step - 1) + sum(
            0.25 * 0.75 ** (step - each) * each**2 for each in range(2, step + 1)
        )
        assert average == pytest.approx(closed_form)


def test_before_its_start_the_trained_weights_are_evaluated_and_it_begins_as_they_are() -> None:
    found = averages_after(7, total_steps=10, decay=0.5, every_steps=2, start_fraction=0.4)
    assert found == pytest.approx([1, 4, 9, 16, 16, (16 + 36) / 2, (16 + 36) / 2])


def batch_norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)
    )


def test_running_statistics_are_averaged_and_counters_copied() -> None:
    model = batch_norm_net()
    average = ema(model, 10, decay=0.8, every_steps=1, start_fraction=0.0)
    states = []
    for step in (1, 2):
        model(torch.randn(8, 1, 4, 4) * step + step)
        average.update(step)
        states.append(copy.deepcopy(model.state_dict()))
    found = average.model.state_dict()
    for name in ("1.running_mean", "1.running_var"):
        assert torch.allclose(found[name], 0.8 * states[0][name] + 0.2 * states[1][name])
        assert not torch.equal(states[0][name], states[1][name])
    assert found["1.num_batches_tracked"] == 2


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_an_average_of_half_weights_does_not_stall(precision: torch.dtype) -> None:
    model = nn.Linear(1, 1).to(precision)
    average = ema(model, 1000, decay=0.999, every_steps=1, start_fraction=0.0)
    for step in range(1, 1002):
        set_weights(model, 1.0 if step == 1 else 2.0)
        average.update(step)
    resumed = ema(model, 1000, decay=0.999, every_steps=1, start_fraction=0.0)
    resumed.load_state_dict(copy.deepcopy(average.state_dict()))
    for step, each in ((1002, average), (1002, resumed)):
        each.update(step)
        assert [weight.dtype for weight in each.model.parameters()] == [precision] * 2
        for weight in each.model.parameters():
            assert weight.item() == pytest.approx(2 - 0.999**1001, rel=torch.finfo(precision).eps)
