"""Data sets at URLs: the same samples as from a path, and no more is fetched than is read."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from autotune.errors import DataError
from autotune.workloads.cifar10 import cifar10
from autotune.workloads.csv_table import csv_table
from autotune.workloads.fashion_mnist import fashion_mnist
from autotune.workloads.memory_mapped import memory_mapped
from autotune.workloads.text import text
from tests.support.served import Server
from tests.workloads import test_cifar10, test_fashion_mnist, test_memory_mapped

batches, files = test_cifar10.batches, test_fashion_mnist.files

CSV = "\n".join(["size,colour,kind", *(f"{number % 7},{'red' if number % 3 else 'blue'},{number % 2}" for number in range(40))])


def load_text(root: str) -> Any:
    return text(root=root, length=8, max_characters=300, validation_fraction=0.2, test_fraction=0.2, min_count=1)


def load_csv(root: str) -> Any:
    settings = {"target_column": "kind", "ignored_columns": (), "delimiter": ",", "max_categories": 8}
    return csv_table(path=f"{root}/table.csv.gz", validation_fraction=0.2, test_fraction=0.2, **settings)  # type: ignore[arg-type]


@pytest.fixture
def data_sets(tmp_path: Path, batches: test_cifar10.Batches, files: dict[str, bytes]) -> dict[str, tuple[Path, Callable[[str], Any]]]:
    """By name, a folder of this machine and what loads it; each folder has a file that no loader reads."""
    made: dict[str, tuple[Path, Callable[[str], Any]]] = {}
    for form in ("bin", "py"):
        root = test_cifar10.in_folder(tmp_path / f"cifar-{form}", form, test_cifar10.official_files(batches, form))
        made[f"cifar10, folder, {form}"] = root, lambda root: cifar10(root, download=False)
    (tmp_path / "archive").mkdir()
    root = test_cifar10.in_archive(tmp_path / "archive", "bin", test_cifar10.official_files(batches, "bin"))
    made["cifar10, archive"] = root, lambda root: cifar10(root, download=False)
    for place in (".", "FashionMNIST/raw"):
        root = tmp_path / f"fashion-{len(made)}"
        test_fashion_mnist.write(root / place, files)
        made[f"fashion_mnist, {place}"] = root, lambda root: fashion_mnist(root, download=False)
    (tmp_path / "mapped").mkdir()
    made["memory_mapped"] = (
        test_memory_mapped.write(tmp_path / "mapped"),
        lambda root: memory_mapped(root=root, scale=255, mean=None, std=None),
    )
    (tmp_path / "texts").mkdir()
    for name in ("b", "a", "z"):
        (tmp_path / "texts" / f"{name}.txt").write_text("abcd" * 40)
    made["text"] = tmp_path / "texts", load_text
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "table.csv.gz").write_bytes(gzip.compress(CSV.encode()))
    made["csv"] = tmp_path / "csv", load_csv
    for root, _ in made.values():
        (root / "unrelated.bin").write_bytes(b"much")
    return made


NAMES = (
    "cifar10, folder, bin", "cifar10, folder, py", "cifar10, archive", "fashion_mnist, .", "fashion_mnist, FashionMNIST/raw",
    "memory_mapped", "text", "csv",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_data_set_is_the_same_from_a_path_and_from_urls(
    name: str, data_sets: dict[str, tuple[Path, Callable[[str], Any]]], memory: str, cache: Path
) -> None:
    folder, load = data_sets[name]
    fsspec.filesystem("memory").put(str(folder), memory, recursive=True)
    at_path, at_file_url, at_url = load(str(folder)), load(f"file://{folder}"), load(memory)
    for split in ("train", "validation", *(["test"] if "test" in at_path else [])):
        for one, other, third in zip(at_path[split], at_file_url[split], at_url[split], strict=True):
            assert np.array_equal(np.asarray(one), np.asarray(other))
            assert np.array_equal(np.asarray(one), np.asarray(third))
    kept = {path.name for path in cache.rglob("*") if path.is_file() and not path.name.startswith(".")}
    read = {path.name for path in folder.rglob("*") if path.is_file()} - {"unrelated.bin"}
    assert kept == (read if name != "text" else {"a.txt", "b.txt"}), "the third text is past data.max_characters"


def test_mapped_data_stays_in_the_file_that_was_fetched(
    data_sets: dict[str, tuple[Path, Callable[[str], Any]]], memory: str, cache: Path
) -> None:
    folder, load = data_sets["memory_mapped"]
    fsspec.filesystem("memory").put(str(folder), memory, recursive=True)
    inputs = load(memory)["train"][0]
    assert isinstance(inputs, np.memmap)
    assert Path(str(inputs.filename)).is_relative_to(cache)


def test_a_web_server_need_not_list_its_files(data_sets: dict[str, tuple[Path, Callable[[str], Any]]], server: Server, cache: Path) -> None:
    folder, load = data_sets["cifar10, archive"]
    (server.folder / "cifar-10-binary.tar.gz").write_bytes((folder / "cifar-10-binary.tar.gz").read_bytes())
    assert torch.equal(load(server.url)["train"][0], load(str(folder))["train"][0])
    assert not [each for each in server.asked if each.split()[1] == "/"]


def test_a_text_may_be_one_file(memory: str, cache: Path) -> None:
    fsspec.filesystem("memory").pipe(f"{memory}/a", b"abcd" * 50)
    assert load_text(f"{memory}/a")["train"][0].shape[1] == 8


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda root: cifar10(root, download=True), r"data\.root: no CIFAR-10 under memory://.* \(accepted: .*python\.tar\.gz\)$"),
        (lambda root: fashion_mnist(root, download=True), r"data\.root: no Fashion-MNIST under memory://"),
        (
            lambda root: memory_mapped(root=root, scale=1, mean=None, std=None),
            r"data\.root: memory://.*/train_inputs\.npy: there is no such",
        ),
        (load_text, r"data\.root: memory://.*: there is no such file or folder$"),
        (load_csv, r"data\.path: memory://.*/table\.csv\.gz: there is no such file or folder$"),
    ],
)
def test_what_is_not_there_is_one_line(load: Callable[[str], Any], message: str, memory: str, cache: Path) -> None:
    with pytest.raises(DataError, match=f"^{message}") as raised:
        load(memory)
    assert "\n" not in str(raised.value)


def test_a_folder_without_texts_is_one_line(memory: str, cache: Path) -> None:
    fsspec.filesystem("memory").pipe(f"{memory}/a.md", b"abcd")
    with pytest.raises(DataError, match=r"^data\.root: memory://.* has no \.txt file; accepted is a UTF-8 text file"):
        load_text(memory)


def test_an_unfinished_folder_is_told_as_of_a_path(
    data_sets: dict[str, tuple[Path, Callable[[str], Any]]], memory: str, cache: Path
) -> None:
    folder, load = data_sets["cifar10, folder, bin"]
    fsspec.filesystem("memory").put(str(folder), memory, recursive=True)
    fsspec.filesystem("memory").rm_file(f"{memory}/cifar-10-batches-bin/data_batch_3.bin")
    with pytest.raises(DataError, match=r"memory://.*/cifar-10-batches-bin has data_batch_1\.bin, .* but no data_batch_3\.bin"):
        load(memory)
