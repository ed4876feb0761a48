"""Augmentation of whole batches on the device: what a training sees of its images.

Contract of ``augmentation:`` in the configuration: ``augment(inputs, samples=..., epoch=..., progress=...)`` returns the inputs
that the model is given. ``inputs`` ``[batch, ...]`` are on the device and transformed; ``samples`` ``[batch]`` int64 are their
indices in the training split, ``epoch`` counts from 0, ``progress`` is the trained part of the schedule, 0 and up, below 1. A
class is made once a training, and is given ``num_samples`` of the training split and ``device`` where its signature names them.
One that returns another shape from some progress on says so by ``new_shapes_at``, all such progress: each shape is warmed up
before the clock of training starts.

Everything here is a fixed number of device operations for any batch, and nothing is read back from the device. Random numbers
come from torch's global generators, which a training seeds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from autotune.errors import ConfigError
from autotune.training.data import is_channels_last

FLIPS = ("none", "random", "alternating")


def unchanged(inputs: Tensor, *, samples: Tensor, epoch: int, progress: float) -> Tensor:
    """The inputs as they are."""
    return inputs


class ImageAugmentation:
    """Flips, shifts, jitters, cuts and scales images ``[batch, channels, height, width]``, in this order.

    ``flip`` mirrors left and right: ``random`` each image with probability a half, ``alternating`` one random half of the
    training split in even epochs and the other half in odd ones, so that each pair of epochs shows every image once in
    each orientation. ``shift`` moves each image by up to so many pixels each way, with its own reflection where it leaves
    off. ``brightness`` and ``contrast`` are the half-widths of what is added to an image, and of what 1 is changed by before
    it is multiplied, both uniform and one number an image. ``cutout`` is the side in pixels of a square, wholly inside, that is
    set to 0, which is the mean of standardised images.

    ``resolutions`` is a list of ``[from, pixels]``: from that progress on, images are scaled to that height, width in
    proportion; null is the full size, where the last entry must end, since normalisation statistics are taken from what the
    last batches look like. Before the first entry, and without any, images keep their size.

    The memory format of the inputs, contiguous or channels-last, is kept.

    Source: cutout: DeVries & Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout" (2017), here wholly
    inside the image. Alternating flip: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024), section 3.6, here by a
    drawn half instead of a hash of the index. Progressive resolution: Howard's DAWNBench entry for ImageNet (fast.ai, 2018).

    Raises:
        ConfigError: a setting that no image can be augmented with; when called, inputs that are no images, or too small.
    """

    def __init__(
        self,
        *,
        flip: str,
        shift: int,
        brightness: float,
        contrast: float,
        cutout: int,
        resolutions: Sequence[Sequence[float | None]],
        num_samples: int,
        device: torch.device | str,
    ) -> None:
        if flip not in FLIPS:
            raise ConfigError(f"augmentation.flip: found {flip!r}, accepted are {', '.join(FLIPS)}")
        for key, value in {"shift": shift, "brightness": brightness, "contrast": contrast, "cutout": cutout}.items():
            if value < 0:
                raise ConfigError(f"augmentation.{key}: found {value}, accepted are numbers from 0")
        self._flip, self._shift, self._cutout = flip, shift, cutout
        self._brightness, self._contrast = brightness, contrast
        self._resolutions = _checked(resolutions)
        self.new_shapes_at = [start for start, _ in self._resolutions]
        self._first_half = torch.randperm(num_samples, device=device) % 2 == 0 if flip == "alternating" else None

    def __call__(self, inputs: Tensor, *, samples: Tensor, epoch: int, progress: float) -> Tensor:
        """The augmented batch: as many images and channels, of the height and width that ``progress`` asks for."""
        if inputs.ndim != 4:
            raise ConfigError(f"augmentation: inputs are {list(inputs.shape)}, accepted are images [batch, channels, height, width]")
        memory_format = torch.channels_last if is_channels_last(inputs) else torch.contiguous_format
        moved = self._moved(inputs, self._mirrored(samples, epoch))
        return self._scaled(self._cut(self._jittered(moved)), progress).contiguous(memory_format=memory_format)

    def _mirrored(self, samples: Tensor, epoch: int) -> Tensor | None:
        """Which images to mirror, ``[batch]`` bool; None for none of them."""
        if self._flip == "random":
            return torch.rand(len(samples), device=samples.device) < 0.5
        if self._first_half is None:
            return None
        chosen = self._first_half[samples]
        return chosen if epoch % 2 == 0 else ~chosen

    def _moved(self, inputs: Tensor, mirrored: Tensor | None) -> Tensor:
        """Mirror and then shift, as one gather: each pixel of the result names the one that it takes."""
        if mirrored is None and self._shift == 0:
            return inputs
        batch, _, height, width = inputs.shape
        rows, columns = (self._source_pixels(batch, length, inputs.device) for length in (height, width))
        if mirrored is not None:
            columns = torch.where(mirrored[:, None], width - 1 - columns, columns)
        pixels = (rows[:, :, None] * width + columns[:, None, :]).view(batch, 1, height * width)
        return inputs.flatten(2).gather(2, pixels.expand(-1, inputs.shape[1], -1)).view(inputs.shape)

    def _source_pixels(self, batch: int, length: int, device: torch.device) -> Tensor:
        """For each image and each pixel along one side, the pixel that is moved there, ``[batch, length]`` int64."""
        if self._shift >= length:
            raise ConfigError(f"augmentation.shift: found {self._shift}, accepted is below the images' {length} pixels")
        pixels = torch.arange(length, device=device)
        if self._shift == 0:
            return pixels.expand(batch, length)
        pixels = pixels + torch.randint(-self._shift, self._shift + 1, (batch, 1), device=device)
        return length - 1 - (length - 1 - pixels.abs()).abs()  # reflected at both ends

    def _jittered(self, inputs: Tensor) -> Tensor:
        if self._brightness > 0:
            inputs = inputs + self._brightness * _uniform(inputs)
        if self._contrast > 0:
            inputs = inputs * (1 + self._contrast * _uniform(inputs))
        return inputs

    def _cut(self, inputs: Tensor) -> Tensor:
        if self._cutout == 0:
            return inputs
        height, width = inputs.shape[2:]
        if self._cutout > min(height, width):
            raise ConfigError(f"augmentation.cutout: found {self._cutout}, accepted is up to the images' {min(height, width)} pixels")
        rows, columns = (self._cut_pixels(len(inputs), length, inputs.device) for length in (height, width))
        return inputs.masked_fill(rows[:, None, :, None] & columns[:, None, None, :], 0.0)

    def _cut_pixels(self, batch: int, length: int, device: torch.device) -> Tensor:
        """Which pixels along one side the squares cover, ``[batch, length]`` bool."""
        from_first = torch.arange(length, device=device) - torch.randint(length - self._cutout + 1, (batch, 1), device=device)
        return (from_first >= 0) & (from_first < self._cutout)

    def _scaled(self, inputs: Tensor, progress: float) -> Tensor:
        pixels = None
        for start, each in self._resolutions:
            if progress >= start:
                pixels = each
        if pixels is None:
            return inputs
        height, width = inputs.shape[2:]
        if pixels >= height:
            raise ConfigError(f"augmentation.resolutions: found {pixels} pixels, accepted is below the images' {height}")
        return functional.interpolate(inputs, size=(pixels, max(1, round(width * pixels / height))), mode="bilinear")


def _uniform(inputs: Tensor) -> Tensor:
    """A number from -1 to 1 for each image, ``[batch, 1, 1, 1]``."""
    return 2 * torch.rand(len(inputs), 1, 1, 1, device=inputs.device, dtype=inputs.dtype) - 1


def _checked(resolutions: Sequence[Sequence[float | None]]) -> list[tuple[float, int | None]]:
    """The stretches of progress and their pixels.

    Raises:
        ConfigError: a stretch of another form, in the wrong order, or a last one that is not at the full size.
    """
    accepted = "accepted is a list of [from progress, pixels], rising from 0 and below 1, the last of them with null pixels: the full size"
    stretches: list[tuple[float, int | None]] = []
    least = 0.0
    for each in resolutions:
        start, pixels = each if isinstance(each, Sequence) and len(each) == 2 else (None, None)
        if start is None or not least <= start < 1 or not (pixels is None or (pixels >= 1 and pixels == int(pixels))):
            raise ConfigError(f"augmentation.resolutions: found {each}, {accepted}")
        stretches.append((start, None if pixels is None else int(pixels)))
        least = start
    if stretches and stretches[-1][1] is not None:
        raise ConfigError(f"augmentation.resolutions: the last is {stretches[-1][1]} pixels, {accepted}")
    return stretches
