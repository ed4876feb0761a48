"""Classification data from any CSV file: one column is the target, the others are inputs."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv

from autotune.errors import ConfigError, DataError
from autotune.remote.cache import fetched
from autotune.remote.path import located
from autotune.workloads.splits import Column, Indices, Splits, table_splits

MISSING = (*arrow_csv.ConvertOptions().null_values, "?")
"""Texts that stand for a missing number in a file."""

ACCEPTED = "a UTF-8 CSV file whose first line names its columns, compressed or not"


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
    """A CSV file's rows as train, validation and test splits, encoded by ``autotune.workloads.splits.encoded``.

    Inputs are float32 ``[samples, features]``, in the order of the columns; true and false are numbers, and a missing text is a text
    like any other. Targets are int64 ``[samples]``: the index of the row's class among all classes, sorted by letter or number.

    Args:
        path: path or URL of the file.
        target_column: name of the column with the classes: texts, whole numbers, or true and false.
        ignored_columns: names of columns to leave out, such as a row number.
        delimiter: character between two columns.
        max_categories: maximum number of different values of a text column, and of classes.
        validation_fraction: fraction of the rows for validation.
        test_fraction: fraction of the rows for test.

    Raises:
        ConfigError: a delimiter, number or fraction is out of range.
        DataError: the file is missing, empty, ragged or not UTF-8, or lacks a named column; a column holds neither numbers nor text, or
            too many texts; the target is missing in a row, is no class, or has a class too rare to be split.
    """
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
        raise ConfigError(f"data.delimiter: found {delimiter!r}, accepted is one character such as ',' or ';'")
    if max_categories < 2:
        raise ConfigError(f"data.max_categories: found {max_categories}, accepted is a whole number from 2")
    if path is None:
        raise DataError(f"data.path: found null, accepted is {ACCEPTED}")
    table = _read(fetched(located(path, "data.path")), delimiter)
    for name in ignored_columns:
        _check_there(name, table.column_names, "data.ignored_columns")
    _check_there(target_column, table.column_names, "data.target_column")
    targets, classes = _classes(table[target_column], max_categories, f"data.target_column: {target_column}")
    left_out = {target_column, *ignored_columns}
    columns = {name: _values(table[name], f"data.path: column {name}") for name in table.column_names if name not in left_out}
    if not columns:
        raise DataError(f"data.path: {path} has no column besides the target, accepted is at least one")
    return table_splits(
        columns,
        targets,
        classes,
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
        max_categories=max_categories,
    )


def _read(path: Path, delimiter: str) -> Any:
    """Read a file as a ``pyarrow.Table`` whose column types are inferred from all rows."""
    ragged: list[Any] = []

    def refuse(row: Any) -> str:
        ragged.append(row)
        return "error"

    try:
        with pa.input_stream(str(path), compression="detect") as stream:
            content = stream.read()
        table = arrow_csv.read_csv(
            pa.BufferReader(content),
            arrow_csv.ReadOptions(use_threads=False, block_size=len(content) + 1),
            arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=refuse),
            arrow_csv.ConvertOptions(null_values=list(MISSING), strings_can_be_null=False),
        )
    except FileNotFoundError as error:
        raise DataError(f"data.path: {path} is not there; accepted is {ACCEPTED}") from error
    except (OSError, pa.ArrowInvalid) as error:
        if ragged:
            found = f"row {ragged[0].number}: found {ragged[0].actual_columns} values"
            raise DataError(f"data.path: {path}: {found}, accepted are {ragged[0].expected_columns}, as in the first row") from error
        raise DataError(f"data.path: {path} cannot be read: {' '.join(str(error).split())}; accepted is {ACCEPTED}") from error
    duplicate = next((name for name in table.column_names if table.column_names.count(name) > 1), None)
    if duplicate is not None:
        raise DataError(f"data.path: {path} has two columns {duplicate!r}, accepted are columns of different names")
    if not table.num_rows:
        raise DataError(f"data.path: {path} has no row after its first line; accepted is {ACCEPTED}")
    return table


def _check_there(name: str | None, names: Sequence[str], where: str) -> None:
    if name not in names:
        close = get_close_matches(name or "", names, n=1)
        guess = f" (did you mean {close[0]}?)" if close else ""
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        raise DataError(f"{where}: there is no column {name}{guess}; accepted are {shown}")


def _values(column: Any, where: str) -> Column:
    kind = column.type
    if pa.types.is_string(kind):
        return np.asarray(column.to_numpy(), dtype=object)
    if not any(test(kind) for test in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)):
        found = "text that is not UTF-8" if pa.types.is_binary(kind) else kind
        raise DataError(f"{where}: holds {found}, accepted are numbers, true and false, and text; data.ignored_columns leaves it out")
    values = np.array(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)
    if np.isinf(values).any():
        raise DataError(f"{where}: holds infinity, accepted are finite numbers")
    return values


def _classes(column: Any, max_categories: int, where: str) -> tuple[Indices, list[Any]]:
    """The class index of each row ``[rows]``, from 0, and the value of each class."""
    values = _values(column, where)
    is_missing = np.equal(values, "") if values.dtype == object else np.isnan(values)
    if is_missing.any():
        raise DataError(f"{where}: is missing in {int(is_missing.sum())} of {len(values)} rows, accepted is a class in each")
    classes, targets = np.unique(values, return_inverse=True)
    if values.dtype != object and (fractions := classes[classes != classes.round()]).size:
        raise DataError(f"{where}: holds fractions such as {fractions[0]}, accepted are classes: texts, whole numbers, true and false")
    if not 2 <= len(classes) <= max_categories:
        raise DataError(f"{where}: holds {len(classes)} different values, accepted are 2 to data.max_categories = {max_categories} classes")
    return targets.astype(np.int64), classes.tolist()
