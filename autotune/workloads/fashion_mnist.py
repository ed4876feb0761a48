"""Fashion-MNIST, read from its four official idx files.

MNIST's files have the same names, so a download goes into a folder of its own.
"""

import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from autotune.download import RemoteDataSet, RemoteFile, obtain
from autotune.errors import DataError
from autotune.remote.cache import fetched
from autotune.remote.path import RemotePath, located
from autotune.workloads.limits import MAX_BYTES, check_size, limited_reader
from autotune.workloads.splits import Splits, image_splits

_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_FILES = (
    RemoteFile(url=_URL + "train-images-idx3-ubyte.gz", md5="8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    RemoteFile(url=_URL + "train-labels-idx1-ubyte.gz", md5="25c81989df183df01b3e8a0aad5dffbe"),
    RemoteFile(url=_URL + "t10k-images-idx3-ubyte.gz", md5="bef4ecab320f06d8554ea6380940ec79"),
    RemoteFile(url=_URL + "t10k-labels-idx1-ubyte.gz", md5="bb300cfdad3c16e7a12a480ee83cd310"),
)
FOLDERS = ("fashion-mnist", "FashionMNIST/raw", ".")
NAMES = tuple(file.name.removesuffix(".gz") for file in _FILES)
REMOTE = RemoteDataSet(
    name="Fashion-MNIST",
    files=_FILES,
    accepted="the four official idx files, gzipped or not, there or in fashion-mnist/ or FashionMNIST/raw/",
)
MEAN, STD = (0.2860,), (0.3530,)
NUM_CLASSES = 10
IMAGE_SHAPE = (28, 28)


def fashion_mnist(root: str, download: bool, *, max_bytes: int = MAX_BYTES) -> Splits:
    """The 60,000 training images as 55,000 train and 5,000 validation samples, and the official 10,000 test images as test.

    Inputs are float32 ``[samples, 1, 28, 28]``, normalised by the training images' mean and deviation; targets are int64
    ``[samples]``, 0 to 9. Smaller files of the same format are split in the same proportion.

    Args:
        root: folder with the files, or its URL.
        download: whether to download missing files.
        max_bytes: limit in bytes on what one file opens to.

    Raises:
        DataError: a file is missing, damaged, too large or not in the idx format, or a download that was asked for fails.
    """
    folder = located(root, "data.root")
    paths = _find(folder)
    if paths is None:
        if isinstance(folder, RemotePath):
            raise folder.lacks(REMOTE.name, REMOTE.accepted)
        obtain(REMOTE, folder / FOLDERS[0], root=folder, download=download)
        paths = {name: folder / FOLDERS[0] / f"{name}.gz" for name in NAMES}
    files = {name: fetched(path) for name, path in paths.items()}
    train = _read_pair(files[NAMES[0]], files[NAMES[1]], max_bytes)
    test = _read_pair(files[NAMES[2]], files[NAMES[3]], max_bytes)
    num_validation = max(1, len(train[1]) // 12)
    if num_validation >= len(train[1]):
        raise DataError(f"data.root: {files[NAMES[1]]} has {len(train[1])} samples, accepted are 2 and more")
    return image_splits(train, test, num_validation=num_validation, mean=MEAN, std=STD)


def _find(root: Path | RemotePath) -> dict[str, Path | RemotePath] | None:
    """Paths of the four files by name; None if no folder has any of them.

    Raises:
        DataError: a folder has some of the files and no folder has all of them.
    """
    missing: str | None = None
    for folder in (root / name for name in FOLDERS):
        candidates = {name: [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()] for name in NAMES}
        if all(candidates.values()):
            return {name: paths[0] for name, paths in candidates.items()}
        if any(candidates.values()) and missing is None:
            absent = ", ".join(name for name, paths in candidates.items() if not paths)
            missing = f"data.root: {folder} has no {absent} (accepted: {REMOTE.accepted})"
    if missing is not None:
        raise DataError(missing)
    return None


def _read_pair(images_path: Path, targets_path: Path, max_bytes: int) -> tuple[Tensor, Tensor]:
    """Read images as bytes ``[samples, 1, 28, 28]`` and their targets as int64 ``[samples]``."""
    images, targets = _read_idx(images_path, 3, max_bytes), _read_idx(targets_path, 1, max_bytes)
    if images.shape[1:] != IMAGE_SHAPE:
        raise DataError(f"data.root: {images_path} holds images of {images.shape[1:]}, accepted are {IMAGE_SHAPE}")
    if len(images) != len(targets) or not len(images):
        raise DataError(f"data.root: {images_path} has {len(images)} images, {targets_path} has {len(targets)} labels")
    if targets.max() >= NUM_CLASSES:
        raise DataError(f"data.root: {targets_path} holds the label {targets.max()}, accepted are 0 to {NUM_CLASSES - 1}")
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(targets).to(torch.int64)


def _read_idx(path: Path, num_dimensions: int, max_bytes: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Read one idx file as an array of bytes in the shape that its header gives.

    Source: the idx format as http://yann.lecun.com/exdb/mnist describes it: two zeros, 8 for unsigned bytes, the number of
    dimensions, each dimension as a big-endian int32, the data.
    """
    magic, header_size = bytes((0, 0, 8, num_dimensions)), 4 + 4 * num_dimensions
    try:
        with limited_reader(path, max_bytes) as file:
            header = file.read(header_size)
            if header[:4] != magic or len(header) < header_size:
                found = header[:4].hex() or "nothing"
                raise DataError(f"data.root: {path} begins with {found}, accepted is an idx file that begins with {magic.hex()}")
            shape = struct.unpack_from(f">{num_dimensions}I", header, 4)
            num_expected = math.prod(shape)
            check_size(path, max_bytes, num_bytes=header_size + num_expected)
            content = file.read(num_expected)
            is_whole = len(content) == num_expected and not file.read(1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data.root: {path} cannot be read: {error}; accepted is a whole idx file, gzipped or not") from error
    if not is_whole:
        found = f"{len(content)} bytes of data" if len(content) < num_expected else "more bytes of data"
        raise DataError(f"data.root: {path} holds {found}, accepted are the {num_expected} its header says")
    return np.frombuffer(bytearray(content), dtype=np.uint8).reshape(shape)
