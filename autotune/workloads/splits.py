"""The format, the splitting and the scaling that all data sets here share.

A data callable returns a plain dict of ``train``, ``validation`` and ``test``, each a pair ``(inputs, targets)`` of CPU
tensors. The search sees ``validation``; ``test`` is scored once, for the exported configuration. Which sample is in which split
depends on the data alone and never on a trial's seed, so all trials and all repeats of a study are measured on the same samples.

The columns of a table become inputs by ``table_splits``; scales and categories of a column are computed from the training split alone.
A column is an array ``[rows]``: numbers as float64 with NaN for a missing number, or texts as objects.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.errors import ConfigError, DataError
from autotune.workloads.limits import MAX_BYTES

Splits = dict[str, tuple[Tensor, Tensor]]

SPLIT_SEED = 20
Column = np.ndarray[tuple[int, ...], np.dtype[Any]]
Indices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


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


def scikit_learn_file(data_set: str, name: str) -> Path:
    """Path of a data file that comes with scikit-learn.

    It is found without importing scikit-learn, which in every process would take longer than a whole training on such a file.

    Args:
        data_set: the data set's name, for messages.
        name: the file's name.

    Raises:
        DataError: scikit-learn is not installed, or keeps the file elsewhere.
    """
    package = importlib.util.find_spec("sklearn")
    folders = package.submodule_search_locations if package else None
    path = Path(folders[0]) / "datasets" / "data" / name if folders else None
    if path is None or not path.is_file():
        raise DataError(f"data: {data_set}: {path or 'scikit-learn'} is not there; accepted is an installed scikit-learn")
    return path


def table_splits(
    columns: Mapping[str, Column],
    targets: Indices,
    class_names: Sequence[object],
    *,
    validation_fraction: float,
    test_fraction: float,
    max_categories: int,
    max_bytes: int = MAX_BYTES,
) -> Splits:
    """Split a table's rows so that each split has each class's share, and encode the columns in their order.

    Inputs are float32 ``[samples, features]``, targets int64 ``[samples]``.

    Args:
        columns: values ``[rows]`` by column name; at least one column.
        targets: class index ``[rows]`` of each row, from 0.
        class_names: names of the classes, for messages.
        validation_fraction: fraction of the rows for validation.
        test_fraction: fraction of the rows for test.
        max_categories: maximum number of different values of a text column.
        max_bytes: limit in bytes on the inputs.

    Raises:
        ConfigError: a fraction is out of range.
        DataError: a column has too many different texts or too large numbers, the inputs take too much memory, or too few rows are left
            to train on, or none of a class.
    """
    rows = _rows(targets, class_names, validation_fraction, test_fraction)
    features: list[Column] = []
    num_bytes = 0
    for name, values in columns.items():
        features.append(encoded(values, rows["train"], max_categories, name).astype(np.float32))
        num_bytes += features[-1].nbytes
        if num_bytes > max_bytes:
            raise DataError(
                f"data: the inputs take more than data.max_bytes = {max_bytes} bytes at column {len(features)} of {len(columns)}, {name}; "
                f"+data.max_bytes={2 * max_bytes} allows twice that, and data.ignored_columns leaves columns out"
            )
    inputs = torch.from_numpy(np.concatenate(features, axis=1))
    classes = torch.from_numpy(targets)
    return {split: (inputs[indices], classes[indices]) for split, indices in rows.items()}


def encoded(values: Column, train: Indices, max_categories: int, name: str) -> Column:
    """A model's features ``[rows, features]`` of one column.

    Numbers are standardised by the training rows' mean and deviation; a column that is constant there becomes 0. A missing number is
    replaced by the mean, and a column with missing numbers has a second feature that is 1 for them. Texts are one-hot over the values
    in the training rows: a value that only other rows have is 0 in all features.

    Raises:
        DataError: the training rows have more than ``max_categories`` different texts, or a number is too large for float32.
    """
    if values.dtype == object:
        categories = np.unique(values[train])
        if len(categories) > max_categories:
            raise DataError(
                f"data: column {name}: holds {len(categories)} different texts such as {str(categories[0])[:40]!r}, accepted are up to "
                f"data.max_categories = {max_categories}; data.ignored_columns leaves it out"
            )
        one_hot: Column = np.equal(values[:, None], categories).astype(np.float64)
        return one_hot
    is_missing = np.isnan(values)
    seen = values[train][~is_missing[train]]
    if not len(seen) or seen.min() == seen.max():
        scaled = np.zeros_like(values)
    else:
        with np.errstate(all="ignore"):  # what overflows is refused below
            filled = np.where(is_missing, seen.mean(), values)
            deviation = filled[train].std()
            scaled = (filled - seen.mean()) / deviation
        if not (np.isfinite(deviation) and (np.abs(scaled) <= np.finfo(np.float32).max).all()):
            raise DataError(
                f"data: column {name}: holds numbers from {np.nanmin(values):.3g} to {np.nanmax(values):.3g}, which "
                f"float32 cannot hold when they are standardised; data.ignored_columns leaves it out"
            )
    return np.stack([scaled, is_missing], axis=1) if is_missing.any() else scaled[:, None]


def _rows(targets: Indices, class_names: Sequence[object], validation_fraction: float, test_fraction: float) -> dict[str, Indices]:
    """The row indices of train, validation and test, each with every class's share to within one row."""
    for key, fraction in (("validation_fraction", validation_fraction), ("test_fraction", test_fraction)):
        if not 0 < fraction < 1:
            raise ConfigError(f"data.{key}: found {fraction}, accepted is above 0 and below 1")
    num_validation, num_test = (max(1, round(len(targets) * fraction)) for fraction in (validation_fraction, test_fraction))
    if num_validation + num_test >= len(targets):
        held_out = f"{num_validation} for validation and {num_test} for test"
        raise DataError(f"data: found {len(targets)} rows, of which {held_out} leave none to train on; accepted are more")
    classes = torch.from_numpy(targets)
    rest, test = stratified_split(classes, num_test)
    in_train, in_validation = stratified_split(classes[rest], num_validation)
    train = rest[in_train].numpy()
    absent = np.setdiff1d(targets, targets[train])
    if len(absent):
        found = f"class {class_names[absent[0]]!s} has {int((targets == absent[0]).sum())} of {len(targets)} rows"
        raise DataError(f"data: {found}, and none is left to train on; accepted are classes with more")
    return {"train": train, "validation": rest[in_validation].numpy(), "test": test.numpy()}
