"""A decoder-only transformer: each position predicts what comes next and sees nothing that comes later."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

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
        length, self.num_heads = input_shape[0], num_heads
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

    def pipeline_layers(self) -> Sequence[nn.Module]:
        """Modules that one after the other are the forward pass.

        Raises:
            ConfigError: first and last one have the same weights.
        """
        if self.head.weight is self.tokens.weight:
            raise ConfigError("model.tied_head: found true, accepted with parallelism=pipeline is false: one worker cannot hold both ends")
        return [_Embedding(self.tokens, self.positions, self.dropout), *self.layers, _Head(self.norm, self.head, self.head_input_scale)]

    def tensor_plan(self, size: int) -> "Mapping[str, ParallelStyle]":
        """How ``size`` ranks share the weights: each block's heads and hidden units.

        Raises:
            ConfigError: heads that so many cannot share.
        """
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel  # noqa: PLC0415  # a second, and only for this

        if self.num_heads % size:
            raise ConfigError(f"model.num_heads: found {self.num_heads}, accepted with {size} workers that share layers is a multiple")
        plan: dict[str, ParallelStyle] = {}
        for place in range(len(self.layers)):
            plan |= {f"layers.{place}.attention.project": ColwiseParallel(), f"layers.{place}.attention.merge": RowwiseParallel()}
            plan |= {f"layers.{place}.expand": ColwiseParallel(), f"layers.{place}.contract": RowwiseParallel()}
        return plan

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[batch, length, num_classes]`` of tokens ``[batch, length]``.

        Raises:
            ConfigError: for inputs that are no whole numbers.
        """
        hidden = _embedded(self.tokens, self.positions, self.dropout, inputs)
        for block in self.layers:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden) * self.head_input_scale)
        return logits


def _embedded(tokens: nn.Embedding, positions: nn.Embedding | None, dropout: nn.Dropout, inputs: Tensor) -> Tensor:
    if inputs.is_floating_point():
        raise ConfigError(f"model: found inputs of {inputs.dtype}, accepted are tokens: whole numbers")
    hidden = tokens(inputs)
    if positions is not None:
        hidden = hidden + positions.weight[: inputs.shape[1]]
    dropped: Tensor = dropout(hidden)
    return dropped


class _Embedding(nn.Module):
    """The first part as a module: tokens ``[batch, length]`` to ``[batch, length, width]``."""

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding | None, dropout: nn.Dropout) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = tokens, positions, dropout

    def forward(self, inputs: Tensor) -> Tensor:
        return _embedded(self.tokens, self.positions, self.dropout, inputs)


class _Head(nn.Module):
    """The last part as a module: ``[batch, length, width]`` to logits ``[batch, length, num_classes]``."""

    def __init__(self, norm: nn.LayerNorm, head: nn.Linear, scale: float) -> None:
        super().__init__()
        self.norm, self.head, self.scale = norm, head, scale

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(hidden) * self.scale)
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
        # Heads come first in the projection, and are counted here, so that ranks that share it hold whole ones.
        projected = self.project(hidden).view(batch, length, -1, 3, width // self.num_heads)
        queries, keys, values = projected.permute(3, 0, 2, 1, 4)
        if self.is_rotary:
            queries, keys = self._turned(queries), self._turned(keys)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        merged: Tensor = self.merge(attended.transpose(1, 2).reshape(batch, length, -1))
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
