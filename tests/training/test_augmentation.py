"""What each part of the augmentation makes of images, held against plain loops over them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autotune.errors import ConfigError
from autotune.training.augmentation import ImageAugmentation

NOTHING: dict[str, Any] = {
    "flip": "none",
    "shift": 0,
    "brightness": 0.0,
    "contrast": 0.0,
    "cutout": 0,
    "resolutions": [],
}
HEIGHT, WIDTH = 6, 7

Augment = Callable[..., Tensor]


@pytest.fixture
def images() -> Tensor:
    """20 images ``[20, 3, 6, 7]``, all of their pixels different."""
    return torch.arange(20.0 * 3 * HEIGHT * WIDTH).view(20, 3, HEIGHT, WIDTH) + 1


def make(num_samples: int = 20, **settings: Any) -> Augment:
    return ImageAugmentation(**NOTHING | settings, num_samples=num_samples, device="cpu")


def augmented(augment: Augment, images: Tensor, *, epoch: int = 0, progress: float = 0.0) -> Tensor:
    return augment(images, samples=torch.arange(len(images)), epoch=epoch, progress=progress)


def is_mirrored(image: Tensor, original: Tensor) -> bool:
    """Whether an image is its original's mirror image; it must be one of the two."""
    assert torch.equal(image, original) != torch.equal(image, original.flip(-1))
    return torch.equal(image, original.flip(-1))


# Flips.


def test_alternating_flips_show_each_image_once_in_each_orientation_in_two_epochs(
    images: Tensor,
) -> None:
    augment = make(flip="alternating")
    epochs = [
        [
            is_mirrored(*pair)
            for pair in zip(augmented(augment, images, epoch=epoch), images, strict=True)
        ]
        for epoch in range(4)
    ]
    assert sum(epochs[0]) == 10
    assert epochs[1] == [not each for each in epochs[0]]
    assert epochs[2:] == epochs[:2]


# Shifts.


@pytest.mark.parametrize("flip", ["none", "alternating"])
def test_shifts_are_crops_of_each_image_padded_with_its_reflection(
    images: Tensor, flip: str
) -> None:
    shift = 2
    torch.manual_seed(3)
    shifted = augmented(make(flip=flip, shift=shift), images)
    torch.manual_seed(3)
    images = augmented(make(flip=flip), images)
    rows, columns = (torch.randint(-shift, shift + 1, (20, 1)).flatten().tolist() for _ in range(2))
    assert set(rows) == set(columns) == set(range(-shift, shift + 1))
    for image, original, row, column in zip(shifted, images, rows, columns, strict=True):
        padded = functional.pad(original[None], [shift] * 4, mode="reflect")[0]
        top, left = shift + row, shift + column
        assert torch.equal(image, padded[:, top : top + HEIGHT, left : left + WIDTH])


# Jitter and cutout.


def test_cutout_sets_one_square_within_each_image_to_zero() -> None:
    images = torch.ones(2000, 2, HEIGHT, WIDTH)
    torch.manual_seed(0)
    cut = augmented(make(cutout=3, num_samples=2000), images)
    assert set(cut.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(cut[:, 0], cut[:, 1])
    holes = cut[:, 0] == 0
    assert torch.equal(holes.sum((1, 2)), torch.full((2000,), 9))
    corners = holes.flatten(1).int().argmax(1)
    for corner in corners.unique().tolist():
        row, column = divmod(corner, WIDTH)
        assert holes[corners == corner][:, row : row + 3, column : column + 3].all()
    assert len(corners.unique()) == (HEIGHT - 2) * (WIDTH - 2)


# Progressive resolution.

STRETCHES = [[0.0, 2], [0.4, 3], [0.8, None]]


@pytest.mark.parametrize(
    ("progress", "size"),
    [(0.0, (2, 2)), (0.39, (2, 2)), (0.4, (3, 4)), (0.79, (3, 4)), (0.8, (6, 7)), (0.99, (6, 7))],
)
def test_progress_sets_the_size_that_whole_crops_are_scaled_to(
    images: Tensor, progress: float, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    scaled = augmented(make(shift=1, resolutions=STRETCHES), images, progress=progress)
    torch.manual_seed(0)
    cropped = augmented(make(shift=1), images)
    assert scaled.shape[2:] == size
    assert torch.equal(
        scaled,
        functional.interpolate(cropped, size=size, mode="bilinear") if size != (6, 7) else cropped,
    )


# Form and refusals.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"flip": "often"},
            "augmentation.flip: found 'often', use one of none, random, alternating",
        ),
        ({"shift": -1}, "augmentation.shift: found -1"),
        (
            {"resolutions": [[0.0, 4]]},
            r"augmentation.resolutions: found \[\[0.0, 4\]\]; it must be a list of",
        ),
        (
            {"resolutions": [[0.0, 4.5], [0.5, None]]},
            r"augmentation.resolutions: found .* it must be",
        ),
    ],
)
def test_a_setting_that_means_nothing_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**settings)
