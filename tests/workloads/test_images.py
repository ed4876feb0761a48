"""Image data sets: the digits, and Fashion-MNIST and CIFAR-10 from their official files."""

import gzip
import io
import os
import pickle
import pickletools
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


def test_digits_are_split_by_class_and_standardised() -> None:
    splits = digits()
    assert {name: tuple(inputs.shape) for name, (inputs, _) in splits.items()} == {
        "train": (1197, 1, 8, 8),
        "validation": (300, 1, 8, 8),
        "test": (300, 1, 8, 8),
    }
    inputs, targets = splits["train"]
    assert inputs.dtype is torch.float32
    assert targets.dtype is torch.int64
    assert abs(inputs.mean().item()) < 1e-5
    assert abs(inputs.std().item() - 1) < 1e-5
    for _, targets in splits.values():
        assert targets.bincount().min() > 0.09 * len(targets)


def test_no_digit_is_in_two_splits() -> None:
    images = torch.cat([inputs for inputs, _ in digits().values()]).flatten(1)
    # no two of the 1,797 images are alike
    assert len({image.numpy().tobytes() for image in images}) == 1797


def test_a_part_of_the_classes_is_relabelled_and_split_in_the_same_proportion() -> None:
    whole, part = digits(), digits(classes=[7, 5])
    num_samples = sum(int(((targets == 5) | (targets == 7)).sum()) for _, targets in whole.values())
    sizes = {name: len(targets) for name, (_, targets) in part.items()}
    assert sum(sizes.values()) == num_samples
    assert sizes["validation"] == sizes["test"] == round(num_samples * 300 / 1797)
    mean_of = {label: part["train"][0][part["train"][1] == label].mean(0) for label in (0, 1)}
    for label, digit in ((0, 7), (1, 5)):
        images = whole["train"][0][whole["train"][1] == digit].mean(0)
        assert (
            torch.corrcoef(torch.stack([images.flatten(), mean_of[label].flatten()]))[0, 1] > 0.95
        )


def test_few_labels_are_some_of_the_training_samples_of_every_class() -> None:
    whole, few = digits(classes=[5, 6, 7, 8, 9]), digits(classes=[5, 6, 7, 8, 9], num_train=25)
    assert few["train"][1].bincount().tolist() == [5] * 5
    for name in ("validation", "test"):
        assert torch.equal(few[name][1], whole[name][1])
    std, mean = torch.std_mean(few["train"][0])
    assert abs(mean) < 1e-5
    assert abs(std - 1) < 1e-5
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


def idx(array: np.ndarray, magic: int | None = None) -> bytes:
    """The official form: magic number, dimensions, data."""
    header = struct.pack(
        f">{1 + array.ndim}I", 0x800 + array.ndim if magic is None else magic, *array.shape
    )
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


def write_idx(folder: Path, files: dict[str, bytes], *, zipped: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(
            gzip.compress(content) if zipped else content
        )
    return folder


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", [".", "fashion-mnist", "FashionMNIST/raw"])
def test_fashion_mnists_files_are_read_whole(
    tmp_path: Path, files: dict[str, bytes], place: str, zipped: bool
) -> None:
    write_idx(tmp_path / place, files, zipped=zipped)
    splits = fashion_mnist(str(tmp_path), download=False)
    assert {name: tuple(inputs.shape) for name, (inputs, _) in splits.items()} == {
        "train": (110, 1, 28, 28),
        "validation": (10, 1, 28, 28),
        "test": (20, 1, 28, 28),
    }
    pixels = {
        name: ((inputs * 0.3530 + 0.2860) * 255).round().int()
        for name, (inputs, _) in splits.items()
    }
    assert sorted(
        [*pixels["train"][:, 0, 0, 0].tolist(), *pixels["validation"][:, 0, 5, 7].tolist()]
    ) == list(range(120))
    assert splits["validation"][1].bincount().tolist() == [1] * 10
    for name, (inputs, targets) in splits.items():
        assert inputs.dtype is torch.float32
        assert targets.dtype is torch.int64
        assert torch.equal(targets, pixels[name][:, 0, 0, 0] % 10)


def test_fashion_mnist_that_is_not_there_can_be_downloaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no Fashion-MNIST under .*data\.download=true"):
        fashion_mnist(str(tmp_path), download=False)


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


NUM_RECORDS = 20
TRAIN_NAMES = [f"data_batch_{number}" for number in range(1, 6)]

Batches = dict[str, tuple[np.ndarray, np.ndarray]]


@pytest.fixture
def batches() -> Batches:
    """Images ``[20, 3072]`` whose first two bytes say where they are from, and labels, two of
    each class.
    """
    made = {}
    for number, name in enumerate([*TRAIN_NAMES, "test_batch"]):
        pixels = np.random.default_rng(number).integers(0, 256, (NUM_RECORDS, 3072), dtype=np.uint8)
        pixels[:, 0], pixels[:, 1] = number, np.arange(NUM_RECORDS)
        made[name] = pixels, (np.arange(NUM_RECORDS, dtype=np.uint8) * 3 + number) % 10
    return made


def as_python_2_pickle(value: object) -> bytes:
    """Pickle as Python 2 and its NumPy did, as the official files hold it: protocol 2, and bytes
    as its plain strings.
    """
    content = bytearray(pickle.dumps(value, protocol=3))
    python_2_code = {"SHORT_BINBYTES": b"U", "BINBYTES": b"T", "BINUNICODE": b"T"}
    for opcode, _, position in pickletools.genops(bytes(content)):
        if opcode.name in python_2_code and position is not None:
            content[position : position + 1] = python_2_code[opcode.name]
    content[1] = 2  # after the opcode for it, the protocol
    return bytes(content).replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def official_files(batches: Batches, form: str) -> dict[str, bytes]:
    if form == "bin":
        return {
            f"{name}.bin": np.hstack([labels[:, None], images]).tobytes()
            for name, (images, labels) in batches.items()
        }
    return {
        name: as_python_2_pickle(
            {
                b"batch_label": b"a batch",
                b"labels": labels.tolist(),
                b"data": images,
                b"filenames": [b"a.png"] * NUM_RECORDS,
            }
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


def cifar10(root: Path, *, validation: str = "held_out", **settings: Any) -> dict[str, Any]:
    return images.cifar10(root=str(root), download=False, validation=validation, **settings)


def where_from(images: torch.Tensor) -> set[tuple[int, int]]:
    """The batch number and index that each image's first two bytes say."""
    return {(number, index) for number, index in images.flatten(1)[:, :2].tolist()}


@pytest.mark.parametrize("write", [in_folder, as_root, in_archive])
@pytest.mark.parametrize("form", ["bin", "py"])
def test_every_official_form_is_read_whole(
    tmp_path: Path,
    batches: Batches,
    form: str,
    write: Callable[[Path, str, dict[str, bytes]], Path],
) -> None:
    splits = cifar10(write(tmp_path, form, official_files(batches, form)))
    transform = splits.pop("transform")
    assert {name: tuple(inputs.shape) for name, (inputs, _) in splits.items()} == {
        "train": (90, 3, 32, 32),
        "validation": (10, 3, 32, 32),
        "test": (20, 3, 32, 32),
    }
    train, validation, test = (
        where_from(splits[name][0]) for name in ("train", "validation", "test")
    )
    assert not train & validation
    assert train | validation == {
        (number, index) for number in range(5) for index in range(NUM_RECORDS)
    }
    assert test == {(5, index) for index in range(NUM_RECORDS)}
    assert splits["validation"][1].bincount().tolist() == [1] * 10
    inputs, targets = splits["test"]
    assert inputs.dtype is torch.uint8
    assert targets.dtype is torch.int64
    assert targets.tolist() == batches["test_batch"][1].tolist()
    expected = (batches["test_batch"][0].reshape(-1, 3, 32, 32)[:, 2] / 255 - 0.4465) / 0.2616
    assert np.allclose(transform(inputs)[:, 2].numpy(), expected, atol=1e-5)


def test_by_the_records_protocol_all_training_images_are_trained_on_and_the_test_images_scored(
    tmp_path: Path, batches: Batches
) -> None:
    splits = cifar10(in_folder(tmp_path, "bin", official_files(batches, "bin")), validation="test")
    assert sorted(splits) == ["train", "transform", "validation"]
    assert where_from(splits["train"][0]) == {
        (number, index) for number in range(5) for index in range(NUM_RECORDS)
    }
    assert splits["validation"][1].tolist() == batches["test_batch"][1].tolist()


@pytest.mark.parametrize("validation", ["held_out", "test"])
def test_a_part_of_the_samples_has_each_class_in_its_share(
    tmp_path: Path, batches: Batches, validation: str
) -> None:
    root = in_folder(tmp_path, "bin", official_files(batches, "bin"))
    whole = cifar10(root, validation=validation)
    part = cifar10(root, validation=validation, num_train=30, num_validation=10)
    for name, count in (("train", 3), ("validation", 1)):
        assert part[name][1].bincount().tolist() == [count] * 10
        assert where_from(part[name][0]) <= where_from(whole[name][0])
    if validation == "held_out":
        assert torch.equal(part["test"][0], whole["test"][0])


def test_what_is_no_part_of_the_samples_is_refused(tmp_path: Path, batches: Batches) -> None:
    root = in_folder(tmp_path, "bin", official_files(batches, "bin"))
    for settings, message in (
        ({"num_train": 91}, "data.num_train: found 91, use 1 to 90"),
        ({"num_validation": 0}, "data.num_validation: found 0, use 1 to 10"),
    ):
        with pytest.raises(DataError, match=message):
            cifar10(root, **settings)
    with pytest.raises(
        ConfigError, match=r"data\.validation: found 'tests', use one of held_out, test"
    ):
        cifar10(root, validation="tests")


def refused(root: Path) -> str:
    """The one line that refuses what is under ``root``."""
    with pytest.raises(DataError) as raised:
        cifar10(root)
    message = str(raised.value)
    assert message.startswith("data")
    assert "\n" not in message
    return message


def test_no_cifar10_says_what_is_accepted_and_how_to_fetch_it(tmp_path: Path) -> None:
    message = refused(tmp_path / "nowhere")
    assert "no CIFAR-10 under" in message
    assert "data.download=true" in message


class RunsOnUnpickling:
    """What an attacker's file holds: unpickling it the usual way makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_malicious_pickle_is_refused_and_does_not_run(tmp_path: Path, batches: Batches) -> None:
    files = official_files(batches, "py")
    files["data_batch_4"] = pickle.dumps(
        {b"data": RunsOnUnpickling(tmp_path / "ran"), b"labels": [1]}, protocol=2
    )
    message = refused(in_folder(tmp_path, "py", files))
    assert "data_batch_4" in message
    assert "only NumPy arrays are read" in message
    assert not (tmp_path / "ran").exists()
    pickle.loads(files["data_batch_4"])
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("form", "content"),
    [
        ("bin", b""),
        ("bin", bytes(3073 * NUM_RECORDS - 1)),
        ("bin", b"\x0a" + bytes(3072)),
        ("py", b"not a pickle at all"),
        ("py", pickle.dumps([1, 2], protocol=2)),
        ("py", as_python_2_pickle({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]})),
        ("py", as_python_2_pickle({b"data": np.zeros((1, 3072)), b"labels": [1]})),
    ],
)
def test_a_damaged_batch_is_refused(
    tmp_path: Path, batches: Batches, form: str, content: bytes
) -> None:
    name = "data_batch_3.bin" if form == "bin" else "data_batch_3"
    assert f"{name} cannot be read" in refused(
        in_folder(tmp_path, form, official_files(batches, form) | {name: content})
    )


def test_a_damaged_archive_is_refused(tmp_path: Path, batches: Batches) -> None:
    files = official_files(batches, "bin")
    path = in_archive(tmp_path, "bin", files) / "cifar-10-binary.tar.gz"
    path.write_bytes(path.read_bytes()[:-10000])
    assert "cifar-10-binary.tar.gz" in refused(tmp_path)
    del files["test_batch.bin"]
    assert "data_batch_5.bin'] only" in refused(in_archive(tmp_path, "bin", files))
