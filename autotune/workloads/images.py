"""Images and their classes: scikit-learn's handwritten digits, which come with a dependency and are
small enough to tune on a laptop in a minute, Fashion-MNIST and CIFAR-10 from their official files.

CIFAR-10's Python format is pickled, and unpickling can call any function that a file names. Data
can come from anyone, so only the names that NumPy arrays need are accepted.
"""

import gzip
import io
import pickle
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.errors import DataError, check_choice, explained
from autotune.remote import download_files, fetched, is_file, is_remote
from autotune.workloads.splits import (
    Splits,
    Standardise,
    part_of,
    scikit_learn_file,
    stratified_split,
    three_splits,
)

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def digits(*, classes: Sequence[int] | None = None, num_train: int | None = None) -> Splits:
    """The 1,797 digits as 1,197 train, 300 validation and 300 test samples, or a part of them.

    Inputs are float32 ``[samples, 1, 8, 8]``, standardised with the train split's mean and
    deviation over all pixels; targets are int64 ``[samples]``, 0 to 9.

    Args:
        classes: digits to keep, in all three splits in the same proportion; their targets are 0, 1,
            ... in this order.
        num_train: training samples to keep of these classes, with each class's share to within one
            sample.

    Raises:
        DataError: ``classes`` are not two or more different digits, or there are fewer training
            samples than ``num_train``.
    """
    path = scikit_learn_file("digits.csv.gz")
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32))
    inputs, targets = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].long()
    if classes is not None:
        if not (2 <= len(set(classes)) == len(classes) and set(classes) <= set(range(10))):
            raise DataError(
                f"data.classes: found {list(classes)}, use two or more different digits, 0 to 9"
            )
        matches = targets[:, None] == torch.tensor(classes)
        kept = matches.any(1)
        inputs, targets = inputs[kept], matches[kept].int().argmax(1)
    num_held_out = round(len(targets) * 300 / 1797)
    rows = three_splits(targets, num_held_out, num_held_out)
    rows["train"] = part_of(rows["train"], targets, num_train, "data.num_train")
    std, mean = torch.std_mean(inputs[rows["train"]])
    inputs = (inputs - mean) / std
    return {name: (inputs[indices], targets[indices]) for name, indices in rows.items()}


_FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FASHION_CHECKSUMS = {
    f"{_FASHION_URL}/train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    f"{_FASHION_URL}/train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    f"{_FASHION_URL}/t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    f"{_FASHION_URL}/t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
"""MD5 checksums of Fashion-MNIST's official files, by URL."""


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
    locations = _official_files(
        "Fashion-MNIST",
        root,
        [
            [f"{root}/{folder}/{url.rpartition('/')[2]}" for url in FASHION_CHECKSUMS]
            # MNIST's files have the same names, so a download goes into a folder of its own
            for folder in ("fashion-mnist", "FashionMNIST/raw", ".")
        ],
        FASHION_CHECKSUMS if download else {},
    )
    images, classes, test_images, test_classes = (_read_idx(location) for location in locations)
    normalise = Standardise((0.2860,), (0.3530,))
    inputs, targets = normalise(images.view(-1, 1, 28, 28)), classes.long()
    kept, held_out = stratified_split(targets, max(1, len(targets) // 12))
    return {
        "train": (inputs[kept], targets[kept]),
        "validation": (inputs[held_out], targets[held_out]),
        "test": (normalise(test_images.view(-1, 1, 28, 28)), test_classes.long()),
    }


def _read_idx(location: str) -> Tensor:
    """Read one idx file as a tensor of bytes in the shape that its header gives.

    Source: the idx format as http://yann.lecun.com/exdb/mnist describes it: two zeros, 8 for
    unsigned bytes, the number of dimensions, each dimension as a big-endian int32, the data.
    """
    path = fetched(location, "data.root")
    with explained(f"data: {path} cannot be read"):
        content = gzip.decompress(path.read_bytes())
        if content[:3] != b"\0\0\x08":
            raise ValueError("it is no idx file of bytes")
        shape = np.frombuffer(content, ">i4", count=content[3], offset=4)
        values = np.frombuffer(bytearray(content), np.uint8, offset=4 + 4 * len(shape))
        return torch.from_numpy(values.reshape(shape))


CIFAR10_CHECKSUMS = {
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"
}
"""MD5 checksum of CIFAR-10's official archive in the binary format, by URL."""
_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


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
        root: folder with the files or archive, in the binary or the Python format, or its URL.
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
    check_choice("data.validation", validation, ("held_out", "test"))
    locations = _official_files(
        "CIFAR-10",
        root,
        [
            [f"{root}/cifar-10-binary.tar.gz"],
            *(
                [f"{root}/{folder}/{name}{suffix}" for name in _BATCHES]
                for folder in ("cifar-10-batches-bin", "cifar-10-batches-py", ".")
                for suffix in (".bin", "")
            ),
            [f"{root}/cifar-10-python.tar.gz"],
        ],
        CIFAR10_CHECKSUMS if download else {},
    )
    *batches, test_batch = _read_batches(locations)
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches, test_batch, strict=True))
    inputs = torch.from_numpy(images).view(-1, 3, 32, 32)
    targets = torch.from_numpy(labels.astype(np.int64))
    everything, num_test = torch.arange(len(targets)), len(test_batch[1])
    train, test = everything[:-num_test], everything[-num_test:]
    rows = {"train": train, "validation": test}
    if validation == "held_out":
        kept, held_out = stratified_split(targets[train], max(1, len(train) // 10))
        rows = {"train": kept, "validation": held_out, "test": test}
    rows["train"] = part_of(rows["train"], targets, num_train, "data.num_train")
    rows["validation"] = part_of(rows["validation"], targets, num_validation, "data.num_validation")
    return {
        **{name: (inputs[indices], targets[indices]) for name, indices in rows.items()},
        "transform": Standardise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    }


def _read_batches(locations: Sequence[str]) -> list[tuple[Bytes, Bytes]]:
    """Images ``[records, 3072]`` and labels ``[records]`` of the batches, the test batch last.

    An archive is read into memory: nothing is written to a path that it chooses.
    """
    files = [fetched(location, "data.root") for location in locations]
    with explained(f"data: {files[0]} cannot be read"):
        if len(files) > 1:
            return [_parsed(file.name, file.read_bytes()) for file in files]
        contents: dict[str, bytes] = {}
        with tarfile.open(files[0]) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if name.removesuffix(".bin") in _BATCHES and (file := archive.extractfile(member)):
                    contents[name] = file.read()
        if len(contents) < len(_BATCHES):
            raise ValueError(f"it has the batches {sorted(contents)} only")
        return [_parsed(name, contents[name]) for name in sorted(contents)]


def _parsed(name: str, content: bytes) -> tuple[Bytes, Bytes]:
    """Images ``[records, 3072]`` and labels ``[records]`` of a batch.

    In the binary format, a record is a label byte and the image; the other is a pickled dict with
    ``data`` and ``labels``.
    """
    with explained(f"data: {name} cannot be read"):
        if name.endswith(".bin"):
            records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + 3072)
            images, labels = records[:, 1:], records[:, 0]
        else:
            batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
            images, labels = batch[b"data"], np.array(batch[b"labels"], dtype=np.uint8)
        if images.dtype != np.uint8 or images.shape != (len(labels), 3072) or labels.max() > 9:
            raise ValueError("it holds no images of 3x32x32 bytes with labels from 0 to 9")
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
        if name == "_reconstruct" and module.endswith("core.multiarray"):
            return np.empty(0).__reduce__()[0]  # NumPy has moved it
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only NumPy arrays are read")


def _official_files(
    data_set: str, root: str, candidates: Sequence[list[str]], checksums: Mapping[str, str]
) -> list[str]:
    """The first list of paths or URLs whose files all exist.

    Else files with ``checksums``, if there are any, are downloaded as the first list says.
    """
    for locations in candidates:
        if all(is_file(location, "data.root") for location in locations):
            return locations
    absent = f"data.root: no {data_set} under '{root}': its official files, or archive"
    if is_remote(root) or not checksums:
        raise DataError(f"{absent}; data.download=true fetches it to a folder of this machine")
    folder = candidates[0][0].rpartition("/")[0]
    download_files(checksums, fetched(folder, "data.root"), absent)
    return candidates[0]
