"""Convolutional networks for images ``[batch, channels, height, width]``, which return logits
``[batch, num_classes]``: a small one, ResNet-9, and that of the CIFAR-10 speed records.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.errors import ConfigError, check_choice
from autotune.workloads.mlp import ACTIVATIONS


class SimpleCNN(nn.Module):
    """One 3x3 convolution per entry of ``widths``, each followed by ReLU and a 2x2 max-pool, then
    one linear layer.

    ``input_shape`` is ``[channels, height, width]``. ``norm`` is the normalisation of each
    convolution's output before its ReLU: ``batch`` over the batch, ``group`` for each sample over
    groups of channels, or ``none``. A normalised convolution has no bias.

    The convolutions have no padding if the input is large enough: with widths of 16 and 32 an input
    of 3x32x32 leaves 32 x 6 x 6 features. If any convolution's output would be smaller than 2x2
    (8x8 is 6x6, 3x3, 1x1), all are padded by 1.

    Raises:
        ConfigError: a width is not positive, the norm is unknown, or the input is no image or too
            small for this number of layers even with padding.
    """

    def __init__(
        self, *, input_shape: Sequence[int], num_classes: int, widths: Sequence[int], norm: str
    ) -> None:
        super().__init__()
        _check(input_shape, widths, least=2 ** len(widths))
        channels, *size = input_shape
        # without padding, layers that leave a side of n pixels need one of 2 n + 2 pixels before
        padding = 0 if min(size) >= 3 * 2 ** len(widths) - 2 else 1
        layers: list[nn.Module] = []
        for width in widths:
            layers += [*_convolution(channels, width, norm, padding), nn.MaxPool2d(2)]
            channels, size = width, [length // 2 - 1 + padding for length in size]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels * size[0] * size[1], num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of images."""
        logits: Tensor = self.classifier(self.features(inputs).flatten(1))
        return logits


class ResNet9(nn.Module):
    """Four stages of 3x3 convolutions, the second and the fourth with a residual pair, then one
    linear layer.

    ``input_shape`` is ``[channels, height, width]``, ``widths`` the channels of the four stages.
    Each stage but the first halves height and width; the maximum is taken over the positions that
    are left, so inputs may have any size from 8x8. ``norm`` is ``batch``, ``group`` or ``none``;
    without a norm the convolutions have biases. Logits are multiplied by ``logits_scale``.

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
        _check(input_shape, widths, least=8)
        if len(widths) != 4:
            raise ConfigError(f"model.widths: found {list(widths)}, use four numbers of channels")
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
        """Logits of images."""
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


class SpeedCNN(nn.Module):
    """A 2x2 convolution, a group of two 3x3 convolutions for each entry of ``widths``, global
    max-pooling and a linear layer.

    ``input_shape`` is ``[channels, height, width]``; ``forward`` takes ``[batch, channels, height,
    width]`` and returns logits ``[batch, num_classes]``. Each group halves height and width; the
    maximum is taken over the positions that are left, so that images may be scaled down while
    training. The parts:

    - ``whitening``: the first layer's filters are set by ``initialise_from`` and frozen, and its
      bias is trained. Without it, the filters are trained like all others. ``whitening_samples``
      inputs are used at most, ``whitening_eps`` is added to eigenvalues.
    - ``dirac``: each 3x3 convolution initially passes its input channels on, and only its
      additional filters are random.
    - ``norm_scale``: whether the norms' scales are trained; else they stay 1, and only the biases
      are trained. ``norm_momentum`` is the newest batch's weight in the running statistics,
      ``norm_eps`` is added to variances.
    - ``activation``: gelu, silu, relu or tanh.
    - ``unit_head``: whether the linear layer's initial weights are divided by their standard
      deviation.
    - ``logits_scale``: factor for the logits; null means 1 / the last width.

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024), sections 3.1 to 3.4,
    and for whitening and the fast statistics Page, "How to Train Your ResNet" (2018-2019), parts 7
    and 8; the maximum over positions instead of a pool.

    Raises:
        ConfigError: the input is no image or too small for this number of groups, or a setting is
            out of range.
    """

    def __init__(
        self,
        *,
        input_shape: Sequence[int],
        num_classes: int,
        widths: Sequence[int],
        whitening: bool,
        whitening_samples: int,
        whitening_eps: float,
        dirac: bool,
        norm_scale: bool,
        norm_momentum: float,
        norm_eps: float,
        activation: str,
        unit_head: bool,
        logits_scale: float | None,
    ) -> None:
        super().__init__()
        _check(input_shape, widths, least=2 ** len(widths) + 1)
        check_choice("model.activation", activation, ACTIVATIONS)
        self.whitening, self.whitening_samples = whitening, whitening_samples
        self.whitening_eps = whitening_eps
        self.logits_scale = 1 / widths[-1] if logits_scale is None else logits_scale
        channels = 2 * input_shape[0] * 4  # each filter of the 2x2 patches and its negative
        self.patches = nn.Conv2d(input_shape[0], channels, kernel_size=2)
        self.patches.weight.requires_grad_(not whitening)
        self.activation = ACTIVATIONS[activation]()
        self.groups = nn.ModuleList()
        for width in widths:
            layers: list[nn.Module] = []
            for pool in ([nn.MaxPool2d(2)], []):
                convolution = nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False)
                if dirac:
                    nn.init.dirac_(convolution.weight.data[:channels])
                norm = nn.BatchNorm2d(width, momentum=norm_momentum, eps=norm_eps)
                norm.weight.requires_grad_(norm_scale)
                layers += [convolution, *pool, norm, ACTIVATIONS[activation]()]
                channels = width
            self.groups.append(nn.Sequential(*layers))
        self.head = nn.Linear(channels, num_classes, bias=False)
        if unit_head:
            with torch.no_grad():
                self.head.weight /= self.head.weight.std()

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of inputs ``[batch, channels, height, width]``."""
        features = self.activation(self.patches(inputs))
        for group in self.groups:
            features = group(features)
        logits: Tensor = self.head(features.flatten(2).amax(2)) * self.logits_scale
        return logits

    @torch.no_grad()
    def initialise_from(self, inputs: Tensor) -> None:
        """Set the first layer's filters from inputs ``[samples, channels, height, width]``.

        Without ``whitening`` nothing changes.
        """
        if self.whitening:
            filters = whitening_filters(inputs[: self.whitening_samples], self.whitening_eps)
            self.patches.weight.copy_(torch.cat([filters, -filters]))

    def blocks(self) -> Sequence[nn.Module]:
        """The groups of convolutions, whose activations may be recomputed."""
        return list(self.groups)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """All parameters by kind, so that each kind can have its own learning rate.

        ``filters`` are the convolutions' weights ``[out, in, height, width]``, ``biases`` the
        norms' biases and scales, ``head`` the linear layer, ``whitening_bias`` the bias of frozen
        whitening filters, if there are any.
        """
        groups: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in self.named_parameters():
            kind = "filters" if parameter.ndim == 4 else "biases"
            if name == "head.weight":
                kind = "head"
            elif name == "patches.bias" and self.whitening:
                kind = "whitening_bias"
            groups[kind].append(parameter)
        return groups


def whitening_filters(inputs: Tensor, eps: float) -> Tensor:
    """Filters ``[channels * 4, channels, 2, 2]`` whose outputs for the inputs' patches are
    uncorrelated, with a mean square of 1.

    Each filter is an eigenvector of the patches' second moments (about zero, not about their mean)
    divided by the root of its eigenvalue plus ``eps``, so that directions in which patches hardly
    vary stay small; filters for the largest eigenvalues come first.

    Source: Page, "How to Train Your ResNet" (2018-2019), part 8, "Input patch whitening".
    """
    channels = inputs.shape[1]
    patches = functional.unfold(inputs.float(), 2).transpose(0, 1).flatten(1)
    eigenvalues, eigenvectors = torch.linalg.eigh(patches @ patches.T / patches.shape[1])
    filters: Tensor = (eigenvectors / (eigenvalues + eps).sqrt()).T.flip(0)
    return filters.view(-1, channels, 2, 2)


def _convolution(in_channels: int, out_channels: int, norm: str, padding: int = 1) -> nn.Sequential:
    """A 3x3 convolution with its norm and ReLU.

    A group norm has groups of eight channels or more: with fewer, differences between channels are
    normalised away.

    Source: Wu & He, "Group Normalization" (2018), table 3, where 8 to 32 channels a group do nearly
    equally well.
    """
    check_choice("model.norm", norm, ("batch", "group", "none"))
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=padding, bias=norm == "none")
    ]
    if norm == "batch":
        layers.append(nn.BatchNorm2d(out_channels))
    elif norm == "group":
        most = max(1, out_channels // 8)
        groups = max(count for count in range(1, most + 1) if out_channels % count == 0)
        layers.append(nn.GroupNorm(groups, out_channels))
    return nn.Sequential(*layers, nn.ReLU())


def _check(input_shape: Sequence[int], widths: Sequence[int], *, least: int) -> None:
    """Refuse inputs that are no images of ``least`` pixels a side or more, and empty widths."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ConfigError(
            f"model: input_shape is {list(input_shape)}; this model needs images [channels, height,"
            f" width] from {least}x{least}"
        )
    if not widths or min(widths) < 1:
        raise ConfigError(f"model.widths: found {list(widths)}, use one number from 1 a layer")
