"""A decoder-only transformer: each position predicts the next token and sees no later one."""

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
    """A token embedding, ``num_layers`` blocks of causal attention and a GELU network, then a
    linear head.

    ``input_shape`` is ``[length]``, the longest sequence that the model takes, and ``num_classes``
    the vocabulary's size; ``forward`` takes int64 ``[batch, length]`` and returns logits ``[batch,
    length, num_classes]``. ``width`` is that of the residual stream, a multiple of ``num_heads``.
    ``positions`` is ``learned`` (an embedding per position) or ``rotary`` (queries and keys rotated
    by their position; the width of a head must be even). With ``tied_head`` the head shares the
    token embedding's weights.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019) for the
    norm before each part, and for initial weights that write to the residual stream smaller by the
    root of the number of such layers. Su et al., "RoFormer" (2021) for rotary positions. Changed
    here, since trainings are short: initial weights have a standard deviation of one over the root
    of their fan-in, embeddings of 1 (theirs have 0.02), and linear layers have no bias.

    Raises:
        ConfigError: a size is not positive, ``dropout`` or ``positions`` is not accepted, or sizes
            do not fit together.
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
        self.layers = nn.ModuleList(
            _Block(width, num_heads, dropout, rotary_length) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, num_classes, bias=False)
        self._initialise()
        # An embedding's weights have a standard deviation of 1, the head's of one over the root of
        # the width.
        self.head_input_scale = width**-0.5 if tied_head else 1.0
        if tied_head:
            self.head.weight = self.tokens.weight

    def _initialise(self) -> None:
        """Draw the linear layers' initial weights.

        Torch's own initialisation of embeddings is kept.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for block in self.layers:
            assert isinstance(block, _Block)
            for residual_layer in (block.attention.merge, block.contract):
                nn.init.normal_(
                    residual_layer.weight,
                    std=(residual_layer.in_features * 2 * len(self.layers)) ** -0.5,
                )

    def blocks(self) -> Sequence[nn.Module]:
        """The transformer blocks, whose activations may be recomputed."""
        return list(self.layers)

    def pipeline_layers(self) -> Sequence[nn.Module]:
        """The modules of the forward pass, in the order in which they are applied.

        Raises:
            ConfigError: the head shares its weights with the token embedding.
        """
        if self.head.weight is self.tokens.weight:
            raise ConfigError(
                "model.tied_head: found true, accepted with parallelism=pipeline is false: one"
                " worker cannot hold both ends"
            )
        return [
            _Embedding(self.tokens, self.positions, self.dropout),
            *self.layers,
            _Head(self.norm, self.head, self.head_input_scale),
        ]

    def tensor_plan(self, size: int) -> "Mapping[str, ParallelStyle]":
        """How ``size`` ranks share the weights: each block's heads and hidden units are divided
        among them.

        Raises:
            ConfigError: the number of heads is not a multiple of ``size``.
        """
        # a second to import, only for this
        from torch.distributed.tensor.parallel import (  # noqa: PLC0415
            ColwiseParallel,
            RowwiseParallel,
        )

        if self.num_heads % size:
            raise ConfigError(
                f"model.num_heads: found {self.num_heads}, accepted with {size} workers that share"
                " layers is a multiple"
            )
        plan: dict[str, ParallelStyle] = {}
        for index in range(len(self.layers)):
            plan |= {
                f"layers.{index}.attention.project": ColwiseParallel(),
                f"layers.{index}.attention.merge": RowwiseParallel(),
            }
            plan |= {
                f"layers.{index}.expand": ColwiseParallel(),
                f"layers.{index}.contract": RowwiseParallel(),
            }
        return plan

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[batch, length, num_classes]`` of tokens ``[batch, length]``.

        Raises:
            ConfigError: inputs are floating-point numbers.
        """
        hidden = _embedded(self.tokens, self.positions, self.dropout, inputs)
        for block in self.layers:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden) * self.head_input_scale)
        return logits


def _embedded(
    tokens: nn.Embedding, positions: nn.Embedding | None, dropout: nn.Dropout, inputs: Tensor
) -> Tensor:
    if inputs.is_floating_point():
        raise ConfigError(
            f"model: found inputs of {inputs.dtype}, accepted are tokens: whole numbers"
        )
    hidden = tokens(inputs)
    if positions is not None:
        hidden = hidden + positions.weight[: inputs.shape[1]]
    dropped: Tensor = dropout(hidden)
    return dropped


class _Embedding(nn.Module):
    """Embeds tokens ``[batch, length]`` into ``[batch, length, width]``: the first layer of a
    pipeline.
    """

    def __init__(
        self, tokens: nn.Embedding, positions: nn.Embedding | None, dropout: nn.Dropout
    ) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = tokens, positions, dropout

    def forward(self, inputs: Tensor) -> Tensor:
        return _embedded(self.tokens, self.positions, self.dropout, inputs)


class _Head(nn.Module):
    """Maps ``[batch, length, width]`` to logits ``[batch, length, num_classes]``: the last layer
    of a pipeline.
    """

    def __init__(self, norm: nn.LayerNorm, head: nn.Linear, scale: float) -> None:
        super().__init__()
        self.norm, self.head, self.scale = norm, head, scale

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(hidden) * self.scale)
        return logits


class _Block(nn.Module):
    """A residual block of causal attention and a GELU network, each with a norm before:
    ``[batch, length, width]`` to the same shape.
    """

    def __init__(
        self, width: int, num_heads: int, dropout: float, rotary_length: int | None
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = _CausalAttention(width, num_heads, dropout, rotary_length)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.expand = nn.Linear(width, _MLP_FACTOR * width, bias=False)
        self.contract = nn.Linear(_MLP_FACTOR * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        contracted = self.contract(functional.gelu(self.expand(self.mlp_norm(hidden))))
        outputs: Tensor = hidden + self.dropout(contracted)
        return outputs


class _CausalAttention(nn.Module):
    """Attention of every position to itself and to earlier positions: ``[batch, length, width]``
    to the same shape.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(
        self, width: int, num_heads: int, dropout: float, rotary_length: int | None
    ) -> None:
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
        # The projection is ordered by head, and the number of heads is inferred (-1), so that ranks
        # that share it hold whole heads.
        projected = self.project(hidden).view(batch, length, -1, 3, width // self.num_heads)
        queries, keys, values = projected.permute(3, 0, 2, 1, 4)
        if self.is_rotary:
            queries, keys = self._turned(queries), self._turned(keys)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, is_causal=True
        )
        merged: Tensor = self.merge(attended.transpose(1, 2).reshape(batch, length, -1))
        return merged

    def _turned(self, heads: Tensor) -> Tensor:
        """Rotate each pair of numbers, half a head apart, by its position's angle.

        ``[batch, heads, length, head width]``.
        """
        length = heads.shape[2]
        cosine, sine = self.cosine[:length].to(heads.dtype), self.sine[:length].to(heads.dtype)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _rotary_angles(length: int, head_width: int) -> Tensor:
    """The angle of each position and pair, ``[length, head_width / 2]``, in radians."""
    rates = _ROTARY_BASE ** -(torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    return torch.arange(length, dtype=torch.float32)[:, None] * rates


def _check(
    input_shape: Sequence[int],
    num_classes: int,
    width: int,
    num_layers: int,
    num_heads: int,
    positions: str,
    dropout: float,
) -> None:
    if len(input_shape) != 1 or input_shape[0] < 1:
        raise ConfigError(
            f"model: input_shape is {list(input_shape)}, accepted are sequences of tokens [length]"
        )
    if num_classes < 1:
        raise ConfigError(f"model: num_classes is {num_classes}, accepted are numbers from 1")
    for key, value in (("width", width), ("num_layers", num_layers), ("num_heads", num_heads)):
        if value < 1:
            raise ConfigError(f"model.{key}: found {value}, accepted is a whole number from 1")
    if width % num_heads:
        raise ConfigError(
            f"model.width: found {width}, accepted is a multiple of model.num_heads = {num_heads}"
        )
    if positions not in ("learned", "rotary"):
        raise ConfigError(f"model.positions: found {positions!r}, accepted are learned, rotary")
    if positions == "rotary" and width // num_heads % 2:
        raise ConfigError(
            f"model.width: found {width}, accepted with rotary positions is an even multiple of"
            f" model.num_heads = {num_heads}"
        )
    if not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout: found {dropout}, accepted is from 0 to below 1")
