"""Normalisation layers for a convolution's output, by name: the same choice for every model that has it."""

from torch import nn

from autotune.errors import ConfigError

NORMS = ("batch", "group", "none")
MIN_GROUP_CHANNELS = 8
"""Minimum number of channels in a group of a group norm: with fewer, differences between channels are normalised away.

Source: Wu & He, "Group Normalization" (2018), table 3, where 8 to 32 channels a group do nearly equally well.
"""


def norm_layers(norm: str, num_channels: int) -> list[nn.Module]:
    """At most one layer, in a list, that normalises ``[batch, num_channels, height, width]``.

    ``batch`` normalises each channel over the batch, ``group`` each sample over equal groups of channels, as many as
    ``MIN_GROUP_CHANNELS`` allows; ``none`` gives an empty list.

    Raises:
        ConfigError: the norm is unknown.
    """
    if norm == "batch":
        return [nn.BatchNorm2d(num_channels)]
    if norm == "group":
        most = max(1, num_channels // MIN_GROUP_CHANNELS)
        return [nn.GroupNorm(next(count for count in range(most, 0, -1) if num_channels % count == 0), num_channels)]
    if norm == "none":
        return []
    raise ConfigError(f"model.norm: found {norm!r}, accepted are {', '.join(NORMS)}")
