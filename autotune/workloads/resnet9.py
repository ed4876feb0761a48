"""ResNet-9: the small residual network that trains CIFAR-10 to 94% in the textbook way."""

from collections.abc import Sequence

from torch import Tensor, nn

from autotune.errors import ConfigError
from autotune.workloads.simple_cnn import norm_layers


class ResNet9(nn.Module):
    """Four stages of 3x3 convolutions, the second and the fourth with a residual pair, then one
    linear layer.

    ``input_shape`` is ``[channels, height, width]``, ``widths`` the channels of the four stages;
    ``forward`` takes ``[batch, channels, height, width]`` and returns logits ``[batch,
    num_classes]``. Each stage but the first halves height and width; the maximum is taken over the
    positions that are left, so inputs may have any size from 8x8. ``norm`` is ``batch``, ``group``
    or ``none``; without a norm the convolutions have biases. Logits are multiplied by
    ``logits_scale``.

    Source: Page, "How to Train Your ResNet" (2018), part 4, and its network as commonly published,
    with a batch norm per convolution.

    Raises:
        ConfigError: the input is no image or too small, or a setting is out of range.
    """

    def __init__(
        self,
        *,
        input_shape: Sequence[int],
        num_classes: int,
        widths: Sequence[int],
        norm: str,
        logits_scale: float,
    ) -> None:
        super().__init__()
        if len(input_shape) != 3 or min(input_shape[1:]) < 8:
            raise ConfigError(
                f"model: input_shape is {list(input_shape)}, accepted are images [channels, height,"
                " width] from 8x8"
            )
        if len(widths) != 4 or min(widths) < 1:
            raise ConfigError(
                f"model.widths: found {list(widths)}, accepted are four numbers of channels from 1"
            )
        self.logits_scale = logits_scale
        first, second, third, last = widths
        self.stages = nn.Sequential(
            _convolution(input_shape[0], first, norm),
            nn.Sequential(
                _convolution(first, second, norm), nn.MaxPool2d(2), ResidualPair(second, norm)
            ),
            nn.Sequential(_convolution(second, third, norm), nn.MaxPool2d(2)),
            nn.Sequential(
                _convolution(third, last, norm), nn.MaxPool2d(2), ResidualPair(last, norm)
            ),
        )
        self.head = nn.Linear(last, num_classes, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of inputs ``[batch, channels, height, width]``."""
        features: Tensor = self.stages(inputs).flatten(2).amax(2)
        logits: Tensor = self.head(features) * self.logits_scale
        return logits

    def blocks(self) -> Sequence[nn.Module]:
        """The four stages, whose activations may be recomputed."""
        return list(self.stages)


class ResidualPair(nn.Module):
    """A residual block of two convolutions with ``channels`` channels, each with norm and ReLU,
    added to their input.
    """

    def __init__(self, channels: int, norm: str) -> None:
        super().__init__()
        self.pair = nn.Sequential(
            _convolution(channels, channels, norm), _convolution(channels, channels, norm)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs ``[batch, channels, height, width]`` plus the output of the convolutions, of
        the same shape.
        """
        outputs: Tensor = inputs + self.pair(inputs)
        return outputs


def _convolution(in_channels: int, out_channels: int, norm: str) -> nn.Sequential:
    convolution = nn.Conv2d(
        in_channels, out_channels, kernel_size=3, padding=1, bias=norm == "none"
    )
    return nn.Sequential(convolution, *norm_layers(norm, out_channels), nn.ReLU())
