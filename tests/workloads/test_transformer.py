from typing import Any

import pytest
import torch
from torch.nn import functional

from autotune.errors import ConfigError
from autotune.workloads.transformer import Transformer

SETTINGS: dict[str, Any] = {
    "input_shape": [12],
    "num_classes": 7,
    "width": 16,
    "num_layers": 2,
    "num_heads": 4,
    "positions": "rotary",
    "dropout": 0.0,
    "tied_head": False,
}
POSITIONS = ("rotary", "learned")


def model_with(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**(SETTINGS | changes))


def tokens(batch: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(7, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("changed", [1, 6, 11])
def test_a_later_token_changes_no_earlier_output_and_all_later_ones(
    positions: str, changed: int
) -> None:
    model = model_with(positions=positions)
    inputs = tokens()
    other = inputs.clone()
    other[:, changed] = (other[:, changed] + 1) % 7
    difference = (model(inputs) - model(other)).abs().amax(dim=(0, 2))
    assert difference[:changed].max() < 1e-6
    assert difference[changed:].min() > 1e-4


def test_rotary_attention_goes_by_distance() -> None:
    attention = model_with(num_layers=1).layers[0].attention
    heads = torch.randn(2, 1, 1, 1, 4, generator=torch.Generator().manual_seed(2)).expand(
        2, 1, 1, 12, 4
    )
    queries, keys = (attention._turned(each) for each in heads)
    scores = (queries @ keys.transpose(-1, -2))[0, 0]
    for distance in range(1, 8):
        along = scores.diagonal(-distance)
        assert torch.allclose(along, along[:1].expand_as(along), atol=1e-5)
    assert scores.diagonal(-1)[0] != scores.diagonal(-2)[0]
    assert torch.allclose(queries.norm(dim=-1), heads[0].norm(dim=-1), atol=1e-5), (
        "turning changes no length"
    )


def test_attention_is_what_its_formula_says() -> None:
    attention = model_with(positions="learned", num_layers=1).layers[0].attention
    hidden = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3))
    # heads, and three parts of each
    projected = functional.linear(hidden, attention.project.weight).view(2, 5, 4, 3, 4)
    queries, keys, values = (projected[:, :, :, part].transpose(1, 2) for part in range(3))
    scores = (queries @ keys.transpose(-1, -2) / 2).masked_fill(
        torch.ones(5, 5).triu(1).bool(), -torch.inf
    )
    expected = (scores.softmax(dim=-1) @ values).transpose(1, 2).reshape(
        2, 5, 16
    ) @ attention.merge.weight.T
    assert torch.allclose(attention(hidden), expected, atol=1e-5)


def test_a_tied_head_is_the_embedding() -> None:
    tied = model_with(tied_head=True)
    assert tied.head.linear.weight is tied.embedding.tokens.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_shape": [1, 8, 8]}, r"input_shape is \[1, 8, 8\]; Transformer needs tokens"),
        ({"width": 20}, r"model\.width: found 20, use a multiple of 8: rotary positions with"),
        ({"width": 18, "positions": "learned"}, r"model\.width: found 18, use a multiple of 4"),
        ({"num_heads": 0}, r"model\.num_heads: found 0"),
        ({"positions": "sine"}, r"model\.positions: found 'sine', use one of learned, rotary"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        model_with(**change)
    assert "\n" not in str(refused.value)


def test_inputs_that_are_no_tokens_are_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"model: found inputs of torch\.float32; Transformer needs tokens"
    ):
        model_with()(torch.zeros(2, 12))
