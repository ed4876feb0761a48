"""A multi-layer perceptron for tables and any other inputs that can be flattened."""

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, parallel

from autotune.errors import ConfigError, check_choice

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
        ConfigError: a width is not positive, or a norm or activation is unknown.
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
        check_choice("model.norm", norm, NORMS)
        check_choice("model.activation", activation, ACTIVATIONS)
        if min(widths, default=1) < 1:
            raise ConfigError(f"model.widths: found {list(widths)}, use numbers of units from 1")
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

    def tensor_plan(self, size: int) -> Mapping[str, parallel.ParallelStyle]:
        """How ``size`` ranks share the weights: without norms, layers are split by columns and by
        rows in turns; with norms, by columns.

        Raises:
            ConfigError: a width is not a multiple of ``size``.
        """
        linears = {
            name: module for name, module in self.named_modules() if isinstance(module, nn.Linear)
        }
        *names, last = linears
        for name in names:
            if (units := linears[name].out_features) % size:
                raise ConfigError(
                    f"model.widths: found {units}, use multiples of {size}, the number of workers"
                    " that share layers"
                )
        if any(isinstance(layer, nn.BatchNorm1d | nn.LayerNorm) for layer in self.hidden):
            return {name: parallel.ColwiseParallel(output_layouts=Replicate()) for name in names}
        plan: dict[str, parallel.ParallelStyle] = {
            name: parallel.RowwiseParallel() if index % 2 else parallel.ColwiseParallel()
            for index, name in enumerate(names)
        }
        return plan | ({last: parallel.RowwiseParallel()} if len(names) % 2 else {})

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of inputs ``[batch, *input_shape]``.

        Raises:
            ConfigError: inputs are whole numbers, such as tokens.
        """
        if not inputs.is_floating_point():
            raise ConfigError(
                f"model: found inputs of {inputs.dtype}; MLP needs numbers, not tokens"
            )
        logits: Tensor = self.classifier(self.hidden(inputs.flatten(1)))
        return logits
