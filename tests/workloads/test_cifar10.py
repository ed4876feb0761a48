import io
import os
import pickle
import pickletools
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.errors import DataError
from autotune.workloads.cifar10 import cifar10

NUM_RECORDS = 20
TRAIN_NAMES = [f"data_batch_{number}" for number in range(1, 6)]

Batches = dict[str, tuple[np.ndarray, np.ndarray]]


@pytest.fixture
def batches() -> Batches:
    """Images ``[20, 3072]`` whose first two bytes say where they are from, and labels, two of each class."""
    made = {}
    for number, name in enumerate([*TRAIN_NAMES, "test_batch"]):
        images = np.random.default_rng(number).integers(0, 256, (NUM_RECORDS, 3072), dtype=np.uint8)
        images[:, 0], images[:, 1] = number, np.arange(NUM_RECORDS)
        made[name] = images, (np.arange(NUM_RECORDS, dtype=np.uint8) * 3 + number) % 10
    return made


def as_python_2_pickle(value: object) -> bytes:
    """Pickle as Python 2 and its NumPy did, as the official files hold it: protocol 2, and bytes as its plain strings."""
    content = bytearray(pickle.dumps(value, protocol=3))
    python_2_code = {"SHORT_BINBYTES": b"U", "BINBYTES": b"T", "BINUNICODE": b"T"}
    for opcode, _, position in pickletools.genops(bytes(content)):
        if opcode.name in python_2_code and position is not None:
            content[position : position + 1] = python_2_code[opcode.name]
    content[1] = 2  # after the opcode for it, the protocol
    return bytes(content).replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def official_files(batches: Batches, form: str) -> dict[str, bytes]:
    if form == "bin":
        return {f"{name}.bin": np.hstack([labels[:, None], images]).tobytes() for name, (images, labels) in batches.items()}
    return {
        name: as_python_2_pickle(
            {b"batch_label": b"a batch", b"labels": labels.tolist(), b"data": images, b"filenames": [b"a.png"] * NUM_RECORDS}
        )
        for name, (images, labels) in batches.items()
    }


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_archive(path: Path, folder: str, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in [("readme.html", b"<html>"), *files.items()]:
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def in_folder(root: Path, form: str, files: dict[str, bytes]) -> Path:
    write_folder(root / f"cifar-10-batches-{form}", files)
    return root


def as_root(root: Path, form: str, files: dict[str, bytes]) -> Path:
    return in_folder(root, form, files) / f"cifar-10-batches-{form}"


def in_archive(root: Path, form: str, files: dict[str, bytes]) -> Path:
    name = {"bin": "binary", "py": "python"}[form]
    write_archive(root / f"cifar-10-{name}.tar.gz", f"cifar-10-batches-{form}", files)
    return root


def where_from(images: torch.Tensor) -> set[tuple[int, int]]:
    """The batch number and index that each image's first two bytes say."""
    first_bytes = ((images.flatten(1)[:, :2] * 0.2470 + 0.4914) * 255).round().int()
    return {(number, index) for number, index in first_bytes.tolist()}


@pytest.mark.parametrize("write", [in_folder, as_root, in_archive])
@pytest.mark.parametrize("form", ["bin", "py"])
def test_every_official_form_is_read_whole(
    tmp_path: Path, batches: Batches, form: str, write: Callable[[Path, str, dict[str, bytes]], Path]
) -> None:
    splits = cifar10(str(write(tmp_path, form, official_files(batches, form))), download=False)
    assert {name: tuple(inputs.shape) for name, (inputs, _) in splits.items()} == {
        "train": (90, 3, 32, 32),
        "validation": (10, 3, 32, 32),
        "test": (20, 3, 32, 32),
    }
    train, validation, test = (where_from(splits[name][0]) for name in ("train", "validation", "test"))
    assert not train & validation
    assert train | validation == {(number, index) for number in range(5) for index in range(NUM_RECORDS)}
    assert test == {(5, index) for index in range(NUM_RECORDS)}
    assert splits["validation"][1].bincount().tolist() == [1] * 10
    inputs, targets = splits["test"]
    assert inputs.dtype is torch.float32
    assert targets.dtype is torch.int64
    assert targets.tolist() == batches["test_batch"][1].tolist()
    expected = (batches["test_batch"][0].reshape(-1, 3, 32, 32)[:, 2] / 255 - 0.4465) / 0.2616
    assert np.allclose(inputs[:, 2].numpy(), expected, atol=1e-5)


def test_splits_are_the_same_in_every_form(tmp_path: Path, batches: Batches) -> None:
    first = cifar10(str(in_folder(tmp_path / "a", "bin", official_files(batches, "bin"))), download=False)
    torch.manual_seed(3)
    second = cifar10(str(in_folder(tmp_path / "b", "py", official_files(batches, "py"))), download=False)
    for name in first:
        assert torch.equal(first[name][0], second[name][0])
        assert torch.equal(first[name][1], second[name][1])


def refused(root: Path) -> str:
    """The one line that refuses what is under ``root``."""
    with pytest.raises(DataError) as raised:
        cifar10(str(root), download=False)
    message = str(raised.value)
    assert message.startswith("data.root: ")
    assert "\n" not in message
    return message


def test_nothing_there_says_what_is_accepted_and_how_to_fetch_it(tmp_path: Path) -> None:
    message = refused(tmp_path / "nowhere")
    assert "no CIFAR-10 under" in message
    assert "cifar-10-python.tar.gz" in message
    assert "data.download=true" in message


def test_missing_batch_is_named(tmp_path: Path, batches: Batches) -> None:
    files = official_files(batches, "bin")
    message = refused(in_folder(tmp_path, "bin", {"data_batch_1.bin": files["data_batch_1.bin"]}))
    assert "has data_batch_1.bin but no data_batch_2.bin" in message
    assert "test_batch.bin" in message


def test_whole_archive_beside_an_unfinished_folder_is_read(tmp_path: Path, batches: Batches) -> None:
    files = official_files(batches, "bin")
    in_folder(tmp_path, "bin", {"data_batch_1.bin": files["data_batch_1.bin"]})
    splits = cifar10(str(in_archive(tmp_path, "bin", files)), download=False)
    assert len(splits["train"][1]) == 90


@pytest.mark.parametrize("num_bytes", [0, 3073 * NUM_RECORDS - 1])
def test_truncated_binary_batch_is_refused(tmp_path: Path, batches: Batches, num_bytes: int) -> None:
    files = official_files(batches, "bin")
    files["data_batch_3.bin"] = files["data_batch_3.bin"][:num_bytes]
    assert f"data_batch_3.bin has {num_bytes} bytes" in refused(in_folder(tmp_path, "bin", files))


def test_label_out_of_range_is_refused(tmp_path: Path, batches: Batches) -> None:
    batches["data_batch_2"][1][4] = 10
    assert "data_batch_2.bin holds the label 10" in refused(in_folder(tmp_path / "a", "bin", official_files(batches, "bin")))
    assert "holds labels that are no class" in refused(in_folder(tmp_path / "b", "py", official_files(batches, "py")))


@pytest.mark.parametrize("kept_fraction", [0.0, 0.001, 0.5, 0.9])
def test_truncated_archive_is_refused(tmp_path: Path, batches: Batches, kept_fraction: float) -> None:
    path = in_archive(tmp_path, "bin", official_files(batches, "bin")) / "cifar-10-binary.tar.gz"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept_fraction)])
    assert "cifar-10-binary.tar.gz" in refused(tmp_path)


def test_archive_without_a_batch_is_refused(tmp_path: Path, batches: Batches) -> None:
    files = official_files(batches, "bin")
    del files["test_batch.bin"]
    assert "has no test_batch.bin" in refused(in_archive(tmp_path, "bin", files))


def test_links_in_an_archive_are_not_followed(tmp_path: Path, batches: Batches) -> None:
    files = official_files(batches, "bin")
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name in files:
            link = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(link)
    assert "has no data_batch_1.bin" in refused(tmp_path)


class RunsOnUnpickling:
    """What an attacker's file holds: unpickling it the usual way makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_malicious_pickle_is_refused_and_does_not_run(tmp_path: Path, batches: Batches) -> None:
    files = official_files(batches, "py")
    files["data_batch_4"] = pickle.dumps({b"data": RunsOnUnpickling(tmp_path / "ran"), b"labels": [1]}, protocol=2)
    message = refused(in_folder(tmp_path, "py", files))
    assert "data_batch_4" in message
    assert "only NumPy arrays are read" in message
    assert not (tmp_path / "ran").exists()
    pickle.loads(files["data_batch_4"])
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be unpickled"),
        (b"not a pickle at all", "cannot be unpickled"),
        (pickle.dumps([1, 2], protocol=2), "no pair of data and labels"),
        (as_python_2_pickle({b"data": np.zeros((2, 3072), np.uint8)}), "no pair of data and labels"),
        (as_python_2_pickle({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}), "for 1 labels"),
        (as_python_2_pickle({b"data": np.zeros((1, 3071), np.uint8), b"labels": [1]}), "3071 bytes of data"),
        (as_python_2_pickle({b"data": np.zeros((1, 3072)), b"labels": [1]}), "not of bytes"),
        (as_python_2_pickle({b"data": np.asfortranarray(np.zeros((2, 3072), np.uint8)), b"labels": [1, 1]}), "C order"),
    ],
)
def test_pickle_of_another_form_is_refused(tmp_path: Path, batches: Batches, content: bytes, message: str) -> None:
    files = official_files(batches, "py") | {"data_batch_1": content}
    assert message in refused(in_folder(tmp_path, "py", files))


def test_truncated_pickle_is_refused(tmp_path: Path, batches: Batches) -> None:
    files = official_files(batches, "py")
    files["test_batch"] = files["test_batch"][:1000]
    assert "test_batch cannot be unpickled" in refused(in_folder(tmp_path, "py", files))
