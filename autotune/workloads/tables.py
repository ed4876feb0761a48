"""Tables as classification data: any CSV file, one of whose columns is the target, and
scikit-learn's breast-cancer set.

Scales and categories of a column are computed from the training split alone.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from autotune.errors import ConfigError, DataError, explained
from autotune.remote import fetched
from autotune.workloads.splits import (
    Splits,
    check_held_out,
    scikit_learn_file,
    three_splits,
)

Column = np.ndarray[tuple[int, ...], np.dtype[Any]]
"""Values ``[rows]``: numbers as float64 with NaN for a missing number, or texts as objects."""


def csv_table(
    *,
    path: str | None,
    target_column: str | None,
    ignored_columns: Sequence[str],
    delimiter: str,
    max_categories: int,
    validation_fraction: float,
    test_fraction: float,
) -> Splits:
    """A CSV file's rows as train, validation and test splits, encoded by ``encoded``.

    Inputs are float32 ``[samples, features]``, in the order of the columns; true and false are
    numbers. A value is missing where the file has nothing, ``?``, or what pandas takes for missing;
    a missing text is a text like any other. Targets are int64 ``[samples]``: the index
    of the row's class among all classes, sorted by letter or number.

    Args:
        path: path or URL of a UTF-8 file whose first line names its columns, compressed or not.
        target_column: name of the column with the classes: texts, whole numbers, or true and false.
        ignored_columns: names of columns to leave out, such as a row number.
        delimiter: character between two columns.
        max_categories: maximum number of different values of a text column, and of classes.
        validation_fraction: fraction of the rows for validation.
        test_fraction: fraction of the rows for test.

    Raises:
        DataError: the file is missing or no table, or lacks a named column; a column cannot be
            encoded; the target is missing in a row, is no class, or has a class too rare to be
            split.
    """
    if path is None or target_column is None:
        raise ConfigError("data: data=csv needs data.path=FILE and data.target_column=NAME")
    table = _read(path, delimiter)
    for name in (target_column, *ignored_columns):
        if name not in table:
            raise DataError(
                f"data: {path} has no column {name}; it has {', '.join(table.columns[:20])}"
            )
    inputs = table.drop(columns=[target_column, *ignored_columns])
    columns = {name: _values(inputs[name]) for name in inputs}
    if not columns:
        raise DataError(f"data.path: {path} has no column besides the target")
    num_missing = table[target_column].isna().sum()
    target = _values(table[target_column])
    classes, targets = np.unique(target, return_inverse=True)
    if num_missing:
        problem = f"it is missing in {num_missing} of {len(target)} rows"
    elif target.dtype != object and (classes != classes.round()).any():
        problem = "it holds fractions, and classes are texts, whole numbers, true and false"
    elif not 2 <= len(classes) <= max_categories:
        problem = (
            f"it holds {len(classes)} different values, not 2 to"
            f" data.max_categories={max_categories}"
        )
    else:
        fractions = validation_fraction, test_fraction
        return table_splits(columns, targets, *fractions, max_categories=max_categories)
    raise DataError(f"data.target_column: {target_column}: {problem}")


def breast_cancer(validation_fraction: float, test_fraction: float) -> Splits:
    """569 tumours, 212 of them malignant, described by 30 measurements of their cells.

    Inputs are float32 ``[samples, 30]``, each measurement standardised by the train split's mean
    and deviation; targets are int64 ``[samples]``, 0 malignant and 1 benign.

    Source: Street, Wolberg & Mangasarian, "Nuclear feature extraction for breast tumor diagnosis"
    (1993), as scikit-learn ships it.
    """
    path = scikit_learn_file("breast_cancer.csv")
    table = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float64)
    columns = {f"measurement {number}": values for number, values in enumerate(table[:, :-1].T)}
    return table_splits(columns, table[:, -1], validation_fraction, test_fraction, max_categories=0)


def table_splits(
    columns: Mapping[str, Column],
    targets: np.ndarray,
    validation_fraction: float,
    test_fraction: float,
    *,
    max_categories: int,
) -> Splits:
    """Split a table's rows so that each split has each class's share, and encode the columns in
    their order.

    Args:
        columns: values ``[rows]`` by column name.
        targets: class index ``[rows]`` of each row, from 0.
        validation_fraction: fraction of the rows for validation.
        test_fraction: fraction of the rows for test.
        max_categories: maximum number of different values of a text column.

    Raises:
        ConfigError: a fraction is out of range.
        DataError: a column cannot be encoded, or a class has no row left to train on.
    """
    check_held_out(validation_fraction, test_fraction)
    classes = torch.from_numpy(targets.astype(np.int64))
    num_validation, num_test = (
        max(1, round(len(targets) * share)) for share in (validation_fraction, test_fraction)
    )
    rows = three_splits(classes, num_validation, num_test)
    if len(absent := np.setdiff1d(classes, classes[rows["train"]])):
        raise DataError(
            f"data: no row of class number {absent[0]} is left to train on; it needs more rows"
        )
    train = rows["train"].numpy()
    features = [encoded(values, train, max_categories, name) for name, values in columns.items()]
    inputs = torch.from_numpy(np.concatenate(features, axis=1))
    return {split: (inputs[indices], classes[indices]) for split, indices in rows.items()}


def encoded(values: Column, train: np.ndarray, max_categories: int, name: str) -> Column:
    """A model's features, float32 ``[rows, features]``, of one column.

    Numbers are standardised by the training rows' mean and deviation; a column that is constant
    there becomes 0. A missing number is replaced by the mean, and a column with missing numbers has
    a second feature that is 1 for them. Texts are one-hot over the values in the training rows: a
    value that only other rows have is 0 in all features.

    Raises:
        DataError: the training rows have more than ``max_categories`` different texts, or a number
            is too large.
    """
    where = f"data: column {name}"
    if values.dtype == object:
        categories = np.unique(values[train])
        if len(categories) > max_categories:
            raise DataError(
                f"{where} holds {len(categories)} different texts, more than"
                f" data.max_categories={max_categories}; data.ignored_columns=[{name}] leaves"
                " it out"
            )
        one_hot: Column = np.equal(values[:, None], categories).astype(np.float32)
        return one_hot
    is_missing = np.isnan(values)
    seen = values[train][~is_missing[train]]
    scaled = np.zeros_like(values)
    if len(seen) and seen.min() < seen.max():
        with np.errstate(all="ignore"):  # what overflows is refused below
            filled = np.where(is_missing, seen.mean(), values)
            scaled = (filled - seen.mean()) / filled[train].std()
    if not np.isfinite(scaled.astype(np.float32)).all():
        raise DataError(
            f"{where} holds numbers too large; data.ignored_columns=[{name}] leaves it out"
        )
    columns = [scaled, is_missing] if is_missing.any() else [scaled]
    return np.stack(columns, axis=1).astype(np.float32)


def _read(path: str, delimiter: str) -> Any:
    """Read a file as a data frame whose column types are inferred from all rows."""
    import pandas as pd  # noqa: PLC0415  # only for CSV; it starts threads, and a fork breaks them

    file = fetched(path, "data.path")
    with explained(f"data: {file} cannot be read"), warnings.catch_warnings():
        warnings.simplefilter("error")
        table = pd.read_csv(
            file,
            sep=delimiter,
            na_values=["?"],
            low_memory=False,
            index_col=False,
            encoding="utf-8-sig",
        )
    if table.empty:
        raise DataError(f"data.path: {path} needs rows after its first line, which names columns")
    return table


def _values(column: Any) -> Column:
    if column.dtype.kind in "biuf":
        return np.array(column, dtype=np.float64)
    return np.array(column.fillna("").astype(str), dtype=object)
