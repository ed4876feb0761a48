"""The convolutional networks: their layers, and what they refuse."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.errors import ConfigError
from autotune.workloads.cnn import ResNet9, SimpleCNN, SpeedCNN, whitening_filters

SPEED: dict[str, Any] = {
    "input_shape": (3, 16, 16),
    "num_classes": 10,
    "widths": [32, 48],
    "whitening": True,
    "whitening_samples": 200,
    "whitening_eps": 1e-6,
    "dirac": True,
    "norm_scale": False,
    "norm_momentum": 0.4,
    "norm_eps": 1e-12,
    "activation": "gelu",
    "unit_head": True,
    "logits_scale": None,
}


RESNET: dict[str, Any] = {
    "input_shape": (3, 32, 32),
    "num_classes": 10,
    "widths": [4, 8, 8, 16],
    "norm": "batch",
    "logits_scale": 0.125,
}


def speed_cnn(**settings: Any) -> SpeedCNN:
    return SpeedCNN(**SPEED | settings)


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


@pytest.mark.parametrize(
    ("num_channels", "num_groups"), [(4, 1), (8, 1), (16, 2), (64, 8), (20, 2), (12, 1), (11, 1)]
)
def test_group_norm_leaves_each_group_at_least_eight_channels_where_there_are_as_many(
    num_channels: int, num_groups: int
) -> None:
    model = SimpleCNN(input_shape=[1, 8, 8], num_classes=2, widths=[num_channels], norm="group")
    assert model.features[1].num_groups == num_groups


@pytest.mark.parametrize(
    ("norm", "layer"), [("none", None), ("batch", nn.BatchNorm2d), ("group", nn.GroupNorm)]
)
def test_a_norm_takes_the_place_of_a_convolutions_bias(
    norm: str, layer: type[nn.Module] | None
) -> None:
    model = SimpleCNN(input_shape=[3, 32, 32], num_classes=10, widths=[16], norm=norm)
    kinds = [nn.Conv2d, *([layer] if layer else []), nn.ReLU, nn.MaxPool2d]
    assert [type(each) for each in model.features] == kinds
    assert (model.features[0].bias is None) is (layer is not None)


def test_resnet9_has_the_parameters_it_is_known_for() -> None:
    with torch.device("meta"):
        model = ResNet9(**RESNET | {"widths": [64, 128, 256, 512]})
    assert sum(each.numel() for each in model.parameters()) == 6_573_120


def test_logits_are_those_of_the_blocks_in_turn_pooled_to_their_maxima_and_scaled() -> None:
    model = ResNet9(**RESNET).eval()
    features = inputs = torch.randn(2, 3, 32, 32)
    sizes = []
    for block in model.blocks():
        features = block(features)
        sizes.append(tuple(features.shape[1:]))
    assert sizes == [(4, 32, 32), (8, 16, 16), (8, 8, 8), (16, 4, 4)]
    assert torch.allclose(model(inputs), features.amax((2, 3)) @ model.head.weight.T / 8)


@pytest.fixture
def images() -> Tensor:
    """Smooth images ``[60, 3, 16, 16]``, neighbours and channels of which are correlated, and
    whose mean is not 0.
    """
    torch.manual_seed(0)
    noise = torch.randn(60, 1, 18, 18) + 0.3 * torch.randn(60, 3, 18, 18)
    return functional.avg_pool2d(noise, 3, stride=1) + torch.randn(60, 3, 1, 1) + 0.5


def test_whitened_patches_have_an_identity_second_moment(images: Tensor) -> None:
    outputs = functional.conv2d(images, whitening_filters(images, 1e-6)).transpose(0, 1).flatten(1)
    assert torch.allclose(outputs @ outputs.T / outputs.shape[1], torch.eye(12), atol=1e-2)


def test_the_first_layer_is_the_whitening_filters_and_their_negatives_and_only_its_bias_is_trained(
    images: Tensor,
) -> None:
    model = speed_cnn(whitening_samples=40)
    model.initialise_from(images)
    filters = whitening_filters(images[:40], 1e-6)
    assert torch.equal(model.patches.weight, torch.cat([filters, -filters]))
    model(images).square().sum().backward()
    assert [parameter.grad is None for parameter in model.patches.parameters()] == [True, False]


def test_a_dirac_start_passes_the_input_channels_through() -> None:
    inputs = torch.randn(2, 24, 8, 8)
    outputs = speed_cnn().groups[0][0](inputs)
    assert torch.equal(outputs[:, :24], inputs)


def test_speed_cnns_logits_are_those_of_the_layers_in_turn(images: Tensor) -> None:
    model = speed_cnn(activation="silu")
    model.initialise_from(images)
    features = functional.silu(model.patches(images))
    sizes = [features.shape[2]]
    for group in model.blocks():
        features = group(features)
        sizes.append(features.shape[2])
    assert sizes == [15, 7, 3]
    expected = features.amax((2, 3)) @ model.head.weight.T / 48
    assert torch.allclose(model(images), expected, atol=1e-6)


def test_each_parameter_is_of_one_kind() -> None:
    for whitening in (True, False):
        model = speed_cnn(whitening=whitening)
        kinds = model.parameter_groups()
        listed = [parameter for kind in kinds.values() for parameter in kind]
        assert len(listed) == len(set(listed))
        assert set(listed) == set(model.parameters())
        assert all(each.ndim == 4 for each in kinds["filters"])
        assert kinds["head"] == [model.head.weight]
        assert kinds["whitening_bias"] == ([model.patches.bias] if whitening else [])


SIMPLE: dict[str, Any] = {
    "input_shape": [1, 8, 8],
    "num_classes": 10,
    "widths": [16, 32],
    "norm": "none",
}


@pytest.mark.parametrize(
    ("model", "settings", "change", "message"),
    [
        (SimpleCNN, SIMPLE, {"input_shape": [1, 8, 7], "widths": [4, 4, 4]}, "images .* from 8x8"),
        (SimpleCNN, SIMPLE, {"input_shape": [8, 8]}, r"model: input_shape is \[8, 8\]"),
        (SimpleCNN, SIMPLE, {"widths": [16, 0]}, r"model.widths: found \[16, 0\]"),
        (SimpleCNN, SIMPLE, {"norm": "layer"}, "found 'layer', use one of batch, group, none"),
        (ResNet9, RESNET, {"input_shape": (3, 7, 32)}, "images .* from 8x8"),
        (ResNet9, RESNET, {"widths": [8, 8]}, r"model.widths: found \[8, 8\], use four"),
        (SpeedCNN, SPEED, {"widths": []}, r"model.widths: found \[\]"),
        (SpeedCNN, SPEED, {"activation": "sine"}, "found 'sine', use one of relu, gelu"),
        (SpeedCNN, SPEED, {"input_shape": (1, 8, 8), "widths": [8, 8, 8]}, "from 9x9"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(
    model: type[nn.Module], settings: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        model(**settings | change)
