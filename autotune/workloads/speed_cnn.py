"""The network of the CIFAR-10 speed records, which reaches 94% accuracy in eight epochs.

Each of its parts is a setting.

Two parts make the network learn fast: its first layer is computed from the training images instead
of learned, and its other layers start as the identity. It has neither residual connections nor
learned scales of its norms.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from autotune.errors import ConfigError

ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "silu": nn.SiLU, "relu": nn.ReLU}
PATCH_PIXELS = 2
"""Height and width, in pixels, of the first layer's filters."""


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
    - ``activation``: gelu, silu or relu.
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
        _check(input_shape, widths, activation)
        self.whitening, self.whitening_samples, self.whitening_eps = (
            whitening,
            whitening_samples,
            whitening_eps,
        )
        self.norm_scale = norm_scale
        self.logits_scale = 1 / widths[-1] if logits_scale is None else logits_scale
        channels = 2 * input_shape[0] * PATCH_PIXELS**2
        self.patches = nn.Conv2d(input_shape[0], channels, kernel_size=PATCH_PIXELS)
        self.patches.weight.requires_grad_(not whitening)
        self.activation = ACTIVATIONS[activation]()
        self.groups = nn.ModuleList()
        for width in widths:
            norms = [
                _norm(width, train_scale=norm_scale, momentum=norm_momentum, eps=norm_eps)
                for _ in range(2)
            ]
            self.groups.append(
                nn.Sequential(
                    _convolution(channels, width, dirac=dirac),
                    nn.MaxPool2d(2),
                    norms[0],
                    ACTIVATIONS[activation](),
                    _convolution(width, width, dirac=dirac),
                    norms[1],
                    ACTIVATIONS[activation](),
                )
            )
            channels = width
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
        """All trained parameters by kind, so that each kind can have its own learning rate.

        ``filters`` are the convolutions' weights ``[out, in, height, width]``, ``biases`` the
        norms' biases, and their scales if they are trained, ``head`` the linear layer,
        ``whitening_bias`` the bias of frozen whitening filters, if there are any.
        """
        named = list(self.groups.named_parameters())
        filters = [parameter for _, parameter in named if parameter.ndim == 4]
        biases = [
            parameter
            for name, parameter in named
            if parameter.ndim == 1 and (self.norm_scale or name.endswith("bias"))
        ]
        first, first_bias = self.patches.parameters()
        if self.whitening:
            return {
                "filters": filters,
                "biases": biases,
                "head": list(self.head.parameters()),
                "whitening_bias": [first_bias],
            }
        return {
            "filters": [first, *filters],
            "biases": [first_bias, *biases],
            "head": list(self.head.parameters()),
        }


def whitening_filters(inputs: Tensor, eps: float) -> Tensor:
    """Filters ``[channels * 4, channels, 2, 2]`` whose outputs for the inputs' patches are
    uncorrelated, with a mean square of 1.

    Each filter is an eigenvector of the patches' second moments (about zero, not about their mean)
    divided by the root of its eigenvalue plus ``eps``, so that directions in which patches hardly
    vary stay small; filters for the largest eigenvalues come first.

    Source: Page, "How to Train Your ResNet" (2018-2019), part 8, "Input patch whitening".
    """
    images = inputs.float()
    samples, channels, height, width = images.shape
    rows, columns = height - PATCH_PIXELS + 1, width - PATCH_PIXELS + 1
    shifted = [
        images[:, :, y : y + rows, x : x + columns]
        for y in range(PATCH_PIXELS)
        for x in range(PATCH_PIXELS)
    ]
    patches = (
        torch.stack(shifted, dim=2).permute(1, 2, 0, 3, 4).reshape(channels * PATCH_PIXELS**2, -1)
    )
    eigenvalues, eigenvectors = torch.linalg.eigh(patches @ patches.T / (samples * rows * columns))
    filters: Tensor = (eigenvectors / (eigenvalues + eps).sqrt()).T.flip(0)
    return filters.view(-1, channels, PATCH_PIXELS, PATCH_PIXELS)


def _convolution(in_channels: int, out_channels: int, *, dirac: bool) -> nn.Conv2d:
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
    if dirac:
        nn.init.dirac_(convolution.weight.data[:in_channels])
    return convolution


def _norm(width: int, *, train_scale: bool, momentum: float, eps: float) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(width, momentum=momentum, eps=eps)
    norm.weight.requires_grad_(train_scale)
    return norm


def _check(input_shape: Sequence[int], widths: Sequence[int], activation: str) -> None:
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ConfigError(
            f"model: input_shape is {list(input_shape)}, accepted are images [channels, height,"
            " width]"
        )
    if not widths or min(widths) < 1:
        raise ConfigError(
            f"model.widths: found {list(widths)}, accepted is one number of channels from 1 for"
            " each group"
        )
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"model.activation: found {activation!r}, accepted are {', '.join(ACTIVATIONS)}"
        )
    least = 2 ** len(widths) + PATCH_PIXELS - 1
    if min(input_shape[1:]) < least:
        size = f"{input_shape[1]}x{input_shape[2]}"
        raise ConfigError(
            f"model: an input of {size} is too small for {len(widths)} groups, accepted are inputs"
            f" from {least}x{least}"
        )
