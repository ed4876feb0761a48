"""Turns the columns of a table into a model's inputs, and splits its rows.

Scales and categories of a column are computed from the training split alone. Here a column is an array ``[rows]``: numbers as
float64 with NaN for a missing number, or texts as objects.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from autotune.errors import ConfigError, DataError
from autotune.workloads.splits import Splits, stratified_split

Column = np.ndarray[tuple[int, ...], np.dtype[Any]]
Indices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def table_splits(
    columns: Mapping[str, Column],
    targets: Indices,
    class_names: Sequence[object],
    *,
    validation_fraction: float,
    test_fraction: float,
    max_categories: int,
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

    Raises:
        ConfigError: a fraction is out of range.
        DataError: a column has too many different texts, too few rows are left to train on, or none of a class.
    """
    rows = _rows(targets, class_names, validation_fraction, test_fraction)
    features = [encoded(values, rows["train"], max_categories, name) for name, values in columns.items()]
    inputs = torch.from_numpy(np.concatenate(features, axis=1).astype(np.float32))
    classes = torch.from_numpy(targets)
    return {split: (inputs[indices], classes[indices]) for split, indices in rows.items()}


def encoded(values: Column, train: Indices, max_categories: int, name: str) -> Column:
    """A model's features ``[rows, features]`` of one column.

    Numbers are standardised by the training rows' mean and deviation; a column that is constant there becomes 0. A missing number is
    replaced by the mean, and a column with missing numbers has a second feature that is 1 for them. Texts are one-hot over the values
    in the training rows: a value that only other rows have is 0 in all features.

    Raises:
        DataError: the training rows have more than ``max_categories`` different texts.
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
        filled = np.where(is_missing, seen.mean(), values)
        scaled = (filled - seen.mean()) / filled[train].std()
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
