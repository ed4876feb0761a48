from typing import Any

import pytest
import torch
from torch import nn

from autotune.errors import ConfigError
from autotune.workloads.simple_cnn import SimpleCNN


@pytest.mark.parametrize(
    ("input_shape", "num_features"),
    [((3, 32, 32), 32 * 6 * 6), ((1, 28, 28), 32 * 5 * 5), ((1, 8, 8), 32 * 2 * 2), ((3, 32, 8), 32 * 8 * 2), ((1, 4, 4), 32)],
)
@pytest.mark.parametrize("batch_norm", [True, False])
def test_linear_layer_has_what_the_convolutions_leave(input_shape: tuple[int, int, int], num_features: int, batch_norm: bool) -> None:
    model = SimpleCNN(input_shape=input_shape, num_classes=10, widths=[16, 32], batch_norm=batch_norm)
    assert model.classifier.in_features == num_features
    assert model(torch.zeros(2, *input_shape)).shape == (2, 10)


def test_layers_are_as_described() -> None:
    model = SimpleCNN(input_shape=[3, 32, 32], num_classes=10, widths=[16, 32], batch_norm=False)
    assert [type(layer) for layer in model.features] == [nn.Conv2d, nn.ReLU, nn.MaxPool2d] * 2
    model = SimpleCNN(input_shape=[3, 32, 32], num_classes=10, widths=[16], batch_norm=True)
    assert [type(layer) for layer in model.features] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_shape": [1, 8, 7], "widths": [4, 4, 4]}, "model: an input of 8x7 is too small for 3 convolutions"),
        ({"input_shape": [8, 8]}, r"model: input_shape is \[8, 8\]"),
        ({"num_classes": 0}, "model: num_classes is 0"),
        ({"widths": []}, r"model.widths: found \[\]"),
        ({"widths": [16, 0]}, r"model.widths: found \[16, 0\]"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"input_shape": [1, 8, 8], "num_classes": 10, "widths": [16, 32], "batch_norm": False} | change
    with pytest.raises(ConfigError, match=message) as raised:
        SimpleCNN(**arguments)
    assert "\n" not in str(raised.value)
