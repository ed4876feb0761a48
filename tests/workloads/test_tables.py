"""Tables: the encoding of columns, the splitting of rows, the breast-cancer set and CSV files."""

import gzip
from typing import Any

import numpy as np
import pytest
import torch

from autotune.errors import ConfigError, DataError
from autotune.workloads.splits import Splits
from autotune.workloads.tables import breast_cancer, csv_table, encoded

TRAIN = np.arange(4)
"""The first four of six rows."""


# Columns.


def test_numbers_are_standardised_by_the_training_rows_alone() -> None:
    scaled = encoded(np.array([1.0, 3.0, 1.0, 3.0, 100.0, 2.0]), TRAIN, 0, "a")
    assert scaled.tolist() == [[-1.0], [1.0], [-1.0], [1.0], [98.0], [0.0]]


def test_a_missing_number_is_the_mean_and_is_told() -> None:
    nan = np.nan
    features = encoded(np.array([1.0, nan, 3.0, 2.0, nan, 4.0]), TRAIN, 0, "a")
    assert features[:, 1].tolist() == [0, 1, 0, 0, 1, 0]
    assert features[[1, 4], 0].tolist() == [0.0, 0.0]
    assert abs(features[:4, 0].mean()) < 1e-12
    assert features[:4, 0].std() == pytest.approx(1.0)


def test_a_text_is_one_of_those_that_the_training_rows_have() -> None:
    texts = np.array(["red", "blue", "red", "", "green", "blue"], dtype=object)
    empty, blue, red = encoded(texts, TRAIN, 3, "a").T.tolist()
    assert empty == [0, 0, 0, 1, 0, 0]
    assert blue == [0, 1, 0, 0, 0, 1]
    assert red == [1, 0, 1, 0, 0, 0]


# The breast-cancer set.


def test_the_breast_cancer_set_is_split_by_class_and_standardised() -> None:
    splits = breast_cancer(validation_fraction=0.25, test_fraction=0.25)
    inputs, targets = splits["train"]
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert inputs.mean(dim=0).abs().max() < 1e-5
    assert (inputs.std(dim=0, correction=0) - 1).abs().max() < 1e-5
    for (inputs, targets), size in zip(splits.values(), (285, 142, 142), strict=True):
        assert inputs.shape == (size, 30)
        assert abs((targets == 0).float().mean() - 212 / 569) < 0.01
        assert inputs.mean(dim=0).abs().max() < 0.5
    assert classes_of(splits) == [212, 357]


# CSV files.

ROWS = "size,colour,weight,label\n" + "".join(
    f"{n},{'red' if n % 3 else 'blue'},{n / 4 if n % 5 else '?'},{'ab'[n % 2]}\n" for n in range(40)
)


def read(path: str, **changes: Any) -> Splits:
    settings: dict[str, Any] = {
        "target_column": "label",
        "ignored_columns": [],
        "delimiter": ",",
        "max_categories": 8,
        "validation_fraction": 0.25,
        "test_fraction": 0.25,
    }
    return csv_table(path=path, **(settings | changes))


def classes_of(splits: Splits) -> list[int]:
    return torch.cat([targets for _, targets in splits.values()]).bincount().tolist()


def test_a_csv_file_becomes_numbers_by_column(write: Any) -> None:
    splits = read(write(ROWS))
    assert [inputs.shape for inputs, _ in splits.values()] == [(20, 5), (10, 5), (10, 5)]
    assert classes_of(splits) == [20, 20]
    inputs = torch.cat([inputs for inputs, _ in splits.values()])
    size, blue, red, weight, is_missing = inputs.T
    assert abs(splits["train"][0][:, 0].mean()) < 1e-6
    assert len(size.unique()) == 40
    assert (blue + red).unique().tolist() == [1.0]
    assert blue.sum() == 14
    assert is_missing.sum() == 8
    assert weight[is_missing == 1].abs().max() < 1e-6


def test_delimiters_marks_and_compression_are_understood(write: Any) -> None:
    plain = read(write(ROWS))
    for path, changes in (
        (write(ROWS.replace(",", ";"), "semicolons.csv"), {"delimiter": ";"}),
        (write(b"\xef\xbb\xbf" + ROWS.replace("\n", "\r\n").encode(), "marked.csv"), {}),
        (write(gzip.compress(ROWS.encode()), "table.csv.gz"), {}),
    ):
        assert torch.equal(read(path, **changes)["train"][0], plain["train"][0])


@pytest.mark.parametrize("values", [("no", "yes"), ("9", "10"), ("false", "true")])
def test_classes_are_counted_in_order(write: Any, values: tuple[str, str]) -> None:
    content = "x,label\n" + "".join(f"{n},{values[n % 4 > 0]}\n" for n in range(40))
    assert classes_of(read(write(content))) == [10, 30]


def test_a_type_is_told_from_the_whole_file(write: Any) -> None:
    megabyte = "".join(f"{n % 3}.{'0' * 60},{n % 2}\n" for n in range(20_000))
    inputs, _ = read(write("x,label\n" + megabyte + "other,1\n"))["train"]
    assert inputs.unique().tolist() == [0, 1], "numbers are texts where one of them is"


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ("", {}, "file cannot be read: EmptyDataError: No columns"),
        ("a,label\n", {}, "needs rows after its first line"),
        ("a,label\n1,2,3\n", {}, "Length of header or names does not match"),
        (b"a,label\n\xff,0\n", {}, "cannot be read: UnicodeDecodeError: 'utf-8' codec"),
        (ROWS, {"target_column": "lable"}, "has no column lable; it has size, colour"),
        (ROWS, {"target_column": None}, "needs data.path=FILE and data.target_column=NAME"),
        (ROWS, {"ignored_columns": ["size", "colour", "weight"]}, "no column besides the target"),
        (ROWS, {"target_column": "size"}, "it holds 40 different values, not 2 to"),
        (ROWS, {"target_column": "weight"}, "weight: it is missing in 8 of 40 rows"),
        (ROWS, {"test_fraction": 1.0}, "their sum below 1"),
        ("a,label\n1,0\n2,1\n", {}, "no row of class number 0 is left to train on"),
        ("a,label\n" + "1,0\n" * 9 + "1,1\n", {"test_fraction": 0.6}, "no row of class number 1"),
        ("a,label\n" + "1,0.5\n2,1\n" * 9, {}, "label: it holds fractions"),
        ("a,label\n" + "inf,0\n2,1\n" * 9, {}, "column a holds numbers too large"),
        ("a,label\n" + "".join(f"t{n},{n % 2}\n" for n in range(30)), {}, "different texts, more"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    write: Any, content: str | bytes, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((DataError, ConfigError)) as refused:
        read(write(content), **changes)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
