"""The small convolutional network, and the normalisation layers that it shares with others."""

from typing import Any

import pytest
import torch
from torch import nn

from autotune.errors import ConfigError
from autotune.workloads.simple_cnn import SimpleCNN, norm_layers


@pytest.mark.parametrize(
    ("input_shape", "num_features"),
    [
        ((3, 32, 32), 32 * 6 * 6),
        ((1, 28, 28), 32 * 5 * 5),
        ((1, 8, 8), 32 * 2 * 2),
        ((3, 32, 8), 32 * 8 * 2),
        ((1, 4, 4), 32),
    ],
)
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_linear_layer_has_what_the_convolutions_leave(
    input_shape: tuple[int, int, int], num_features: int, norm: str
) -> None:
    model = SimpleCNN(input_shape=input_shape, num_classes=10, widths=[16, 32], norm=norm)
    assert model.classifier.in_features == num_features
    assert model(torch.zeros(2, *input_shape)).shape == (2, 10)


def test_layers_are_as_described() -> None:
    model = SimpleCNN(input_shape=[3, 32, 32], num_classes=10, widths=[16, 32], norm="none")
    assert [type(layer) for layer in model.features] == [nn.Conv2d, nn.ReLU, nn.MaxPool2d] * 2
    model = SimpleCNN(input_shape=[3, 32, 32], num_classes=10, widths=[16], norm="batch")
    assert [type(layer) for layer in model.features] == [
        nn.Conv2d,
        nn.BatchNorm2d,
        nn.ReLU,
        nn.MaxPool2d,
    ]
    model = SimpleCNN(input_shape=[3, 32, 32], num_classes=10, widths=[16], norm="group")
    assert [type(layer) for layer in model.features] == [
        nn.Conv2d,
        nn.GroupNorm,
        nn.ReLU,
        nn.MaxPool2d,
    ]
    assert model.features[0].bias is None


@pytest.mark.parametrize(
    ("num_channels", "num_groups"), [(4, 1), (8, 1), (16, 2), (64, 8), (20, 2), (12, 1), (11, 1)]
)
def test_group_norm_leaves_each_group_at_least_eight_channels_where_there_are_as_many(
    num_channels: int, num_groups: int
) -> None:
    model = SimpleCNN(input_shape=[1, 8, 8], num_classes=2, widths=[num_channels], norm="group")
    assert model.features[1].num_groups == num_groups


def test_group_norm_treats_each_sample_by_itself_and_batch_norm_does_not() -> None:
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for norm, alone in (("group", True), ("batch", False)):
        model = SimpleCNN(input_shape=[1, 8, 8], num_classes=2, widths=[16], norm=norm)
        assert torch.allclose(model(images)[:1], model(images[:1]), atol=1e-5) is alone
        normalised = model.features[:2](images)
        halves = (
            normalised[0].unflatten(0, (2, 8)).flatten(1)
            if alone
            else normalised.transpose(0, 1).flatten(1)
        )
        assert torch.allclose(halves.mean(1), torch.zeros(len(halves)), atol=1e-5)
        assert torch.allclose(halves.var(1, unbiased=False), torch.ones(len(halves)), atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"input_shape": [1, 8, 7], "widths": [4, 4, 4]},
            "model: an input of 8x7 is too small for 3 convolutions",
        ),
        ({"input_shape": [8, 8]}, r"model: input_shape is \[8, 8\]"),
        ({"num_classes": 0}, "model: num_classes is 0"),
        ({"widths": []}, r"model.widths: found \[\]"),
        ({"widths": [16, 0]}, r"model.widths: found \[16, 0\]"),
        ({"norm": "layer"}, "model.norm: found 'layer', accepted are batch, group, none"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "input_shape": [1, 8, 8],
        "num_classes": 10,
        "widths": [16, 32],
        "norm": "none",
    } | change
    with pytest.raises(ConfigError, match=message) as raised:
        SimpleCNN(**arguments)
    assert "\n" not in str(raised.value)


def test_batch_norm_takes_each_channel_over_the_batch() -> None:
    (layer,) = norm_layers("batch", 6)
    outputs = layer(3 * torch.randn(50, 6, 4, 4) + 2)
    assert torch.allclose(outputs.mean((0, 2, 3)), torch.zeros(6), atol=1e-5)
    assert torch.allclose(outputs.std((0, 2, 3)), torch.ones(6), atol=1e-2)


@pytest.mark.parametrize(
    ("num_channels", "num_groups"), [(32, 4), (24, 3), (20, 2), (13, 1), (5, 1)]
)
def test_group_norm_takes_each_sample_over_equal_groups_of_eight_channels_and_more(
    num_channels: int, num_groups: int
) -> None:
    (layer,) = norm_layers("group", num_channels)
    outputs = layer(3 * torch.randn(4, num_channels, 5, 5) + 2).view(4, num_groups, -1)
    assert torch.allclose(outputs.mean(2), torch.zeros(4, num_groups), atol=1e-5)
    assert torch.allclose(outputs.std(2), torch.ones(4, num_groups), atol=2e-2)


def test_without_a_norm_there_is_no_layer() -> None:
    assert norm_layers("none", 8) == []


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model.norm: found 'layer', accepted are batch, group, none"
    ):
        norm_layers("layer", 8)
