"""The format, the splitting and the scaling that all data sets here share.

A data callable returns a plain dict of ``train``, ``validation`` and ``test``, each a pair
``(inputs, targets)`` of CPU tensors. The search sees ``validation``; ``test`` is scored once, for
the exported configuration. Which sample is in which split depends on the data alone and never on a
trial's seed, so all trials and all repeats of a study are measured on the same samples.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from autotune.errors import DataError

Splits = dict[str, tuple[Tensor, Tensor]]

SPLIT_SEED = 20


def stratified_split(
    targets: Tensor, num_held_out: int, *, seed: int = SPLIT_SEED
) -> tuple[Tensor, Tensor]:
    """Split sample indices into those that stay and ``num_held_out`` that have each class's share
    to within one sample.

    ``targets`` ``[samples]`` holds the class of each sample; both results are ascending sample
    indices ``[indices]``.

    Source: systematic sampling (Cochran, Sampling Techniques, 3rd ed., ch. 8): samples in random
    order, sorted by class, and then taken at equal distances. Unlike a library's split it is exact
    for any size, and no library version changes it.

    Raises:
        ValueError: ``num_held_out`` is not below the number of samples, or negative.
    """
    num_samples = len(targets)
    if not 0 <= num_held_out < num_samples:
        raise ValueError(f"cannot hold out {num_held_out} of {num_samples} samples")
    # RandomState, because NumPy never changes its stream of numbers, while a Generator's may
    # change.
    shuffled = np.random.RandomState(seed).permutation(num_samples)
    by_class = shuffled[np.argsort(targets.numpy()[shuffled], kind="stable")]
    taken = (2 * np.arange(num_held_out) + 1) * num_samples // (2 * max(num_held_out, 1))
    is_held_out = np.zeros(num_samples, dtype=bool)
    is_held_out[by_class[taken]] = True
    return torch.from_numpy(np.flatnonzero(~is_held_out)), torch.from_numpy(
        np.flatnonzero(is_held_out)
    )


class Standardise:
    """Divides inputs ``[samples, channels, ...]`` by ``scale``, as float32, and standardises each
    channel.

    Args:
        mean: mean of each channel after the division.
        std: standard deviation of each channel after the division.
        scale: what inputs are divided by.
        num_dimensions: number of dimensions of the inputs.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        scale: float = 255,
        num_dimensions: int = 4,
    ) -> None:
        shape = (1, -1, *(1,) * (num_dimensions - 2))
        factor = 1 / torch.tensor(std, dtype=torch.float32).view(shape)
        offset = -torch.tensor(mean, dtype=torch.float32).view(shape) * factor
        self._factors = {torch.device("cpu"): (factor / scale, offset)}

    def __call__(self, inputs: Tensor) -> Tensor:
        """Standardise inputs; the result has their device and memory format."""
        # once per process: a copy to a device makes the host wait for it
        if inputs.device not in self._factors:
            factor, offset = self._factors[torch.device("cpu")]
            self._factors[inputs.device] = factor.to(inputs.device), offset.to(inputs.device)
        factor, offset = self._factors[inputs.device]
        return inputs.to(torch.float32, copy=True).mul_(factor).add_(offset)


def scikit_learn_file(name: str) -> Path:
    """Path of a data file that comes with scikit-learn.

    It is found without importing scikit-learn, which in every process would take longer than a
    whole training on such a file.

    Raises:
        DataError: scikit-learn is not installed, or keeps the file elsewhere.
    """
    package = importlib.util.find_spec("sklearn")
    folder = Path((package and package.origin) or "scikit-learn").parent / "datasets" / "data"
    if not (folder / name).is_file():
        raise DataError(
            f"data: there is no {folder / name}, which scikit-learn has; install scikit-learn"
        )
    return folder / name
