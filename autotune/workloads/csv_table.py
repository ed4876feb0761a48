"""Classification data from any CSV file: one column is the target, the others are inputs."""

import codecs
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv

from autotune.errors import ConfigError, DataError
from autotune.remote.cache import fetched
from autotune.remote.path import located
from autotune.workloads.limits import MAX_BYTES, check_size
from autotune.workloads.splits import Column, Indices, Splits, table_splits

MISSING = (*arrow_csv.ConvertOptions().null_values, "?")
"""Texts that stand for a missing number in a file."""

MAX_COLUMNS = 5000
"""Limit on the number of columns, unless ``data.max_columns`` says another."""

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
    max_bytes: int = MAX_BYTES,
    max_columns: int = MAX_COLUMNS,
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
        max_bytes: limit in bytes on what the file opens to, and on the inputs that are made of it.
        max_columns: limit on the number of columns.

    Raises:
        ConfigError: a delimiter, number or fraction is out of range.
        DataError: the file is missing, empty, ragged, too large or not UTF-8, or lacks a named column; a column holds neither numbers
            nor text, or too many texts; the target is missing in a row, is no class, or has a class too rare to be split.
    """
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
        raise ConfigError(f"data.delimiter: found {delimiter!r}, accepted is one character such as ',' or ';'")
    if max_categories < 2:
        raise ConfigError(f"data.max_categories: found {max_categories}, accepted is a whole number from 2")
    if path is None:
        raise DataError(f"data.path: found null, accepted is {ACCEPTED}")
    table = _read(fetched(located(path, "data.path")), delimiter, max_bytes, max_columns)
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
        max_bytes=max_bytes,
    )


def _read(path: Path, delimiter: str, max_bytes: int, max_columns: int) -> Any:
    """Read a file as a ``pyarrow.Table`` whose column types are inferred from all rows."""
    ragged: list[Any] = []

    def refuse(row: Any) -> str:
        ragged.append(row)
        return "error"

    try:
        check_size(path, max_bytes)
        content = b"".join(_pieces(path, max_bytes))
        _check_width(path, content.partition(b"\n")[0].count(delimiter.encode()) + 1, max_columns)
        table = arrow_csv.read_csv(
            pa.BufferReader(content),
            arrow_csv.ReadOptions(use_threads=False, block_size=len(content) + 1),
            arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=refuse if _is_utf8(content) else None),
            arrow_csv.ConvertOptions(null_values=list(MISSING), strings_can_be_null=False),
        )
        names = table.column_names
    except FileNotFoundError as error:
        raise DataError(f"data.path: {path} is not there; accepted is {ACCEPTED}") from error
    except (OSError, ValueError, pa.ArrowException) as error:  # a name that is not UTF-8 raises a ValueError
        if ragged:
            found = f"row {ragged[0].number}: found {ragged[0].actual_columns} values"
            raise DataError(f"data.path: {path}: {found}, accepted are {ragged[0].expected_columns}, as in the first row") from error
        raise DataError(f"data.path: {path} cannot be read: {' '.join(str(error).split())[:300]}; accepted is {ACCEPTED}") from error
    _check_width(path, table.num_columns, max_columns)
    duplicate = next((name for name, count in Counter(names).items() if count > 1), None)
    if duplicate is not None:
        raise DataError(f"data.path: {path} has two columns {duplicate!r}, accepted are columns of different names")
    if not table.num_rows:
        raise DataError(f"data.path: {path} has no row after its first line; accepted is {ACCEPTED}")
    return table


def _pieces(path: Path, max_bytes: int) -> Iterator[bytes]:
    """What a file opens to, in pieces, as far as it is not too large."""
    num_bytes = 0
    with pa.input_stream(str(path), compression="detect") as stream:
        while piece := stream.read(1 << 22):
            num_bytes += len(piece)
            check_size(path, max_bytes, num_bytes=num_bytes)
            yield piece


def _is_utf8(content: bytes) -> bool:
    """Whether a content is UTF-8: with a row that is not, pyarrow calls no handler, and prints a traceback."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(content), 1 << 22):
            decoder.decode(content[start : start + (1 << 22)])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _check_width(path: Path, num_columns: int, max_columns: int) -> None:
    if num_columns > max_columns:
        raise DataError(
            f"data.path: {path} has {num_columns} columns, accepted are up to data.max_columns = {max_columns}; "
            f"+data.max_columns={num_columns} allows them"
        )


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
