"""Weights that are made one tensor at a time are those of the constructor."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from autotune.training.device import seed_everything
from autotune.training.parallel.initial_weights import on_meta_device
from autotune.workloads.mlp import MLP
from autotune.workloads.resnet9 import ResNet9
from autotune.workloads.speed_cnn import SpeedCNN
from autotune.workloads.transformer import Transformer

CPU = torch.device("cpu")


def resnet9() -> nn.Module:
    return ResNet9(input_shape=(1, 8, 8), num_classes=3, widths=[8, 8, 16, 16], norm="batch", logits_scale=0.1)


def mlp() -> nn.Module:
    return MLP(input_shape=(1, 8, 8), num_classes=3, widths=[16, 8], norm="layer", activation="relu", dropout=0.1)


def transformer(*, tied_head: bool = False) -> nn.Module:
    sizes = {"input_shape": (8,), "num_classes": 11, "width": 8, "num_layers": 2, "num_heads": 2, "dropout": 0.0}
    return Transformer(**sizes, positions="rotary", tied_head=tied_head)


def tied_transformer() -> nn.Module:
    return transformer(tied_head=True)


def speed_cnn() -> nn.Module:
    model = SpeedCNN(
        input_shape=(3, 16, 16), num_classes=5, widths=[16, 32], whitening=True, whitening_samples=20, whitening_eps=1e-3, dirac=True,
        norm_scale=False, norm_momentum=0.5, norm_eps=1e-5, activation="gelu", unit_head=True, logits_scale=None,
    )  # fmt: skip
    model.initialise_from(torch.arange(20 * 3 * 16 * 16).reshape(20, 3, 16, 16).float().sin())
    return model


class Layers(nn.Module):
    """Ways of making weights that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.rnn = nn.GRU(4, 4)
        self.scaled = nn.Linear(4, 4)
        nn.init.orthogonal_(self.scaled.weight, gain=2)
        with torch.no_grad():
            self.scaled.weight[:2] *= 0.5
            self.scaled.bias.data = torch.linspace(0, 1, 4)
            self.scaled.bias[1:3] = 1
        self.given = nn.Parameter(torch.from_numpy(np.random.default_rng(0).normal(size=(2, 3))))
        self.drawn = nn.Parameter(torch.randn(4, 2, device="cpu").t().contiguous(), requires_grad=False)
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("scale", torch.tensor([1.0, 2.0]) * 3)


class ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))
        if self.weight.sum().item() > 0:
            nn.init.zeros_(self.weight)


class DrawsUntilItFits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(3, 5)))


class ChangesWhatItUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        values = torch.from_numpy(np.ones(3, dtype=np.float32))
        self.weight = nn.Parameter(torch.empty(3).copy_(values))
        values.zero_()


class SeedsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(3, 3)


class DrawsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.other = nn.Parameter(torch.empty(3).normal_(generator=torch.Generator().manual_seed(1)))


RECORDED = [resnet9, mlp, transformer, tied_transformer, speed_cnn, Layers]


@pytest.mark.parametrize("construct", [*RECORDED, ReadsValues, DrawsUntilItFits, ChangesWhatItUsed, SeedsItself, DrawsItself])
def test_weights_are_those_of_the_constructor(construct: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    seed_everything(3)
    expected, drawn = construct(), torch.rand(1)
    seed_everything(3)
    with caplog.at_level("INFO"):
        model, weights = on_meta_device(construct)
    assert any("cannot be recorded" in line for line in caplog.messages) == (construct not in RECORDED)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    weights.load(model, CPU)
    assert torch.rand(1) == drawn, "what is drawn afterwards is the same, too"
    for named in ("named_parameters", "named_buffers"):
        found, wanted = (dict(getattr(each, named)()) for each in (model, expected))
        assert list(found) == list(wanted), "what is shared goes on being shared"
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name
            assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride())
            assert found[name].requires_grad == tensor.requires_grad


def test_a_constructors_own_error_is_raised() -> None:
    def construct() -> nn.Module:
        raise ValueError("no such width")

    with pytest.raises(ValueError, match="no such width"):
        on_meta_device(construct)
