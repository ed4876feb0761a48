import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from autotune.errors import DataError
from autotune.workloads.fashion_mnist import fashion_mnist


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


def write(folder: Path, files: dict[str, bytes], *, zipped: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(
            gzip.compress(content) if zipped else content
        )
    return folder


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", [".", "fashion-mnist", "FashionMNIST/raw"])
def test_official_files_are_read_whole(
    tmp_path: Path, files: dict[str, bytes], place: str, zipped: bool
) -> None:
    write(tmp_path / place, files, zipped=zipped)
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


def refused(root: Path) -> str:
    """The one line that refuses what is under ``root``."""
    with pytest.raises(DataError) as raised:
        fashion_mnist(str(root), download=False)
    message = str(raised.value)
    assert message.startswith("data.root: ")
    assert "\n" not in message
    return message


def test_nothing_there_says_what_is_accepted_and_how_to_fetch_it(tmp_path: Path) -> None:
    message = refused(tmp_path)
    assert "no Fashion-MNIST under" in message
    assert "data.download=true" in message


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("train-images-idx3-ubyte", lambda content: content[:-1]),
        ("train-images-idx3-ubyte", lambda content: b""),
        ("train-images-idx3-ubyte", lambda content: idx(np.zeros((120, 28, 27)))),
        ("train-labels-idx1-ubyte", lambda content: idx(np.zeros(119))),
        ("train-labels-idx1-ubyte", lambda content: idx(np.full(120, 10))),
        ("train-labels-idx1-ubyte", lambda content: b"\0\0\x0d\x01" + content[4:]),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_file_is_refused(
    tmp_path: Path,
    files: dict[str, bytes],
    name: str,
    spoil: Callable[[bytes], bytes],
    zipped: bool,
) -> None:
    files[name] = spoil(files[name])
    assert name in refused(write(tmp_path, files, zipped=zipped))


def test_truncated_gzip_file_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    path = write(tmp_path, files) / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:100])
    assert "train-images-idx3-ubyte.gz cannot be read" in refused(tmp_path)
