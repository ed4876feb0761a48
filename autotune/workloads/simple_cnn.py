"""A small convolutional network for small images, the model that the examples tune."""

from collections.abc import Sequence

from torch import Tensor, nn

from autotune.errors import ConfigError

NORMS = ("batch", "group", "none")
MIN_GROUP_CHANNELS = 8
"""Minimum number of channels in a group of a group norm: with fewer, differences between channels
are normalised away.

Source: Wu & He, "Group Normalization" (2018), table 3, where 8 to 32 channels a group do nearly
equally well."""


class SimpleCNN(nn.Module):
    """One 3x3 convolution per entry of ``widths``, each followed by ReLU and a 2x2 max-pool, then
    one linear layer.

    ``input_shape`` is ``[channels, height, width]``; ``forward`` takes ``[batch, channels, height,
    width]`` and returns logits ``[batch, num_classes]``. ``norm`` is the normalisation of each
    convolution's output before its ReLU: ``batch`` over the batch, ``group`` for each sample over
    groups of channels, or ``none``. A normalised convolution has no bias of its own.

    The convolutions have no padding if the input is large enough: with widths of 16 and 32 an input
    of 3x32x32 leaves 32 x 6 x 6 features. If any convolution's output would be smaller than 2x2
    (8x8 is 6x6, 3x3, 1x1), all are padded by 1.

    Raises:
        ConfigError: a size is not positive, the norm is unknown, or the input is too small for this
            number of layers even with padding.
    """

    def __init__(
        self, *, input_shape: Sequence[int], num_classes: int, widths: Sequence[int], norm: str
    ) -> None:
        super().__init__()
        _check_sizes(input_shape, num_classes, widths)
        channels, height, width = input_shape
        padding, height, width = _padding_and_size(height, width, len(widths))
        layers: list[nn.Module] = []
        for out_channels in widths:
            layers.append(
                nn.Conv2d(
                    channels, out_channels, kernel_size=3, padding=padding, bias=norm == "none"
                )
            )
            layers += [*norm_layers(norm, out_channels), nn.ReLU(), nn.MaxPool2d(2)]
            channels = out_channels
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels * height * width, num_classes)

    def pipeline_layers(self) -> Sequence[nn.Module]:
        """The modules of the forward pass, in the order in which they are applied."""
        return [*self.features, nn.Flatten(), self.classifier]

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of inputs ``[batch, channels, height, width]``."""
        logits: Tensor = self.classifier(self.features(inputs).flatten(1))
        return logits


def _check_sizes(input_shape: Sequence[int], num_classes: int, widths: Sequence[int]) -> None:
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ConfigError(
            f"model: input_shape is {list(input_shape)}, accepted are images [channels, height,"
            " width]"
        )
    if num_classes < 1:
        raise ConfigError(f"model: num_classes is {num_classes}, accepted are numbers from 1")
    if not widths or min(widths) < 1:
        raise ConfigError(
            f"model.widths: found {list(widths)}, accepted is one number of filters from 1 for each"
            " convolution"
        )


def _padding_and_size(height: int, width: int, num_layers: int) -> tuple[int, int, int]:
    """The padding of all convolutions, and the height and width that are left after the last
    max-pool.
    """
    for padding in (0, 1):
        shrinkage = 2 - 2 * padding
        size, fits = [height, width], True
        for _ in range(num_layers):
            fits = fits and min(size) - shrinkage >= 2
            size = [(length - shrinkage) // 2 for length in size]
        if fits:
            return padding, size[0], size[1]
    raise ConfigError(
        f"model: an input of {height}x{width} is too small for {num_layers} convolutions that each"
        f" halve it, accepted are inputs from {2**num_layers}x{2**num_layers}; shorten model.widths"
    )


def norm_layers(norm: str, num_channels: int) -> list[nn.Module]:
    """At most one layer, in a list, that normalises ``[batch, num_channels, height, width]``.

    ``batch`` normalises each channel over the batch, ``group`` each sample over equal groups of
    channels, as many as ``MIN_GROUP_CHANNELS`` allows; ``none`` gives an empty list.

    Raises:
        ConfigError: the norm is unknown.
    """
    if norm == "batch":
        return [nn.BatchNorm2d(num_channels)]
    if norm == "group":
        most = max(1, num_channels // MIN_GROUP_CHANNELS)
        return [
            nn.GroupNorm(
                next(count for count in range(most, 0, -1) if num_channels % count == 0),
                num_channels,
            )
        ]
    if norm == "none":
        return []
    raise ConfigError(f"model.norm: found {norm!r}, accepted are {', '.join(NORMS)}")
