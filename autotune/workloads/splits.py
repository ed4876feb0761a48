"""What data sets share: splitting, scaling and reading of files; and data sets in NumPy files.

A data callable returns a plain dict of ``train``, ``validation`` and ``test``, each a pair
``(inputs, targets)`` of CPU tensors. The search sees ``validation``; ``test`` is scored once, for
the exported configuration. Which sample is in which split depends on the data alone and never on a
trial's seed, so all trials and all repeats of a study are measured on the same samples.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.errors import ConfigError, DataError, explained
from autotune.remote import fetched, is_file

Splits = dict[str, tuple[Tensor, Tensor]]


def stratified_split(targets: Tensor, num_held_out: int) -> tuple[Tensor, Tensor]:
    """Split sample indices into those that stay and ``num_held_out`` that have each class's share
    to within one sample.

    ``targets`` ``[samples]`` holds the class of each sample; both results are ascending sample
    indices ``[indices]``.

    Source: systematic sampling (Cochran, Sampling Techniques, 3rd ed., ch. 8): samples in random
    order, sorted by class, and then taken at equal distances. Unlike a library's split it is exact
    for any size, and no library version changes it.
    """
    num_samples = len(targets)
    # RandomState, because NumPy never changes its stream of numbers, while a Generator's may
    # change.
    shuffled = np.random.RandomState(20).permutation(num_samples)
    by_class = shuffled[np.argsort(targets.numpy()[shuffled], kind="stable")]
    taken = (2 * np.arange(num_held_out) + 1) * num_samples // (2 * max(num_held_out, 1))
    held_out = np.sort(by_class[taken])
    return (
        torch.from_numpy(np.setdiff1d(np.arange(num_samples), held_out)),
        torch.from_numpy(held_out),
    )


def check_held_out(validation_fraction: float, test_fraction: float) -> None:
    """Check the fractions of a data set that are held out.

    Raises:
        ConfigError: nothing is held out for one of them, or nothing is left to train on.
    """
    if not (validation_fraction > 0 < test_fraction and validation_fraction + test_fraction < 1):
        raise ConfigError(
            "data: validation_fraction and test_fraction must be above 0, and their sum below 1"
        )


def three_splits(targets: Tensor, num_validation: int, num_test: int) -> dict[str, Tensor]:
    """Sample indices of ``train``, ``validation`` and ``test``, each with each class's share."""
    rest, test = stratified_split(targets, num_test)
    train, validation = stratified_split(targets[rest], num_validation)
    return {"train": rest[train], "validation": rest[validation], "test": test}


def part_of(rows: Tensor, targets: Tensor, count: int | None, key: str) -> Tensor:
    """``count`` of the sample indices, with each class's share; all for None.

    Raises:
        DataError: there are not as many; names the key.
    """
    if count is None:
        return rows
    if not 1 <= count <= len(rows):
        raise DataError(f"{key}: found {count}, use 1 to {len(rows)}")
    return rows[stratified_split(targets[rows], count)[1]]


class Standardise:
    """Divides inputs ``[samples, channels, ...]`` by ``scale``, as float32, and standardises each
    channel.

    Args:
        mean: mean of each channel after the division.
        std: standard deviation of each channel after the division.
        scale: what inputs are divided by.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], *, scale: float = 255) -> None:
        factor = 1 / torch.tensor(std, dtype=torch.float32)
        offset = -torch.tensor(mean, dtype=torch.float32) * factor
        self._factors = {torch.device("cpu"): (factor / scale, offset)}

    def __call__(self, inputs: Tensor) -> Tensor:
        """Standardise inputs; the result has their device and memory format."""
        # once per process: a copy to a device makes the host wait for it
        if inputs.device not in self._factors:
            factor, offset = self._factors[torch.device("cpu")]
            self._factors[inputs.device] = factor.to(inputs.device), offset.to(inputs.device)
        shape = (-1, *(1,) * (inputs.ndim - 2))  # of the channels, which broadcasts
        factor, offset = (channels.view(shape) for channels in self._factors[inputs.device])
        return inputs.to(torch.float32, copy=True).mul_(factor).add_(offset)


def memory_mapped(
    *, root: str, scale: float, mean: Sequence[float] | None, std: Sequence[float] | None
) -> dict[str, Any]:
    """Splits ``train``, ``validation`` and, if its files exist, ``test`` from
    ``<split>_inputs.npy`` and ``<split>_targets.npy``, which may be larger than the memory: only
    the requested batches are read.

    Inputs are ``[samples, ...]`` of any type, such as bytes, and are read as they are; on the
    device they become float32, are divided by ``scale``, and each channel (dimension 1) is
    standardised by its ``mean`` and ``std``. Inputs of integer types other than bytes, such as
    tokens, are not transformed. Targets are ``[samples]`` or ``[samples, ...]``.

    Raises:
        DataError: a file is missing or no array, or ``mean`` or ``std`` do not fit the inputs.
    """
    has_test = is_file(f"{root}/test_inputs.npy", "data.root")
    splits: dict[str, Any] = {
        split: tuple(_mapped(f"{root}/{split}_{part}.npy") for part in ("inputs", "targets"))
        for split in ("train", "validation", *(["test"] if has_test else []))
    }
    inputs = splits["train"][0]
    if inputs.dtype == np.uint8 or inputs.dtype.kind == "f":
        num_channels = inputs.shape[1] if inputs.ndim > 1 else 1
        means, stds = mean or [0] * num_channels, std or [1] * num_channels
        if not len(means) == len(stds) == num_channels:
            raise DataError(f"data: give mean and std of each of the {num_channels} channels")
        if min(scale, *stds) <= 0:
            raise DataError(f"data: scale and std must be above 0, found {scale} and {std}")
        splits["transform"] = Standardise(means, stds, scale=scale)
    return splits


def _mapped(location: str) -> "np.ndarray[Any, Any]":
    path = fetched(location, "data.root")
    with explained(f"data: {path} cannot be read"):
        mapped: np.ndarray[Any, Any] = np.load(path, mmap_mode="r")
    return mapped


def scikit_learn_file(name: str) -> Path:
    """Path of a data file that comes with scikit-learn.

    It is found without importing scikit-learn, which in every process would take longer than a
    whole training on such a file.

    Raises:
        DataError: scikit-learn is not installed.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError(f"data: {name} comes with scikit-learn; install scikit-learn")
    return Path(package.origin).parent / "datasets" / "data" / name
