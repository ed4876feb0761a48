"""A decoder-only transformer: each position predicts the next token and sees no later one."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import parallel
from torch.nn import functional

from autotune.errors import ConfigError, check_choice, check_counts


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
        ConfigError: a size is not positive, ``positions`` is unknown, or sizes do not fit together.
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
        if len(input_shape) != 1:
            raise ConfigError(
                f"model: input_shape is {list(input_shape)}; Transformer needs tokens [length]"
            )
        check_counts("model", width=width, num_layers=num_layers, num_heads=num_heads)
        check_choice("model.positions", positions, ("learned", "rotary"))
        heads = num_heads * (2 if positions == "rotary" else 1)
        if width % heads:
            raise ConfigError(
                f"model.width: found {width}, use a multiple of {heads}: {positions} positions with"
                f" model.num_heads={num_heads}"
            )
        length, self.num_heads = input_shape[0], num_heads
        self.embedding = _Embedding(num_classes, width, length, positions, dropout)
        rotary_length = length if positions == "rotary" else None
        self.layers = nn.ModuleList(
            _Block(width, num_heads, dropout, rotary_length) for _ in range(num_layers)
        )
        self.head = _Head(width, num_classes, scale=width**-0.5 if tied_head else 1.0)
        self._initialise()
        if tied_head:
            self.head.linear.weight = self.embedding.tokens.weight

    def _initialise(self) -> None:
        """Draw the linear layers' initial weights, smaller ones for those that write to the
        residual stream.

        Torch's own initialisation of embeddings is kept.
        """
        linears = [
            (name, module) for name, module in self.named_modules() if isinstance(module, nn.Linear)
        ]
        for _, linear in linears:
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        for name, linear in linears:
            if name.endswith((".merge", ".contract")):
                nn.init.normal_(
                    linear.weight, std=(linear.in_features * 2 * len(self.layers)) ** -0.5
                )

    def blocks(self) -> Sequence[nn.Module]:
        """The transformer blocks, whose activations may be recomputed."""
        return list(self.layers)

    def tensor_plan(self, size: int) -> Mapping[str, parallel.ParallelStyle]:
        """How ``size`` ranks share the weights: each block's heads and hidden units are divided
        among them.

        Raises:
            ConfigError: the number of heads is not a multiple of ``size``.
        """
        if self.num_heads % size:
            raise ConfigError(
                f"model.num_heads: found {self.num_heads}, use a multiple of {size}, the number of"
                " workers that share layers"
            )
        # of all layers
        return {
            "layers.*.attention.project": parallel.ColwiseParallel(),
            "layers.*.attention.merge": parallel.RowwiseParallel(),
            "layers.*.expand": parallel.ColwiseParallel(),
            "layers.*.contract": parallel.RowwiseParallel(),
        }

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[batch, length, num_classes]`` of tokens ``[batch, length]``.

        Raises:
            ConfigError: inputs are floating-point numbers.
        """
        hidden = self.embedding(inputs)
        for block in self.layers:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class _Embedding(nn.Module):
    """Embeds tokens ``[batch, length]`` into ``[batch, length, width]``."""

    def __init__(
        self, num_classes: int, width: int, length: int, positions: str, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_classes, width)
        self.positions = nn.Embedding(length, width) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.is_floating_point():
            raise ConfigError(f"model: found inputs of {inputs.dtype}; Transformer needs tokens")
        hidden: Tensor = self.tokens(inputs)
        if self.positions is not None:
            hidden = hidden + self.positions.weight[: inputs.shape[1]]
        dropped: Tensor = self.dropout(hidden)
        return dropped


class _Head(nn.Module):
    """Maps ``[batch, length, width]`` to logits ``[batch, length, num_classes]``.

    ``scale`` makes up for weights shared with the embedding: those have a standard deviation of 1,
    a head's of one over the root of the width.
    """

    def __init__(self, width: int, num_classes: int, *, scale: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.linear = nn.Linear(width, num_classes, bias=False)
        self.scale = scale

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(hidden) * self.scale)
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
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)
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

    rotations: Tensor | None
    """Cosines and sines of each position's angles, ``[2, length, head width / 2]``."""

    def __init__(
        self, width: int, num_heads: int, dropout: float, rotary_length: int | None
    ) -> None:
        super().__init__()
        self.head_width, self.dropout = width // num_heads, dropout
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        rotations = None
        if rotary_length is not None:
            exponents = torch.arange(0, self.head_width, 2, dtype=torch.float32) / self.head_width
            positions = torch.arange(rotary_length, dtype=torch.float32)
            angles = positions[:, None] * 10_000.0**-exponents
            rotations = torch.stack([angles.cos(), angles.sin()])
        self.register_buffer("rotations", rotations, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        # The projection is ordered by head, and the number of heads is inferred (-1), so that ranks
        # that share it hold whole heads.
        projected = self.project(hidden).view(batch, length, -1, 3, self.head_width)
        queries, keys, values = projected.permute(3, 0, 2, 1, 4)
        if self.rotations is not None:
            queries, keys = self._turned(queries), self._turned(keys)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        merged: Tensor = self.merge(attended.transpose(1, 2).reshape(batch, length, -1))
        return merged

    def _turned(self, heads: Tensor) -> Tensor:
        """Rotate each pair of numbers, half a head apart, by its position's angle.

        ``[batch, heads, length, head width]``.
        """
        assert self.rotations is not None
        cosine, sine = self.rotations[:, : heads.shape[2]].to(heads.dtype)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
