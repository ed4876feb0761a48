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

from autotune.errors import ConfigError, DataError
from autotune.workloads import cifar10 as workload

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
        images = np.random.default_rng(number).integers(0, 256, (NUM_RECORDS, 3072), dtype=np.uint8)
        images[:, 0], images[:, 1] = number, np.arange(NUM_RECORDS)
        made[name] = images, (np.arange(NUM_RECORDS, dtype=np.uint8) * 3 + number) % 10
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
    return workload.cifar10(root=str(root), download=False, validation=validation, **settings)


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
    with pytest.raises(ConfigError, match=r"data\.validation: found 'tests', use held_out or test"):
        cifar10(root, validation="tests")


def refused(root: Path) -> str:
    """The one line that refuses what is under ``root``."""
    with pytest.raises(DataError) as raised:
        cifar10(root)
    message = str(raised.value)
    assert message.startswith("data.root: ")
    assert "\n" not in message
    return message


def test_nothing_there_says_what_is_accepted_and_how_to_fetch_it(tmp_path: Path) -> None:
    message = refused(tmp_path / "nowhere")
    assert "no CIFAR-10 under" in message
    assert "cifar-10-python.tar.gz" in message
    assert "data.download=true" in message


def test_whole_archive_beside_an_unfinished_folder_is_read(
    tmp_path: Path, batches: Batches
) -> None:
    files = official_files(batches, "bin")
    in_folder(tmp_path, "bin", {"data_batch_1.bin": files["data_batch_1.bin"]})
    splits = cifar10(in_archive(tmp_path, "bin", files))
    assert len(splits["train"][1]) == 90


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
    assert f"{name} is no batch of CIFAR-10" in refused(
        in_folder(tmp_path, form, official_files(batches, form) | {name: content})
    )


def test_a_damaged_archive_is_refused(tmp_path: Path, batches: Batches) -> None:
    files = official_files(batches, "bin")
    path = in_archive(tmp_path, "bin", files) / "cifar-10-binary.tar.gz"
    path.write_bytes(path.read_bytes()[:-10000])
    assert "cifar-10-binary.tar.gz" in refused(tmp_path)
    del files["test_batch.bin"]
    assert "has no test_batch.bin" in refused(in_archive(tmp_path, "bin", files))
