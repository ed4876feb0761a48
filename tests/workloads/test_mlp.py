from typing import Any

import pytest
import torch
from torch import nn

from autotune.errors import ConfigError
from autotune.workloads.mlp import MLP

SETTINGS: dict[str, Any] = {
    "input_shape": [2, 3],
    "num_classes": 3,
    "widths": [5, 4],
    "norm": "none",
    "activation": "relu",
    "dropout": 0.0,
}


def model_with(**changes: Any) -> MLP:
    return MLP(**(SETTINGS | changes))


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, [nn.Linear, nn.ReLU] * 2),
        ({"norm": "batch", "activation": "silu"}, [nn.Linear, nn.BatchNorm1d, nn.SiLU] * 2),
        (
            {"norm": "layer", "activation": "gelu", "dropout": 0.2},
            [nn.Linear, nn.LayerNorm, nn.GELU, nn.Dropout] * 2,
        ),
        ({"widths": [7], "activation": "tanh"}, [nn.Linear, nn.Tanh]),
        ({"widths": []}, []),
    ],
)
def test_layers_are_as_described(changes: dict[str, Any], kinds: list[type[nn.Module]]) -> None:
    model = model_with(**changes)
    assert [type(layer) for layer in model.hidden] == kinds
    assert model(torch.randn(4, 2, 3)).shape == (4, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widths": [5, 0]}, r"model\.widths: found \[5, 0\]"),
        ({"norm": "group"}, r"model\.norm: found 'group', use one of batch, layer, none"),
        (
            {"activation": "sine"},
            r"model\.activation: found 'sine', use one of relu, gelu, silu, tanh",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        model_with(**change)
    assert "\n" not in str(refused.value)


def test_tokens_are_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"model: found inputs of torch\.int64; MLP needs numbers"
    ):
        model_with()(torch.zeros(2, 2, 3, dtype=torch.int64))
