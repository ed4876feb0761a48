"""A multi-layer perceptron: for tables, and for anything else that can be flattened."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from autotune.errors import ConfigError

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
NORMS: dict[str, Callable[[int], nn.Module] | None] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "none": None}


class MLP(nn.Module):
    """One hidden layer per entry of ``widths``, each linear, normalised, activated and dropped out; then a linear layer to the logits.

    ``input_shape`` is any; ``forward`` takes ``[batch, *input_shape]``, flattened, and returns logits ``[batch, num_classes]``.
    Without ``widths`` it is a linear model.

    Raises:
        ConfigError: a size that is not positive, or a name that is not known.
    """

    def __init__(
        self, *, input_shape: Sequence[int], num_classes: int, widths: Sequence[int], norm: str, activation: str, dropout: float
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

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of inputs ``[batch, *input_shape]``.

        Raises:
            ConfigError: for inputs that are whole numbers, such as tokens.
        """
        if not inputs.is_floating_point():
            raise ConfigError(f"model: found inputs of {inputs.dtype}, accepted are floating-point numbers")
        logits: Tensor = self.classifier(self.hidden(inputs.flatten(1)))
        return logits


def _check(input_shape: Sequence[int], num_classes: int, widths: Sequence[int], norm: str, activation: str, dropout: float) -> None:
    if not input_shape or min(input_shape) < 1:
        raise ConfigError(f"model: input_shape is {list(input_shape)}, accepted are one or more sizes from 1")
    if num_classes < 1:
        raise ConfigError(f"model: num_classes is {num_classes}, accepted are numbers from 1")
    if any(width < 1 for width in widths):
        raise ConfigError(f"model.widths: found {list(widths)}, accepted is one number of units from 1 for each hidden layer")
    for key, value, accepted in (("norm", norm, NORMS), ("activation", activation, ACTIVATIONS)):
        if value not in accepted:
            raise ConfigError(f"model.{key}: found {value!r}, accepted are {', '.join(accepted)}")
    if not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout: found {dropout}, accepted is from 0 to below 1")
