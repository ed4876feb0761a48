"""Transfer: what is taken, what stays fresh, what is frozen and when it is let go."""

from pathlib import Path

import pytest
import torch
from torch import nn

from autotune.errors import ConfigError, DataError
from autotune.training.checkpoint import save_weights
from autotune.training.techniques.transfer import Transfer

TOTAL_STEPS = 10


def make_net(num_classes: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, num_classes)
    )


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, nn.Sequential]:
    """A trained net of three classes, and the file of its weights."""
    net = make_net(seed=1)
    net(torch.randn(16, 1, 8, 8) + 3)  # moves the norm's statistics
    save_weights(tmp_path / "weights.safetensors", net.state_dict(), {})
    return tmp_path / "weights.safetensors", net


def make_transfer(
    path: Path | str | None, unfreeze_at: float = 0.5, fresh_head: bool = True
) -> Transfer:
    return Transfer(
        source=None,
        checkpoint=None if path is None else str(path),
        fresh_head=fresh_head,
        unfreeze_at=unfreeze_at,
    )


def differing(net: nn.Module, other: nn.Module) -> set[str]:
    """The entries of two nets' states that differ."""
    found, wanted = net.state_dict(), other.state_dict()
    return {
        name
        for name in found
        if found[name].shape != wanted[name].shape or not torch.equal(found[name], wanted[name])
    }


@pytest.mark.parametrize("num_classes", [3, 5])
def test_the_body_is_taken_and_the_head_stays_fresh(
    source: tuple[Path, nn.Sequential], num_classes: int
) -> None:
    path, trained = source
    net = make_net(num_classes)
    make_transfer(path).start(net)
    assert differing(net, trained) == {"4.weight", "4.bias"}
    assert differing(net, make_net(num_classes)) == {
        "0.weight",
        "0.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }


def test_a_layer_is_taken_as_a_whole_or_not_at_all(source: tuple[Path, nn.Sequential]) -> None:
    path, _ = source
    # its bias would fit, its filters do not
    net = nn.Sequential(nn.Conv2d(1, 4, 5), nn.BatchNorm2d(4))
    bias = net[0].bias.detach().clone()
    make_transfer(path, fresh_head=False, unfreeze_at=0.0).start(net)
    assert torch.equal(net[0].bias, bias)


def train(net: nn.Module, technique: Transfer, steps: range) -> None:
    """As the loop does: the optimizer has all parameters, whether or not they train now."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in steps:
        technique.before_step(net, step, TOTAL_STEPS)
        optimizer.zero_grad(set_to_none=True)
        net(torch.randn(8, 1, 8, 8) - 2).square().mean().backward()
        optimizer.step()


def test_what_is_frozen_does_not_move_and_all_moves_once_it_is_let_go(
    source: tuple[Path, nn.Sequential],
) -> None:
    path, trained = source
    net, technique = make_net(), make_transfer(path, unfreeze_at=0.5)
    technique.start(net)
    train(net, technique, range(5))
    assert differing(net, trained) == {"4.weight", "4.bias"}
    assert net.training
    assert not net[1].training
    train(net, technique, range(5, TOTAL_STEPS))
    assert differing(net, trained) == set(net.state_dict())
    assert net[1].training


def test_what_cannot_be_is_one_line(source: tuple[Path, nn.Sequential], tmp_path: Path) -> None:
    path, _ = source
    with pytest.raises(ConfigError, match=r"technique\.unfreeze_at: found 1\.5, must be 0 to 1"):
        make_transfer(path, unfreeze_at=1.5)
    with pytest.raises(
        ConfigError,
        match=(
            r"technique\.checkpoint: found null, must be a file of weights, or"
            r" technique\.source="
        ),
    ):
        make_transfer(None)
    with pytest.raises(
        ConfigError, match=r"technique\.unfreeze_at: found 0\.5, and all layers were taken"
    ):
        make_transfer(path, fresh_head=False).start(make_net())
    with pytest.raises(ConfigError, match=r"technique\.checkpoint: no layer of the model is in "):
        make_transfer(path).start(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    with pytest.raises(DataError, match="there is no such file"):
        make_transfer(tmp_path / "nope").start(make_net())
