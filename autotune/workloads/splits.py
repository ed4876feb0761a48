"""The format, the splitting and the scaling that all data sets here share.

A data callable returns a plain dict of ``train``, ``validation`` and ``test``, each a pair ``(inputs, targets)`` of CPU
tensors. The search sees ``validation``; ``test`` is scored once, for the exported configuration. Which sample is in which split
depends on the data alone and never on a trial's seed, so all trials and all repeats of a study are measured on the same samples.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Splits = dict[str, tuple[Tensor, Tensor]]

SPLIT_SEED = 20


def stratified_split(targets: Tensor, num_held_out: int, *, seed: int = SPLIT_SEED) -> tuple[Tensor, Tensor]:
    """Split sample indices into those that stay and ``num_held_out`` that have each class's share to within one sample.

    ``targets`` ``[samples]`` holds the class of each sample; both results are ascending sample indices ``[indices]``.

    Source: systematic sampling (Cochran, Sampling Techniques, 3rd ed., ch. 8): samples in random order, sorted by class,
    and then taken at equal distances. Unlike a library's split it is exact for any size, and no library version changes it.

    Raises:
        ValueError: ``num_held_out`` is not below the number of samples, or negative.
    """
    num_samples = len(targets)
    if not 0 <= num_held_out < num_samples:
        raise ValueError(f"cannot hold out {num_held_out} of {num_samples} samples")
    # RandomState, because NumPy never changes its stream of numbers, while a Generator's may change.
    shuffled = np.random.RandomState(seed).permutation(num_samples)
    by_class = shuffled[np.argsort(targets.numpy()[shuffled], kind="stable")]
    taken = (2 * np.arange(num_held_out) + 1) * num_samples // (2 * max(num_held_out, 1))
    is_held_out = np.zeros(num_samples, dtype=bool)
    is_held_out[by_class[taken]] = True
    return torch.from_numpy(np.flatnonzero(~is_held_out)), torch.from_numpy(np.flatnonzero(is_held_out))


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Scale bytes ``[samples, channels, height, width]`` to 0..1, then standardise each channel by its ``mean`` and ``std``."""
    shape = (1, len(mean), 1, 1)
    inputs = images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    return inputs.sub_(torch.tensor(mean).view(shape)).div_(torch.tensor(std).view(shape))


def image_splits(
    official_train: tuple[Tensor, Tensor],
    official_test: tuple[Tensor, Tensor],
    *,
    num_validation: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> Splits:
    """Hold a validation split out of the official training set and normalise the images of all three splits.

    Images are bytes ``[samples, channels, height, width]``, targets int64 ``[samples]``.

    Raises:
        ValueError: ``num_validation`` samples would leave nothing to train on.
    """
    images, targets = official_train
    train, validation = stratified_split(targets, num_validation)
    return {
        "train": (normalise(images[train], mean, std), targets[train]),
        "validation": (normalise(images[validation], mean, std), targets[validation]),
        "test": (normalise(official_test[0], mean, std), official_test[1]),
    }
