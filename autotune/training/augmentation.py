"""Augmentation of training batches on the device: changes the inputs before the model sees them.

Contract of ``augmentation:`` in the configuration: ``augment(inputs, samples=..., epoch=...,
progress=...)`` returns the inputs that the model is given. ``inputs`` ``[batch, ...]`` are on the
device and already transformed; ``samples`` ``[batch]`` (int64) are their indices in the training
split; ``epoch`` counts from 0; ``progress`` is the fraction of the schedule done, from 0 to below
1. A class is instantiated once per training, and receives ``num_samples`` of the training split and
``device`` if its signature names them. If the shape of its output changes during training, its
attribute ``new_shapes_at`` lists the progress of every change: each shape is warmed up before the
training clock starts.

Every augmentation here runs a fixed number of device operations for any batch and reads nothing
back from the device. Random numbers come from torch's global generators, which the training seeds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from autotune.errors import ConfigError, check_choice, check_counts
from autotune.training.data import memory_format_of


def unchanged(inputs: Tensor, *, samples: Tensor, epoch: int, progress: float) -> Tensor:
    """Augmentation that returns the inputs unchanged."""
    return inputs


class ImageAugmentation:
    """Flips, shifts, jitters, cuts and scales images ``[batch, channels, height, width]``, in this
    order.

    ``flip`` mirrors images left to right: ``random`` mirrors each image with probability 0.5;
    ``alternating`` mirrors one random half of the training split in even epochs and the other half
    in odd epochs, so that each pair of epochs shows every image once in each orientation. ``shift``
    is the largest number of pixels by which an image moves in each direction; the image's own
    reflection fills the gap. ``brightness`` b adds to each image one number drawn uniformly from -b
    to b; ``contrast`` c multiplies each image by one number drawn uniformly from 1 - c to 1 + c.
    ``cutout`` is the side in pixels of a square, wholly inside the image, that is set to 0, the
    mean of standardised images.

    ``resolutions`` is a list of ``[from, pixels]``: from that progress on, images are scaled to a
    height of ``pixels``, and their width in proportion. Null pixels mean the full size, and the
    last entry must have them: norm layers take their statistics from the last batches. Before the
    first entry, or with an empty list, images keep their size.

    The memory format of the inputs, contiguous or channels-last, is kept.

    Source: cutout: DeVries & Taylor, "Improved Regularization of Convolutional Neural Networks with
    Cutout" (2017), here wholly inside the image. Alternating flip: Jordan, "94% on CIFAR-10 in 3.29
    Seconds on a Single GPU" (2024), section 3.6, here by a drawn half instead of a hash of the
    index. Progressive resolution: Howard's DAWNBench entry for ImageNet (fast.ai, 2018).

    Raises:
        ConfigError: a setting is out of range; when called, the inputs are not images, or are too
            small for a setting.
    """

    def __init__(
        self,
        *,
        flip: str,
        shift: int,
        brightness: float,
        contrast: float,
        cutout: int,
        resolutions: Sequence[tuple[float, int | None]],
        num_samples: int,
        device: torch.device | str,
    ) -> None:
        check_choice("augmentation.flip", flip, ("none", "random", "alternating"))
        check_counts("augmentation", 0, shift=shift, cutout=cutout)
        self._flip, self._shift, self._cutout = flip, shift, cutout
        self._brightness, self._contrast = brightness, contrast
        self._resolutions = resolutions
        self.new_shapes_at = starts = [start for start, _ in resolutions]
        sizes = [pixels for _, pixels in resolutions]
        is_rising = starts == sorted(starts) and all(0 <= start < 1 for start in starts)
        are_sizes = all(size is None or (type(size) is int and size > 0) for size in sizes)
        if not (is_rising and are_sizes) or (sizes and sizes[-1] is not None):
            raise ConfigError(
                f"augmentation.resolutions: found {resolutions}; it must be a list of [from"
                " progress, pixels], rising from 0 and below 1, the last with null pixels: the full"
                " size"
            )
        self._first_half = (
            torch.randperm(num_samples, device=device) % 2 == 0 if flip == "alternating" else None
        )

    def __call__(self, inputs: Tensor, *, samples: Tensor, epoch: int, progress: float) -> Tensor:
        """The augmented images.

        ``progress`` selects their height and width, batch size and number of channels stay the
        same.
        """
        if inputs.ndim != 4:
            raise ConfigError(
                f"augmentation: inputs are {list(inputs.shape)}, must be images [batch,"
                " channels, height, width]"
            )
        moved = self._flipped_and_shifted(inputs, self._flip_mask(samples, epoch))
        return self._scaled(self._cut(self._jittered(moved)), progress).contiguous(
            memory_format=memory_format_of(inputs)
        )

    def _flip_mask(self, samples: Tensor, epoch: int) -> Tensor | None:
        """Mask of the images to mirror, ``[batch]`` bool; None to mirror no image."""
        if self._flip == "random":
            return torch.rand(len(samples), device=samples.device) < 0.5
        if self._first_half is None:
            return None
        in_first_half = self._first_half[samples]
        return in_first_half if epoch % 2 == 0 else ~in_first_half

    def _flipped_and_shifted(self, inputs: Tensor, flip_mask: Tensor | None) -> Tensor:
        """Mirror and then shift images in a single gather, by computing for each result pixel
        the index of its source pixel.
        """
        if flip_mask is None and self._shift == 0:
            return inputs
        batch, _, height, width = inputs.shape
        rows, columns = (
            self._source_pixels(batch, length, inputs.device) for length in (height, width)
        )
        if flip_mask is not None:
            columns = torch.where(flip_mask[:, None], width - 1 - columns, columns)
        pixels = (rows[:, :, None] * width + columns[:, None, :]).view(batch, 1, height * width)
        return (
            inputs.flatten(2).gather(2, pixels.expand(-1, inputs.shape[1], -1)).view(inputs.shape)
        )

    def _source_pixels(self, batch: int, length: int, device: torch.device) -> Tensor:
        """Index of the source pixel for each pixel along one side of each shifted image,
        ``[batch, length]`` int64.
        """
        if self._shift >= length:
            raise ConfigError(
                f"augmentation.shift: found {self._shift}, must be below the images' {length}"
                " pixels"
            )
        pixels = torch.arange(length, device=device)
        if self._shift == 0:
            return pixels.expand(batch, length)
        pixels = pixels + torch.randint(-self._shift, self._shift + 1, (batch, 1), device=device)
        return length - 1 - (length - 1 - pixels.abs()).abs()  # reflected at both ends

    def _jittered(self, inputs: Tensor) -> Tensor:
        if self._brightness:
            inputs = inputs + self._brightness * _uniform(inputs)
        if self._contrast:
            inputs = inputs * (1 + self._contrast * _uniform(inputs))
        return inputs

    def _cut(self, inputs: Tensor) -> Tensor:
        if self._cutout == 0:
            return inputs
        height, width = inputs.shape[2:]
        if self._cutout > min(height, width):
            raise ConfigError(
                f"augmentation.cutout: found {self._cutout}, must be up to the images'"
                f" {min(height, width)} pixels"
            )
        rows, columns = (
            self._cutout_mask(len(inputs), length, inputs.device) for length in (height, width)
        )
        return inputs.masked_fill(rows[:, None, :, None] & columns[:, None, None, :], 0.0)

    def _cutout_mask(self, batch: int, length: int, device: torch.device) -> Tensor:
        """Mask of the pixels along one side that each image's cutout square covers, ``[batch,
        length]`` bool.
        """
        from_first = torch.arange(length, device=device) - torch.randint(
            length - self._cutout + 1, (batch, 1), device=device
        )
        return (from_first >= 0) & (from_first < self._cutout)

    def _scaled(self, inputs: Tensor, progress: float) -> Tensor:
        begun = [pixels for start, pixels in self._resolutions if progress >= start]
        if not begun or (pixels := begun[-1]) is None:
            return inputs
        height, width = inputs.shape[2:]
        if pixels >= height:
            raise ConfigError(
                f"augmentation.resolutions: found {pixels} pixels, must be below the images'"
                f" {height}"
            )
        return functional.interpolate(
            inputs, size=(pixels, max(1, round(width * pixels / height))), mode="bilinear"
        )


def _uniform(inputs: Tensor) -> Tensor:
    """One number per image, drawn uniformly from -1 to 1, ``[batch, 1, 1, 1]``."""
    return 2 * torch.rand(len(inputs), 1, 1, 1, device=inputs.device, dtype=inputs.dtype) - 1
