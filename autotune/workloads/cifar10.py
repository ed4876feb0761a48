"""CIFAR-10, read from its official files in the binary or the Python format, as a folder or as an
archive.

The Python format is pickled, and unpickling can call any function that a file names. Data can come
from anyone, so only the names that NumPy arrays need are accepted.
"""

import io
import pickle
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch

from autotune.errors import ConfigError, DataError
from autotune.remote import download_files, fetched, is_file, is_remote
from autotune.workloads.splits import Standardise, stratified_split

CHECKSUMS = {
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"
}
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
NUM_CLASSES = 10
IMAGE_BYTES = 3 * 32 * 32
_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_FORMATS = (
    ("cifar-10-batches-bin", "cifar-10-binary.tar.gz", [f"{name}.bin" for name in _BATCHES]),
    ("cifar-10-batches-py", "cifar-10-python.tar.gz", [*_BATCHES]),
)
"""Folder, archive and batch files of the two official formats, the test batch last."""

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def cifar10(
    root: str,
    download: bool,
    *,
    validation: str = "held_out",
    num_train: int | None = None,
    num_validation: int | None = None,
) -> dict[str, Any]:
    """The 50,000 training images and the official 10,000 test images, or a part of them, as bytes,
    and ``transform`` to standardise them.

    With ``validation`` at ``held_out``, 5,000 of the training images, with each class's share, are
    the validation split, and the test images are scored only for the exported configuration. With
    ``test`` all 50,000 images are trained on, the test images are the validation split, and there
    is no test split: records of training speed on CIFAR-10 are measured that way, and their
    accuracies can only be compared with accuracies measured the same way. A search then chooses by
    the test images, so the best of many trials looks better than it is.

    Inputs are uint8 ``[samples, 3, 32, 32]``, a quarter of the memory of the float32 that
    ``transform`` makes of them on the device; targets are int64 ``[samples]``, 0 to 9. Smaller
    files of the same format are split in the same proportion.

    Args:
        root: folder with the files, or its URL.
        download: whether to download missing files.
        validation: held_out or test.
        num_train: training samples to keep, with each class's share to within one sample; None
            keeps all.
        num_validation: validation samples to keep, with each class's share to within one sample;
            None keeps all.

    Raises:
        ConfigError: ``validation`` is neither held_out nor test.
        DataError: a file is missing, damaged or of another format, a download fails, or there are
            fewer samples than asked for.
    """
    if validation not in ("held_out", "test"):
        raise ConfigError(f"data.validation: found {validation!r}, use held_out or test")
    contents = _contents(root, download)
    batches = [_parsed(name, content) for name, content in contents.items()]
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    inputs, targets = (
        torch.from_numpy(images).view(-1, 3, 32, 32),
        torch.from_numpy(labels.astype(np.int64)),
    )
    everything = torch.arange(len(targets))
    train, test = everything[: -len(batches[-1][1])], everything[-len(batches[-1][1]) :]
    splits = {"train": train, "validation": test}
    if validation == "held_out":
        kept, held_out = stratified_split(targets[train], max(1, len(train) // 10))
        splits = {"train": kept, "validation": held_out, "test": test}
    for name, count in (("train", num_train), ("validation", num_validation)):
        rows = splits[name]
        if count is not None and not 1 <= count <= len(rows):
            raise DataError(f"data.num_{name}: found {count}, use 1 to {len(rows)}")
        if count is not None and count < len(rows):
            splits[name] = rows[stratified_split(targets[rows], count)[1]]
    return {
        **{name: (inputs[rows], targets[rows]) for name, rows in splits.items()},
        "transform": Standardise(MEAN, STD),
    }


def _contents(root: str, download: bool) -> Mapping[str, bytes]:
    """Content of the six batch files by name, of the first complete folder or archive under
    ``root``.
    """
    for folder, _, names in _FORMATS:
        for place in (f"{root}/{folder}", root):
            if all(is_file(f"{place}/{name}", "data.root") for name in names):
                try:
                    return {
                        name: fetched(f"{place}/{name}", "data.root").read_bytes() for name in names
                    }
                except OSError as error:
                    raise DataError(
                        f"data.root: {error.filename} cannot be read: {error.strerror}"
                    ) from error
    for _, archive, names in _FORMATS:
        if is_file(f"{root}/{archive}", "data.root"):
            return _in_archive(f"{root}/{archive}", names)
    accepted = ", ".join(
        name for folder, archive, _ in _FORMATS for name in (f"{folder}/", archive)
    )
    absent = f"data.root: no CIFAR-10 under '{root}': none of {accepted} is there with all batches"
    if is_remote(root) or not download:
        raise DataError(f"{absent}; data.download=true fetches it to a folder of this machine")
    download_files(CHECKSUMS, fetched(root, "data.root"), absent)
    _, archive, names = _FORMATS[0]
    return _in_archive(f"{root}/{archive}", names)


def _in_archive(location: str, names: list[str]) -> dict[str, bytes]:
    """Read batch files of an archive into memory: nothing is written to a path that the archive
    chooses.
    """
    archive, contents = fetched(location, "data.root"), {}
    try:
        with tarfile.open(archive) as members:
            for member in members:
                name = PurePosixPath(member.name).name
                if name in names and member.isfile() and (file := members.extractfile(member)):
                    contents[name] = file.read()
        return {name: contents[name] for name in names}
    except KeyError as error:
        raise DataError(f"data.root: {archive} has no {error.args[0]}") from error
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"data.root: {archive} cannot be read: {error}") from error


def _parsed(name: str, content: bytes) -> tuple[Bytes, Bytes]:
    """Images ``[records, 3072]`` and labels ``[records]`` of a batch.

    In the binary format, a record is a label byte and the image; the other is a pickled dict with
    ``data`` and ``labels``.
    """
    try:
        if name.endswith(".bin"):
            records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + IMAGE_BYTES)
            images, labels = records[:, 1:], records[:, 0]
        else:
            batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
            images, labels = batch[b"data"], np.array(batch[b"labels"], dtype=np.uint8)
        if (
            images.dtype != np.uint8
            or images.shape != (len(labels), IMAGE_BYTES)
            or labels.max() >= NUM_CLASSES
        ):
            raise ValueError("it holds no images of 3x32x32 bytes with labels from 0 to 9")
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(
            f"data.root: {name} is no batch of CIFAR-10: {' '.join(str(error).split())}"
        ) from error
    return images, labels


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles plain values and arrays, and refuses every other name before it is imported.

    Source: the Python documentation of ``pickle``, "Restricting Globals".
    """

    def find_class(self, module: str, name: str, /) -> Any:
        """The object that a name of NumPy's stands for.

        Raises:
            pickle.UnpicklingError: the name is not one that NumPy arrays need.
        """
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) in (
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
        ):
            return np.empty(0).__reduce__()[0]  # NumPy has moved it
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only NumPy arrays are read")
