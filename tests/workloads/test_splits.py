"""Splitting of samples, encoding of tables, and the two tables that are read: the breast-cancer set and CSV files."""

import gzip
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.errors import AutotuneError, ConfigError, DataError
from autotune.workloads.breast_cancer import breast_cancer
from autotune.workloads.csv_table import csv_table
from autotune.workloads.splits import Splits, encoded, normalise, stratified_split, table_splits

TRAIN = np.arange(4)
"""The first four of six rows."""


def test_split_is_disjoint_whole_and_fixed() -> None:
    targets = torch.arange(100) % 7
    kept, held_out = stratified_split(targets, 30)
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(100))
    torch.manual_seed(99)
    again = stratified_split(targets, 30)
    assert torch.equal(kept, again[0])
    assert torch.equal(held_out, again[1])


def test_split_keeps_each_class_share() -> None:
    targets = torch.tensor([0] * 500 + [1] * 300 + [2] * 3)[torch.randperm(803, generator=torch.Generator().manual_seed(0))]
    _, held_out = stratified_split(targets, 80)
    counts = targets[held_out].bincount(minlength=3)
    assert counts.sum() == 80
    assert (counts - torch.tensor([500, 300, 3]) * 80 / 803).abs().max() < 1


def test_split_does_not_take_samples_in_file_order() -> None:
    _, held_out = stratified_split(torch.zeros(100, dtype=torch.int64), 10)
    assert len(set(held_out.diff().tolist())) > 1


@pytest.mark.parametrize("num_held_out", [-1, 5, 6])
def test_split_that_leaves_nothing_is_refused(num_held_out: int) -> None:
    with pytest.raises(ValueError, match="of 5 samples"):
        stratified_split(torch.zeros(5, dtype=torch.int64), num_held_out)


def test_split_of_nothing_held_out() -> None:
    kept, held_out = stratified_split(torch.zeros(5, dtype=torch.int64), 0)
    assert len(kept) == 5
    assert len(held_out) == 0


def test_normalise_goes_by_channel() -> None:
    images = torch.full((2, 2, 3, 3), 255, dtype=torch.uint8)
    images[:, 1] = 51
    inputs = normalise(images, (0.5, 0.2), (0.25, 1.0))
    assert inputs.dtype is torch.float32
    assert torch.allclose(inputs[:, 0], torch.tensor(2.0))
    assert torch.allclose(inputs[:, 1], torch.tensor(0.0))
    assert images[0, 0, 0, 0] == 255


def texts(*values: str) -> np.ndarray:
    return np.array(values, dtype=object)


# Columns.


def test_numbers_are_standardised_by_the_training_rows_alone() -> None:
    scaled = encoded(np.array([1.0, 3.0, 1.0, 3.0, 100.0, 2.0]), TRAIN, 0, "a")
    assert scaled.tolist() == [[-1.0], [1.0], [-1.0], [1.0], [98.0], [0.0]]


def test_a_column_that_is_constant_in_training_says_nothing() -> None:
    for constant in (0.1, 1e16):
        assert encoded(np.array([constant] * 4 + [7.0, 8.0]), TRAIN, 0, "a").tolist() == [[0.0]] * 6


def test_a_missing_number_is_the_mean_and_is_told() -> None:
    nan = np.nan
    features = encoded(np.array([1.0, nan, 3.0, 2.0, nan, 4.0]), TRAIN, 0, "a")
    assert features[:, 1].tolist() == [0, 1, 0, 0, 1, 0]
    assert features[[1, 4], 0].tolist() == [0.0, 0.0]
    assert abs(features[:4, 0].mean()) < 1e-12
    assert features[:4, 0].std() == pytest.approx(1.0)


def test_a_column_that_is_missing_in_training_is_only_told() -> None:
    nan = np.nan
    assert encoded(np.array([nan, nan, nan, nan, 5.0, nan]), TRAIN, 0, "a").tolist() == [[0, 1]] * 4 + [[0, 0], [0, 1]]


@pytest.mark.parametrize("values", [[1.0, 2.0, 1.0, 2.0, 1e60, 1.0], [1.0, 2.0, 1e300, 2.0, 1.0, 1.0]])
def test_numbers_that_float32_cannot_hold_are_refused(values: list[float]) -> None:
    with pytest.raises(DataError, match=r"^data: column a: holds numbers from 1 to 1e\+\d+, which float32 cannot hold"):
        encoded(np.array(values), TRAIN, 0, "a")


def test_a_text_is_one_of_those_that_the_training_rows_have() -> None:
    features = encoded(texts("red", "blue", "red", "", "green", "blue"), TRAIN, 3, "a")
    assert features.tolist() == [[0, 0, 1], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0], [0, 1, 0]], "in the order of '', blue, red"


def test_too_many_texts_are_refused() -> None:
    with pytest.raises(DataError, match=r"data: column city: holds 4 different texts such as 'a', accepted are up to .* = 3;"):
        encoded(texts("a", "b", "c", "d", "a", "a"), TRAIN, 3, "city")


# Rows.


def split(targets: list[int], **changes: Any) -> Splits:
    settings: dict[str, Any] = {"validation_fraction": 0.25, "test_fraction": 0.25, "max_categories": 0} | changes
    return table_splits({"row": np.arange(len(targets)) * 1.0}, np.array(targets), ["no", "yes"], **settings)


def test_rows_are_split_by_class_and_none_comes_twice() -> None:
    splits = split([0, 0, 0, 1] * 16)
    assert {name: targets.bincount().tolist() for name, (_, targets) in splits.items()} == {
        "train": [24, 8],
        "validation": [12, 4],
        "test": [12, 4],
    }
    rows = torch.cat([inputs for inputs, _ in splits.values()])
    assert len(rows.unique()) == 64


@pytest.mark.parametrize(
    ("targets", "changes", "error", "message"),
    [
        ([0, 1] * 5, {"test_fraction": 1.0}, ConfigError, r"data\.test_fraction: found 1\.0"),
        ([0, 1], {}, DataError, "data: found 2 rows, of which 1 for validation and 1 for test leave none to train on"),
        (
            [0] * 9 + [1],
            {"test_fraction": 0.8, "validation_fraction": 0.1},
            DataError,
            "data: class yes has 1 of 10 rows, and none is left",
        ),
    ],
)
def test_a_split_that_leaves_nothing_to_learn_from_is_refused(
    targets: list[int], changes: dict[str, Any], error: type[AutotuneError], message: str
) -> None:
    with pytest.raises(error, match=message):
        split(targets, **changes)


# The breast-cancer set.


def test_the_breast_cancer_set_is_split_by_class_and_standardised() -> None:
    splits = breast_cancer(validation_fraction=0.25, test_fraction=0.25)
    assert {name: tuple(inputs.shape) for name, (inputs, _) in splits.items()} == {
        "train": (285, 30),
        "validation": (142, 30),
        "test": (142, 30),
    }
    inputs, targets = splits["train"]
    assert inputs.dtype is torch.float32
    assert targets.dtype is torch.int64
    assert inputs.mean(dim=0).abs().max() < 1e-5
    assert (inputs.std(dim=0, correction=0) - 1).abs().max() < 1e-5
    for inputs, targets in splits.values():
        assert abs((targets == 0).float().mean() - 212 / 569) < 0.01
        assert inputs.mean(dim=0).abs().max() < 0.5
    assert sum(int((targets == 0).sum()) for _, targets in splits.values()) == 212


def test_the_breast_cancer_set_is_what_scikit_learn_reads() -> None:
    splits = breast_cancer(validation_fraction=0.25, test_fraction=0.25)
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/breast_cancer.csv", delimiter=",", skiprows=1)
    radius = torch.cat([inputs[:, 0] for inputs, _ in splits.values()]).double()
    assert np.corrcoef(np.sort(radius.numpy()), np.sort(table[:, 0]))[0, 1] == pytest.approx(1.0)


# CSV files.

ROWS = "size,colour,weight,label\n" + "".join(
    f"{n},{'red' if n % 3 else 'blue'},{n / 4 if n % 5 else '?'},{'ab'[n % 2]}\n" for n in range(40)
)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(content: str | bytes, name: str = "table.csv") -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


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
    assert {name: tuple(inputs.shape) for name, (inputs, _) in splits.items()} == {"train": (20, 5), "validation": (10, 5), "test": (10, 5)}
    assert classes_of(splits) == [20, 20]
    inputs = torch.cat([inputs for inputs, _ in splits.values()])
    size, blue, red, weight, is_missing = inputs.T
    assert abs(splits["train"][0][:, 0].mean()) < 1e-6
    assert len(size.unique()) == 40
    assert (blue + red).unique().tolist() == [1.0]
    assert blue.sum() == 14
    assert is_missing.sum() == 8
    assert weight[is_missing == 1].abs().max() < 1e-6


def test_columns_can_be_left_out(write: Any) -> None:
    assert read(write(ROWS), ignored_columns=["colour", "weight"])["train"][0].shape == (20, 1)


def test_delimiters_marks_and_compression_are_understood(write: Any) -> None:
    plain = read(write(ROWS))
    for path, changes in (
        (write(ROWS.replace(",", ";"), "semicolons.csv"), {"delimiter": ";"}),
        (write(b"\xef\xbb\xbf" + ROWS.replace("\n", "\r\n").encode(), "marked.csv"), {}),
        (write(gzip.compress(ROWS.encode()), "table.csv.gz"), {}),
    ):
        assert torch.equal(read(path, **changes)["train"][0], plain["train"][0])


@pytest.mark.parametrize(
    ("values", "counts"),
    [(("no", "yes"), [10, 30]), (("9", "10"), [10, 30]), (("false", "true"), [10, 30]), (("1.0", "2.0"), [10, 30]), (("b", "a"), [30, 10])],
)
def test_classes_are_counted_in_order(write: Any, values: tuple[str, str], counts: list[int]) -> None:
    content = "x,label\n" + "".join(f"{n},{values[n % 4 > 0]}\n" for n in range(40))
    assert classes_of(read(write(content))) == counts


def test_a_type_is_told_from_the_whole_file(write: Any) -> None:
    megabyte = "".join(f"{n % 3}.{'0' * 60},{n % 2}\n" for n in range(20_000))
    inputs, _ = read(write("x,label\n" + megabyte + "other,1\n"))["train"]
    assert inputs.unique().tolist() == [0, 1], "numbers are texts where one of them is"


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ("", {}, r"data\.path: .*table\.csv cannot be read: Empty CSV file; accepted is a UTF-8 CSV file"),
        ("a,label\n", {}, r"has no row after its first line"),
        ("a,label\n1,2\n1,2,3\n", {}, r"data\.path: .*table\.csv: row 3: found 3 values, accepted are 2, as in the first row"),
        ("a,a,label\n1,2,3\n", {}, r"has two columns 'a'"),
        (
            ROWS,
            {"target_column": "lable"},
            r"data\.target_column: there is no column lable \(did you mean label\?\); accepted are size, colour,",
        ),
        (ROWS, {"target_column": None}, r"data\.target_column: there is no column None; accepted are size"),
        (ROWS, {"ignored_columns": ["color"]}, r"data\.ignored_columns: there is no column color \(did you mean colour\?\)"),
        (ROWS, {"ignored_columns": ["size", "colour", "weight"]}, "has no column besides the target"),
        (
            ROWS,
            {"target_column": "size"},
            r"data\.target_column: size: holds 40 different values, accepted are 2 to data\.max_categories = 8",
        ),
        (ROWS, {"target_column": "weight"}, r"data\.target_column: weight: is missing in 8 of 40 rows"),
        (ROWS, {"delimiter": ";;"}, r"data\.delimiter: found ';;'"),
        (ROWS, {"max_categories": 1}, r"data\.max_categories: found 1"),
        ("a,label\n" + "1,0.5\n2,1\n" * 9, {}, r"data\.target_column: label: holds fractions such as 0\.5, accepted are classes"),
        ("a,label\n" + "1,0\n2,0\n" * 9, {}, r"label: holds 1 different values"),
        ("a,label\n" + "inf,0\n2,1\n" * 9, {}, r"data\.path: column a: holds infinity"),
        (
            "a,label\n" + "2020-01-01,0\n2020-01-02,1\n" * 9,
            {},
            r"column a: holds date32\[day\], accepted are numbers, true and false, and text",
        ),
        (b"a,label\n" + b"\xff,0\n2,1\n" * 9, {}, r"column a: holds text that is not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(write: Any, content: str | bytes, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, ConfigError), match=message) as refused:
        read(write(content), **changes)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path: .*nope\.csv is not there"):
        read(str(tmp_path / "nope.csv"))
    with pytest.raises(DataError, match="is no regular file"):
        read(str(tmp_path))
