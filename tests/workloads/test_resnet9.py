from typing import Any

import pytest
import torch
from torch import nn

from autotune.errors import ConfigError
from autotune.workloads.resnet9 import ResidualPair, ResNet9

SETTINGS: dict[str, Any] = {
    "input_shape": (3, 32, 32),
    "num_classes": 10,
    "widths": [4, 8, 8, 16],
    "norm": "batch",
    "logits_scale": 0.125,
}


def count(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def test_at_its_usual_widths_it_has_the_parameters_it_is_known_for() -> None:
    with torch.device("meta"):
        model = ResNet9(**SETTINGS | {"widths": [64, 128, 256, 512]})
    convolutions = [each for each in model.modules() if isinstance(each, nn.Conv2d)]
    assert len(convolutions) + 1 == 9
    assert sum(count(each) for each in convolutions) == 9 * (
        3 * 64 + 64 * 128 + 2 * 128**2 + 128 * 256 + 256 * 512 + 2 * 512**2
    )
    assert count(model) == 6_573_120


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("input_shape", [(3, 32, 32), (1, 8, 8), (2, 20, 9)])
def test_images_of_any_size_become_logits(norm: str, input_shape: tuple[int, int, int]) -> None:
    model = ResNet9(**SETTINGS | {"norm": norm, "input_shape": input_shape})
    assert model(torch.randn(2, *input_shape)).shape == (2, 10)
    assert all(
        (each.bias is not None) is (norm == "none")
        for each in model.modules()
        if isinstance(each, nn.Conv2d)
    )


def test_a_residual_pair_adds_its_convolutions_to_its_input() -> None:
    pair = ResidualPair(4, "none")
    inputs = torch.randn(2, 4, 5, 5)
    first, second = (each[0] for each in pair.pair)
    assert torch.allclose(pair(inputs), inputs + second(first(inputs).relu()).relu(), atol=1e-6)


def test_logits_are_those_of_the_blocks_in_turn_pooled_to_their_maxima_and_scaled() -> None:
    model = ResNet9(**SETTINGS).eval()
    features = inputs = torch.randn(2, 3, 32, 32)
    sizes = []
    for block in model.blocks():
        features = block(features)
        sizes.append(tuple(features.shape[1:]))
    assert sizes == [(4, 32, 32), (8, 16, 16), (8, 8, 8), (16, 4, 4)]
    assert torch.allclose(model(inputs), features.amax((2, 3)) @ model.head.weight.T / 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_shape": (3, 7, 32)}, r"model: input_shape is \[3, 7, 32\], accepted are images"),
        ({"input_shape": (3,)}, r"model: input_shape is \[3\]"),
        ({"widths": [8, 8]}, r"model.widths: found \[8, 8\], accepted are four"),
        ({"norm": "layer"}, "model.norm: found 'layer'"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ResNet9(**SETTINGS | change)
