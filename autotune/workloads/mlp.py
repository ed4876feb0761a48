"""A multi-layer perceptron for tables and any other inputs that can be flattened."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from autotune.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
NORMS: dict[str, Callable[[int], nn.Module] | None] = {
    "batch": nn.BatchNorm1d,
    "layer": nn.LayerNorm,
    "none": None,
}


class MLP(nn.Module):
    """One hidden layer per entry of ``widths``, each linear, norm, activation and dropout.

    Then a linear layer to the logits.

    ``input_shape`` is any shape; ``forward`` takes ``[batch, *input_shape]``, flattens it, and
    returns logits ``[batch, num_classes]``. With empty ``widths`` the model is linear.

    Raises:
        ConfigError: a size is not positive, ``dropout`` is out of range, or a norm or activation is
            unknown.
    """

    def __init__(
        self,
        *,
        input_shape: Sequence[int],
        num_classes: int,
        widths: Sequence[int],
        norm: str,
        activation: str,
        dropout: float,
    ) -> None:
        super().__init__()
        _check(input_shape, num_classes, widths, norm, activation, dropout)
        normalise = NORMS[norm]
        num_features = math.prod(input_shape)
        layers: list[nn.Module] = []
        for width in widths:
            layers.append(nn.Linear(num_features, width, bias=norm != "batch"))
            layers += [normalise(width)] if normalise else []
            layers.append(ACTIVATIONS[activation]())
            layers += [nn.Dropout(dropout)] if dropout else []
            num_features = width
        self.hidden = nn.Sequential(*layers)
        self.classifier = nn.Linear(num_features, num_classes)

    def pipeline_layers(self) -> Sequence[nn.Module]:
        """The modules of the forward pass, in the order in which they are applied."""
        return [nn.Flatten(), *self.hidden, self.classifier]

    def tensor_plan(self, size: int) -> "Mapping[str, ParallelStyle]":
        """How ``size`` ranks share the weights: without norms, layers are split by columns and by
        rows in turns; with norms, by columns.

        Raises:
            ConfigError: a width is not a multiple of ``size``.
        """
        # a second to import, only for tensor parallelism
        from torch.distributed.tensor import Replicate  # noqa: PLC0415

        # only for tensor parallelism
        from torch.distributed.tensor.parallel import (  # noqa: PLC0415
            ColwiseParallel,
            RowwiseParallel,
        )

        linear = [
            (name, module) for name, module in self.named_modules() if isinstance(module, nn.Linear)
        ]
        for _, module in linear[:-1]:
            if module.out_features % size:
                raise ConfigError(
                    f"model.widths: found {module.out_features}, accepted with {size} workers that"
                    " share layers are multiples of it"
                )
        is_normalised = any(
            isinstance(layer, nn.BatchNorm1d | nn.LayerNorm) for layer in self.hidden
        )
        plan: dict[str, ParallelStyle] = {}
        for index, (name, _) in enumerate(linear[:-1]):
            if is_normalised:
                plan[name] = ColwiseParallel(output_layouts=Replicate())
            else:
                plan[name] = RowwiseParallel() if index % 2 else ColwiseParallel()
        if not is_normalised and len(linear) % 2 == 0:
            plan[linear[-1][0]] = RowwiseParallel()
        return plan

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of inputs ``[batch, *input_shape]``.

        Raises:
            ConfigError: inputs are whole numbers, such as tokens.
        """
        if not inputs.is_floating_point():
            raise ConfigError(
                f"model: found inputs of {inputs.dtype}, accepted are floating-point numbers"
            )
        logits: Tensor = self.classifier(self.hidden(inputs.flatten(1)))
        return logits


def _check(
    input_shape: Sequence[int],
    num_classes: int,
    widths: Sequence[int],
    norm: str,
    activation: str,
    dropout: float,
) -> None:
    if not input_shape or min(input_shape) < 1:
        raise ConfigError(
            f"model: input_shape is {list(input_shape)}, accepted are one or more sizes from 1"
        )
    if num_classes < 1:
        raise ConfigError(f"model: num_classes is {num_classes}, accepted are numbers from 1")
    if any(width < 1 for width in widths):
        raise ConfigError(
            f"model.widths: found {list(widths)}, accepted is one number of units from 1 for each"
            " hidden layer"
        )
    for key, value, accepted in (("norm", norm, NORMS), ("activation", activation, ACTIVATIONS)):
        if value not in accepted:
            raise ConfigError(f"model.{key}: found {value!r}, accepted are {', '.join(accepted)}")
    if not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout: found {dropout}, accepted is from 0 to below 1")
