"""Fashion-MNIST, read from its four official idx files.

MNIST's files have the same names, so a download goes into a folder of its own.
"""

import gzip
import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from autotune.errors import DataError
from autotune.remote import download_files, fetched, is_file, is_remote
from autotune.workloads.splits import Splits, Standardise, stratified_split

_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
CHECKSUMS = {
    f"{_URL}train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    f"{_URL}train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    f"{_URL}t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    f"{_URL}t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
NAMES = tuple(url.rpartition("/")[2].removesuffix(".gz") for url in CHECKSUMS)
FOLDERS = ("fashion-mnist", "FashionMNIST/raw", ".")
MEAN, STD = (0.2860,), (0.3530,)
NUM_CLASSES = 10


def fashion_mnist(root: str, download: bool) -> Splits:
    """The 60,000 training images as 55,000 train and 5,000 validation samples, and the official
    10,000 test images as test.

    Inputs are float32 ``[samples, 1, 28, 28]``, normalised by the training images' mean and
    deviation; targets are int64 ``[samples]``, 0 to 9. Smaller files of the same format are split
    in the same proportion.

    Args:
        root: folder with the files, or its URL.
        download: whether to download missing files.

    Raises:
        DataError: a file is missing, damaged or not in the idx format, or a download that was asked
            for fails.
    """
    images, targets, test_images, test_targets = _locations(root, download)
    train, test = _read_pair(images, targets), _read_pair(test_images, test_targets)
    normalise = Standardise(MEAN, STD)
    kept, held_out = stratified_split(train[1], max(1, len(train[1]) // 12))
    return {
        "train": (normalise(train[0][kept]), train[1][kept]),
        "validation": (normalise(train[0][held_out]), train[1][held_out]),
        "test": (normalise(test[0]), test[1]),
    }


def _locations(root: str, download: bool) -> list[str]:
    """Paths or URLs of the four files.

    They are downloaded first if they are in no folder and ``download`` is true.
    """
    for folder in FOLDERS:
        named = ((f"{root}/{folder}/{name}", f"{root}/{folder}/{name}.gz") for name in NAMES)
        found = [
            next((place for place in places if is_file(place, "data.root")), None)
            for places in named
        ]
        if None not in found:
            return [place for place in found if place is not None]
    absent = (
        f"data.root: no Fashion-MNIST under '{root}': its four idx files, gzipped or not, in"
        f" {', '.join(FOLDERS)}"
    )
    if is_remote(root) or not download:
        raise DataError(f"{absent}; data.download=true fetches it to a folder of this machine")
    own = fetched(f"{root}/{FOLDERS[0]}", "data.root")
    download_files(CHECKSUMS, own, absent)
    return [str(own / f"{name}.gz") for name in NAMES]


def _read_pair(images_file: str, targets_file: str) -> tuple[Tensor, Tensor]:
    """Read images as bytes ``[samples, 1, 28, 28]`` and their targets as int64 ``[samples]``."""
    images, targets = _read_idx(images_file, 3), _read_idx(targets_file, 1)
    if (
        images.shape[1:] != (28, 28)
        or len(images) != len(targets)
        or len(images) < 2
        or targets.max() >= NUM_CLASSES
    ):
        raise DataError(
            f"data.root: {images_file} and {targets_file} are not images of 28x28 pixels and their"
            " classes"
        )
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(targets).to(torch.int64)


def _read_idx(
    location: str, num_dimensions: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Read one idx file as an array of bytes in the shape that its header gives.

    Source: the idx format as http://yann.lecun.com/exdb/mnist describes it: two zeros, 8 for
    unsigned bytes, the number of dimensions, each dimension as a big-endian int32, the data.
    """
    path = fetched(location, "data.root")
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
        if not content.startswith(bytes((0, 0, 8, num_dimensions))):
            raise ValueError(
                f"it begins with {content[:4].hex()}, which is no idx file of {num_dimensions}"
                " dimensions"
            )
        shape = struct.unpack_from(f">{num_dimensions}I", content, 4)
        return np.frombuffer(bytearray(content[4 + 4 * num_dimensions :]), dtype=np.uint8).reshape(
            shape
        )
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise DataError(f"data.root: {path} cannot be read: {error}") from error
