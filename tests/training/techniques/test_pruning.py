"""Pruning: what is masked, when, that it stays masked, and what is left at the end."""

import pytest
import torch
from torch import nn

from autotune.errors import ConfigError
from autotune.training.techniques.pruning import Pruning

TOTAL_STEPS = 20


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 10, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(160, 3),
    )


def make_pruning(
    structured: bool = False,
    sparsity: float = 0.8,
    start: float = 0.2,
    end: float = 0.6,
    num: int = 4,
) -> Pruning:
    return Pruning(
        structured=structured,
        sparsity=sparsity,
        start_fraction=start,
        end_fraction=end,
        num_prunings=num,
    )


@pytest.mark.parametrize(("total_steps", "num"), [(100, 4), (37, 10), (5, 8), (1, 3)])
def test_sparsity_follows_the_cubic_schedule(total_steps: int, num: int) -> None:
    pruning = make_pruning(sparsity=0.9, start=0.1, end=0.7, num=num)
    schedule = pruning.schedule(total_steps)
    assert list(schedule) == sorted(schedule)
    assert list(schedule.values()) == sorted(schedule.values())
    assert list(schedule.values())[-1] == pytest.approx(0.9)
    assert max(schedule) == min(total_steps - 1, round(0.7 * total_steps))
    if (total_steps, num) == (100, 4):  # by hand: 0.9 * (1 - (1 - i/4)^3) before step 10 + 60 * i/4
        wanted = {25: 0.5203125, 40: 0.7875, 55: 0.8859375, 70: 0.9}
        assert schedule == {step: pytest.approx(sparsity) for step, sparsity in wanted.items()}


def test_the_weights_of_least_magnitude_in_all_layers_together_are_taken() -> None:
    net, pruning = make_net(), make_pruning()
    before = torch.cat([module.weight.detach().flatten() for module in (net[0], net[3], net[6])])
    pruning.start(net)
    pruning.prune(0.5)
    net(torch.randn(1, 1, 8, 8))
    after = torch.cat([module.weight.detach().flatten() for module in (net[0], net[3], net[6])])
    assert before[after == 0].abs().max() < before[after != 0].abs().min()
    assert torch.equal(after[after != 0], before[after != 0])


def test_structured_pruning_takes_whole_filters_of_least_norm_and_leaves_the_last_layer() -> None:
    net, pruning = make_net(), make_pruning(structured=True)
    norms = net[3].weight.detach().abs().sum((1, 2, 3))
    pruning.start(net)
    pruning.prune(0.5)
    pruning.prune(0.6)
    outputs = net[3](torch.randn(2, 8, 6, 6))
    is_gone = (outputs == 0).all(dim=3).all(dim=2).all(dim=0)
    assert is_gone.sum() == 6
    assert norms[is_gone].max() < norms[~is_gone].min()
    assert not any(name.startswith("6.") and "mask" in name for name, _ in net.named_buffers())
    pruning.finish(net)
    assert ((net[3].weight == 0).flatten(1).all(1) == is_gone).all()
    assert (net[3].bias[is_gone] == 0).all()


@pytest.mark.parametrize("structured", [False, True])
def test_an_evaluation_counts_only_after_the_last_pruning(structured: bool) -> None:
    for start, end, first in ((0.2, 0.6, 13), (1.0, 1.0, TOTAL_STEPS)):
        net, pruning = make_net(), make_pruning(start=start, end=end, structured=structured)
        pruning.start(net)
        found = []
        for step in range(TOTAL_STEPS):
            pruning.before_step(net, step, TOTAL_STEPS)
            found.append(pruning.counts(net, step + 1, TOTAL_STEPS))
        assert found == [step >= first for step in range(1, TOTAL_STEPS + 1)]
        average = make_net()  # which has not taken the last pruning yet
        make_pruning(structured=structured).start(average)
        assert not pruning.counts(average, TOTAL_STEPS, TOTAL_STEPS)


def test_a_model_with_nothing_to_prune_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear has no layer to prune"):
        make_pruning(structured=True).start(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"sparsity": 1.0}, "sparsity"),
        ({"start": 0.7}, "start_fraction"),
        ({"num": 0}, "num_prunings"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError, match=f"technique.*{key}.*must be"):
        make_pruning(**values)  # type: ignore[arg-type]
