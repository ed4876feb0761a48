"""A decoder-only transformer: each position predicts what comes next and sees nothing that comes later."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.errors import ConfigError

_MLP_FACTOR = 4
_ROTARY_BASE = 10_000.0


class Transformer(nn.Module):
    """Embedded tokens through ``num_layers`` blocks of causal attention and a GELU network, then a linear head.

    ``input_shape`` is ``[length]``, the longest sequence it takes, and ``num_classes`` the vocabulary's size; ``forward`` takes
    int64 ``[batch, length]`` and returns logits ``[batch, length, num_classes]``. ``width`` is that of the residual stream, a multiple of
    ``num_heads``. ``positions`` is ``learned`` (an embedding for each) or ``rotary`` (queries and keys turned by their position;
    the width of a head must be even). With ``tied_head`` the token embedding's weights are the head's, too.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019) for the normalisation before each part, and
    that weights that write to the residual stream begin smaller by the root of how many do. Su et al., "RoFormer" (2021) for rotary
    positions. What we changed, since a training here is short: weights begin with a deviation of one over the root of what they
    sum over, embeddings with 1 (theirs have 0.02), and linear layers have no bias.

    Raises:
        ConfigError: a size that is not positive, or does not go with another one.
    """

    def __init__(
        self,
        *,
        input_shape: Sequence[int],
        num_classes: int,
        width: int,
        num_layers: int,
        num_heads: int,
        positions: str,
        dropout: float,
        tied_head: bool,
    ) -> None:
        super().__init__()
        _check(input_shape, num_classes, width, num_layers, num_heads, positions, dropout)
        length = input_shape[0]
        self.tokens = nn.Embedding(num_classes, width)
        self.positions = nn.Embedding(length, width) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)
        rotary_length = length if positions == "rotary" else None
        self.layers = nn.ModuleList(_Block(width, num_heads, dropout, rotary_length) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, num_classes, bias=False)
        self._initialise()
        # An embedding has a deviation of 1 where the head's weights have one over the root of the width.
        self.head_input_scale = width**-0.5 if tied_head else 1.0
        if tied_head:
            self.head.weight = self.tokens.weight

    def _initialise(self) -> None:
        """Draw what torch's own embeddings, which begin as they should, leave."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for block in self.layers:
            assert isinstance(block, _Block)
            for writes in (block.attention.merge, block.contract):
                nn.init.normal_(writes.weight, std=(writes.in_features * 2 * len(self.layers)) ** -0.5)

    def blocks(self) -> Sequence[nn.Module]:
        """The parts whose activations may be recomputed."""
        return list(self.layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[batch, length, num_classes]`` of tokens ``[batch, length]``.

        Raises:
            ConfigError: for inputs that are no whole numbers.
        """
        if inputs.is_floating_point():
            raise ConfigError(f"model: found inputs of {inputs.dtype}, accepted are tokens: whole numbers")
        hidden = self.tokens(inputs)
        if self.positions is not None:
            hidden = hidden + self.positions.weight[: inputs.shape[1]]
        hidden = self.dropout(hidden)
        for block in self.layers:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden) * self.head_input_scale)
        return logits


class _Block(nn.Module):
    """Attention and a GELU network, each normalised before and added to what came in: ``[batch, length, width]`` to the same."""

    def __init__(self, width: int, num_heads: int, dropout: float, rotary_length: int | None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = _CausalAttention(width, num_heads, dropout, rotary_length)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.expand = nn.Linear(width, _MLP_FACTOR * width, bias=False)
        self.contract = nn.Linear(_MLP_FACTOR * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        written = self.contract(functional.gelu(self.expand(self.mlp_norm(hidden))))
        added: Tensor = hidden + self.dropout(written)
        return added


class _CausalAttention(nn.Module):
    """Every position attends to itself and to earlier ones: ``[batch, length, width]`` to the same."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, width: int, num_heads: int, dropout: float, rotary_length: int | None) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.is_rotary = rotary_length is not None
        if rotary_length is not None:
            angles = _rotary_angles(rotary_length, width // num_heads)
            self.register_buffer("cosine", angles.cos(), persistent=False)
            self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        projected = self.project(hidden).view(batch, length, 3, self.num_heads, width // self.num_heads)
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)
        if self.is_rotary:
            queries, keys = self._turned(queries), self._turned(keys)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        merged: Tensor = self.merge(attended.transpose(1, 2).reshape(batch, length, width))
        return merged

    def _turned(self, heads: Tensor) -> Tensor:
        """Each pair of numbers turned by its position's angle; ``[batch, heads, length, head width]``, pairs half a head apart."""
        length = heads.shape[2]
        cosine, sine = self.cosine[:length].to(heads.dtype), self.sine[:length].to(heads.dtype)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _rotary_angles(length: int, head_width: int) -> Tensor:
    """The angle of each position and pair, ``[length, head_width / 2]``, in radians."""
    rates = _ROTARY_BASE ** -(torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    return torch.arange(length, dtype=torch.float32)[:, None] * rates


def _check(
    input_shape: Sequence[int], num_classes: int, width: int, num_layers: int, num_heads: int, positions: str, dropout: float
) -> None:
    if len(input_shape) != 1 or input_shape[0] < 1:
        raise ConfigError(f"model: input_shape is {list(input_shape)}, accepted are sequences of tokens [length]")
    if num_classes < 1:
        raise ConfigError(f"model: num_classes is {num_classes}, accepted are numbers from 1")
    for key, value in (("width", width), ("num_layers", num_layers), ("num_heads", num_heads)):
        if value < 1:
            raise ConfigError(f"model.{key}: found {value}, accepted is a whole number from 1")
    if width % num_heads:
        raise ConfigError(f"model.width: found {width}, accepted is a multiple of model.num_heads = {num_heads}")
    if positions not in ("learned", "rotary"):
        raise ConfigError(f"model.positions: found {positions!r}, accepted are learned, rotary")
    if positions == "rotary" and width // num_heads % 2:
        raise ConfigError(
            f"model.width: found {width}, accepted with rotary positions is an even multiple of model.num_heads = {num_heads}"
        )
    if not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout: found {dropout}, accepted is from 0 to below 1")
