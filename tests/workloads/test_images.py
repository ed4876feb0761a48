"""Image data sets: the digits, and Fashion-MNIST and CIFAR-10 from their official files."""

import gzip
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.errors import ConfigError, DataError
from autotune.workloads import images
from autotune.workloads.images import digits, fashion_mnist


def sizes_of(splits: dict[str, Any]) -> dict[str, int]:
    return {name: len(splits[name][1]) for name in ("train", "validation", "test")}


def test_digits_are_split_by_class_and_standardised() -> None:
    splits = digits()
    assert sizes_of(splits) == {"train": 1197, "validation": 300, "test": 300}
    inputs, targets = splits["train"]
    assert inputs.shape == (1197, 1, 8, 8)
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert abs(inputs.mean().item()) < 1e-5
    assert abs(inputs.std().item() - 1) < 1e-5
    for _, targets in splits.values():
        assert targets.bincount().min() > 0.09 * len(targets)
    images = torch.cat([inputs for inputs, _ in splits.values()]).flatten(1)
    assert len({image.numpy().tobytes() for image in images}) == 1797, "no two images are alike"


def test_a_part_of_the_classes_is_relabelled_and_split_in_the_same_proportion() -> None:
    whole, part = digits(), digits(classes=[7, 5])
    num_samples = sum(int(((targets == 5) | (targets == 7)).sum()) for _, targets in whole.values())
    sizes = sizes_of(part)
    assert sum(sizes.values()) == num_samples
    assert sizes["validation"] == sizes["test"] == round(num_samples * 300 / 1797)
    for label, digit in ((0, 7), (1, 5)):
        means = [
            split[0][split[1] == number].mean(0).flatten()
            for split, number in ((part["train"], label), (whole["train"], digit))
        ]
        assert torch.corrcoef(torch.stack(means))[0, 1] > 0.95


def test_few_labels_are_some_of_the_training_samples_of_every_class() -> None:
    whole, few = digits(classes=[5, 6, 7, 8, 9]), digits(classes=[5, 6, 7, 8, 9], num_train=25)
    assert few["train"][1].bincount().tolist() == [5] * 5
    for name in ("validation", "test"):
        assert torch.equal(few[name][1], whole[name][1])
    assert abs(few["train"][0].mean()) < 1e-5
    assert len(digits(num_train=1197)["train"][1]) == 1197


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"classes": [1, 1]}, r"data\.classes: found \[1, 1\], use two or more different digits"),
        ({"classes": [1, 10]}, r"data\.classes: found \[1, 10\]"),
        ({"num_train": 2000}, r"data\.num_train: found 2000, use 1 to 1197"),
    ],
)
def test_parts_that_are_not_there_are_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        digits(**values)


# Fashion-MNIST.


def idx(array: np.ndarray) -> bytes:
    """The official form: magic number, dimensions, data."""
    header = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def files() -> dict[str, bytes]:
    """The four files with 120 and 20 images, each image's pixels all its own index."""
    made = {}
    for stem, num_samples in (("train", 120), ("t10k", 20)):
        index = np.arange(num_samples)
        made[f"{stem}-images-idx3-ubyte"] = idx(
            np.broadcast_to(index[:, None, None], (num_samples, 28, 28))
        )
        made[f"{stem}-labels-idx1-ubyte"] = idx(index % 10)
    return made


def write_idx(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    return folder


@pytest.mark.parametrize("place", [".", "fashion-mnist", "FashionMNIST/raw"])
def test_fashion_mnists_files_are_read_whole(
    tmp_path: Path, files: dict[str, bytes], place: str
) -> None:
    write_idx(tmp_path / place, files)
    splits = fashion_mnist(str(tmp_path), download=False)
    assert sizes_of(splits) == {"train": 110, "validation": 10, "test": 20}
    found = {}
    for name, (inputs, targets) in splits.items():
        assert inputs.shape[1:] == (1, 28, 28)
        assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
        found[name] = ((inputs * 0.3530 + 0.2860) * 255).round().int()[:, 0, 5, 7]
        assert torch.equal(targets, found[name] % 10)
    assert sorted([*found["train"].tolist(), *found["validation"].tolist()]) == list(range(120))
    assert splits["validation"][1].bincount().tolist() == [1] * 10


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[:-1],
        lambda content: b"",
        lambda content: b"\0\0\x0d\x03" + content[4:],
    ],
)
def test_a_damaged_idx_file_is_named(
    tmp_path: Path, files: dict[str, bytes], spoil: Callable[[bytes], bytes]
) -> None:
    name = "train-images-idx3-ubyte"
    files[name] = spoil(files[name])
    with pytest.raises(DataError, match=f"{name}.gz cannot be read"):
        fashion_mnist(str(write_idx(tmp_path, files)), download=False)


# CIFAR-10.

Batches = dict[str, bytes]


@pytest.fixture(params=["bin", "py"])
def batches(request: pytest.FixtureRequest) -> Batches:
    """The official files with 20 records each, two of each class, whose first two pixels say where
    they are from.
    """
    made = {}
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 3072), dtype=np.uint8)
        pixels[:, 0], pixels[:, 1] = number, np.arange(20)
        labels = np.arange(20, dtype=np.uint8) % 10
        if request.param == "bin":
            made[f"{name}.bin"] = np.hstack([labels[:, None], pixels]).tobytes()
        else:
            content = {b"labels": labels.tolist(), b"data": pixels, b"filenames": [b"a.png"] * 20}
            made[name] = pickle.dumps(content, protocol=3)
    return made


def is_binary(batches: Batches) -> bool:
    return "test_batch.bin" in batches


def write_folder(root: Path, batches: Batches) -> None:
    folder = root / f"cifar-10-batches-{'bin' if is_binary(batches) else 'py'}"
    folder.mkdir()
    for name, content in batches.items():
        (folder / name).write_bytes(content)


def write_archive(root: Path, batches: Batches) -> Path:
    path = root / f"cifar-10-{'binary' if is_binary(batches) else 'python'}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in [("readme.html", b"<html>"), *batches.items()]:
            member = tarfile.TarInfo(f"folder/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def cifar10(root: Path, **settings: Any) -> dict[str, Any]:
    return images.cifar10(root=str(root), download=False, **settings)


def places(inputs: torch.Tensor) -> set[tuple[int, int]]:
    """The batch and index that each image's first two pixels say."""
    return {(batch, index) for batch, index in inputs.flatten(1)[:, :2].tolist()}


@pytest.mark.parametrize("write", [write_folder, write_archive])
def test_every_official_form_is_read_whole(
    tmp_path: Path, batches: Batches, write: Callable[[Path, Batches], Any]
) -> None:
    write(tmp_path, batches)
    splits = cifar10(tmp_path)
    found = {name: places(splits[name][0]) for name in ("train", "validation", "test")}
    assert sizes_of(splits) == {"train": 90, "validation": 10, "test": 20}
    trained = {(batch, index) for batch in range(5) for index in range(20)}
    assert found["train"] | found["validation"] == trained
    assert found["test"] == {(5, index) for index in range(20)}
    assert splits["validation"][1].bincount().tolist() == [1] * 10
    inputs, targets = splits["test"]
    assert inputs.dtype is torch.uint8
    assert targets.tolist() == inputs[:, 0, 0, 1].remainder(10).tolist()
    expected = (inputs[:, 2].numpy() / 255 - 0.4465) / 0.2616
    assert np.allclose(splits["transform"](inputs)[:, 2].numpy(), expected, atol=1e-5)


def test_by_the_records_protocol_the_test_images_are_scored_and_parts_have_each_class_in_its_share(
    tmp_path: Path, batches: Batches
) -> None:
    write_folder(tmp_path, batches)
    splits = cifar10(tmp_path, validation="test", num_train=30, num_validation=10)
    assert sorted(splits) == ["train", "transform", "validation"]
    assert splits["train"][1].bincount().tolist() == [3] * 10
    assert places(splits["validation"][0]) <= {(5, index) for index in range(20)}
    with pytest.raises(DataError, match=r"data\.num_train: found 91, use 1 to 90"):
        cifar10(tmp_path, num_train=91)
    with pytest.raises(ConfigError, match=r"data\.validation: found 'tests', use one of held_out"):
        cifar10(tmp_path, validation="tests")


@pytest.mark.parametrize("read", [cifar10, lambda root: fashion_mnist(str(root), download=False)])
def test_what_is_not_there_can_be_downloaded(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    with pytest.raises(DataError, match=r"data\.root: no .* under .*data\.download=true"):
        read(tmp_path)


class RunsOnUnpickling:
    """What an attacker's file holds: unpickling it the usual way makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_damaged_or_malicious_batch_is_refused_and_does_not_run(
    tmp_path: Path, batches: Batches
) -> None:
    name = list(batches)[3]
    harmful = {b"data": RunsOnUnpickling(tmp_path / "ran"), b"labels": [1]}
    for content in (b"", batches[name][:-1], pickle.dumps(harmful), pickle.dumps([1, 2])):
        write_archive(tmp_path, batches | {name: content})
        with pytest.raises(DataError, match=f"{name} cannot be read") as refused:
            cifar10(tmp_path)
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_archive_is_refused(tmp_path: Path, batches: Batches) -> None:
    path = write_archive(tmp_path, batches)
    path.write_bytes(path.read_bytes()[:-10000])
    with pytest.raises(DataError, match=f"{path.name} cannot be read"):
        cifar10(tmp_path)
    del batches[min(batches)]
    write_archive(tmp_path, batches)
    with pytest.raises(DataError, match="it has the batches"):
        cifar10(tmp_path)
