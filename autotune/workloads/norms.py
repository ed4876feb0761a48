"""What normalises a convolution's output, by name: the same choice for every model that has it."""

from torch import nn

from autotune.errors import ConfigError

NORMS = ("batch", "group", "none")
LEAST_GROUP_CHANNELS = 8
"""Channels that a group norm takes together at least: with fewer, what tells channels apart is normalised away.

Source: Wu & He, "Group Normalization" (2018), table 3, where 8 to 32 channels a group do nearly equally well.
"""


def norm_layers(norm: str, num_channels: int) -> list[nn.Module]:
    """The layers, none or one, that normalise ``[batch, num_channels, height, width]``.

    ``batch`` normalises each channel over the batch, ``group`` each sample by itself over equal groups of channels, as many as
    leave each group large enough.

    Raises:
        ConfigError: for any other name.
    """
    if norm == "batch":
        return [nn.BatchNorm2d(num_channels)]
    if norm == "group":
        most = max(1, num_channels // LEAST_GROUP_CHANNELS)
        return [nn.GroupNorm(next(each for each in range(most, 0, -1) if num_channels % each == 0), num_channels)]
    if norm == "none":
        return []
    raise ConfigError(f"model.norm: found {norm!r}, accepted are {', '.join(NORMS)}")
