"""CIFAR-10, read from its official files in the binary or the Python format, as a folder or as an archive.

The Python format is pickled, and unpickling can call any function that a file names. Data can come from anyone, so only the names
that NumPy arrays need are accepted, and classes of this module stand for them: nothing that the file names is ever called.
"""

import io
import pickle
import pickletools
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from autotune.download import RemoteDataSet, RemoteFile, obtain
from autotune.errors import ConfigError, DataError
from autotune.remote.cache import fetched
from autotune.remote.path import RemotePath, located
from autotune.workloads.limits import MAX_BYTES, check_size, limited_reader
from autotune.workloads.splits import stratified_split

REMOTE = RemoteDataSet(
    name="CIFAR-10",
    files=(
        RemoteFile(
            url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            md5="c32a1d4ab5d03f1284b67883e8d87530",
        ),
    ),
    accepted="cifar-10-batches-bin/, cifar-10-batches-py/, cifar-10-binary.tar.gz or cifar-10-python.tar.gz",
)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
NUM_CLASSES = 10
VALIDATIONS = ("held_out", "test")
IMAGE_SHAPE = (3, 32, 32)
IMAGE_BYTES = 3 * 32 * 32
_MAX_MEMBERS = 100
"""Limit on the files and folders in an archive; an official one has nine."""

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True, kw_only=True)
class _Format:
    """One of the two official formats: the names of its folder, its archive and its batch files."""

    folder: str
    archive: str
    suffix: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the batch files, the test batch last."""
        return (*(f"data_batch_{number}{self.suffix}" for number in range(1, 6)), f"test_batch{self.suffix}")


_BINARY = _Format(folder="cifar-10-batches-bin", archive="cifar-10-binary.tar.gz", suffix=".bin")
_PYTHON = _Format(folder="cifar-10-batches-py", archive="cifar-10-python.tar.gz", suffix="")


def cifar10(
    root: str,
    download: bool,
    *,
    validation: str = "held_out",
    num_train: int | None = None,
    num_validation: int | None = None,
    max_bytes: int = MAX_BYTES,
) -> dict[str, Any]:
    """The 50,000 training images and the official 10,000 test images, or a part of them, as bytes, and ``transform`` to standardise them.

    With ``validation`` at ``held_out``, 5,000 of the training images, with each class's share, are the validation split, and the test
    images are scored only for the exported configuration. With ``test`` all 50,000 images are trained on, the test images are the
    validation split, and there is no test split: records of training speed on CIFAR-10 are measured that way, and their accuracies can
    only be compared with accuracies measured the same way. A search then chooses by the test images, so the best of many trials
    looks better than it is.

    Inputs are uint8 ``[samples, 3, 32, 32]``, a quarter of the memory of the float32 that ``transform`` makes of them on the device;
    targets are int64 ``[samples]``, 0 to 9. Smaller files of the same format are split in the same proportion.

    Args:
        root: folder with the files, or its URL.
        download: whether to download missing files.
        validation: held_out or test.
        num_train: training samples to keep, with each class's share to within one sample; None keeps all.
        num_validation: validation samples to keep, with each class's share to within one sample; None keeps all.
        max_bytes: limit in bytes on what the archive opens to, and on one batch file of a folder.

    Raises:
        ConfigError: ``validation`` is neither held_out nor test.
        DataError: a file is missing, damaged or of another format, a download fails, or there are fewer samples than asked for.
    """
    if validation not in VALIDATIONS:
        raise ConfigError(f"data.validation: found {validation!r}, accepted are {', '.join(VALIDATIONS)}")
    folder = located(root, "data.root")
    source = _find(folder)
    if source is None:
        if isinstance(folder, RemotePath):
            raise folder.lacks(REMOTE.name, REMOTE.accepted)
        obtain(REMOTE, folder, root=folder, download=download)
        source = folder / _BINARY.archive, _BINARY
    path, file_format = source
    if path.name == file_format.archive:
        path = fetched(path)
        contents = _read_archive(path, file_format, max_bytes)
    else:
        contents = _read_folder([fetched(path / name) for name in file_format.names], max_bytes)
    parse = _parse_binary if file_format is _BINARY else _parse_pickle
    batches = [parse(contents[name], path / name) for name in file_format.names]
    train, test = _joined(batches[:-1]), _joined(batches[-1:])
    if validation == "test":
        splits = {"train": train, "validation": test}
    else:
        kept, held_out = stratified_split(train[1], max(1, len(train[1]) // 10))
        splits = {"train": _taken(train, kept), "validation": _taken(train, held_out), "test": test}
    for name, count in (("train", num_train), ("validation", num_validation)):
        splits[name] = _part(splits[name], count, f"data.num_{name}")
    return {**splits, "transform": Standardise(mean=MEAN, std=STD)}


def _part(split: tuple[Tensor, Tensor], count: int | None, key: str) -> tuple[Tensor, Tensor]:
    """``count`` of a split's samples, with each class's share; None keeps all.

    Raises:
        DataError: ``count`` is below 1 or above the number of samples.
    """
    inputs, targets = split
    if count is None or count == len(targets):
        return inputs, targets
    if not 1 <= count < len(targets):
        raise DataError(f"{key}: found {count}, accepted is 1 to {len(targets)}")
    return _taken(split, stratified_split(targets, count)[1])


def _taken(split: tuple[Tensor, Tensor], indices: Tensor) -> tuple[Tensor, Tensor]:
    return split[0][indices], split[1][indices]


class Standardise:
    """Turns bytes ``[samples, channels, height, width]`` into float32, scaled to 0..1 and standardised by channel."""

    def __init__(self, *, mean: Sequence[float], std: Sequence[float]) -> None:
        scale = 1 / torch.tensor(std).view(1, -1, 1, 1)
        self._factors = {torch.device("cpu"): (scale / 255, -torch.tensor(mean).view(1, -1, 1, 1) * scale)}

    def __call__(self, inputs: Tensor) -> Tensor:
        """Standardise images; the result has their device and memory format."""
        if inputs.device not in self._factors:  # once per process: a copy to a device makes the host wait for it
            scale, offset = self._factors[torch.device("cpu")]
            self._factors[inputs.device] = scale.to(inputs.device), offset.to(inputs.device)
        scale, offset = self._factors[inputs.device]
        return inputs.to(torch.float32, copy=True).mul_(scale).add_(offset)


def _find(root: Path | RemotePath) -> tuple[Path | RemotePath, _Format] | None:
    """The folder or archive to read and its format; None if there is neither.

    Raises:
        DataError: a folder has only some of the batch files, and no other folder or archive is complete.
    """
    incomplete: str | None = None
    for file_format in (_BINARY, _PYTHON):
        for folder in (root / file_format.folder, root):
            present = [name for name in file_format.names if (folder / name).is_file()]
            if len(present) == len(file_format.names):
                return folder, file_format
            if present and incomplete is None:
                absent = ", ".join(name for name in file_format.names if name not in present)
                incomplete = f"{folder} has {', '.join(present)} but no {absent}"
    for file_format in (_BINARY, _PYTHON):
        if (root / file_format.archive).is_file():
            return root / file_format.archive, file_format
    if incomplete is not None:
        raise DataError(f"data.root: {incomplete} (accepted: {REMOTE.accepted}, whole)")
    return None


def _read_folder(files: Sequence[Path], max_bytes: int) -> dict[str, bytes]:
    """Read the content of batch files, by file name."""
    try:
        for file in files:
            check_size(file, max_bytes)
        return {file.name: file.read_bytes() for file in files}
    except OSError as error:
        raise DataError(f"data.root: {error.filename} cannot be read: {error.strerror}") from error


def _read_archive(archive: Path, file_format: _Format, max_bytes: int) -> dict[str, bytes]:
    """Read the content of an archive's batch files, by file name, into memory: nothing is written to a path that the archive chooses."""
    contents: dict[str, bytes] = {}
    try:
        with limited_reader(archive, max_bytes) as opened, tarfile.open(fileobj=cast(Any, opened), mode="r|") as members:
            for count, member in enumerate(members):
                if count == _MAX_MEMBERS:
                    raise DataError(f"data.root: {archive} has more than {_MAX_MEMBERS} members; accepted is the whole official file")
                name = PurePosixPath(member.name).name
                if name not in file_format.names or not member.isfile():
                    continue
                check_size(archive, max_bytes, num_bytes=member.size + sum(map(len, contents.values())))
                file = members.extractfile(member)
                contents[name] = file.read() if file else b""
    except (tarfile.TarError, OSError, EOFError, OverflowError, RecursionError, ValueError, zlib.error) as error:
        raise DataError(f"data.root: {archive} cannot be read: {error}; accepted is the whole official file") from error
    absent = [name for name in file_format.names if name not in contents]
    if absent:
        raise DataError(f"data.root: {archive} has no {', '.join(absent)}; accepted is the whole official file")
    return contents


def _parse_binary(content: bytes, path: Path | RemotePath) -> tuple[Bytes, Bytes]:
    """Parse images ``[records, 3, 32, 32]`` and labels ``[records]`` of a binary batch: per record a label byte, then the image."""
    record_bytes = 1 + IMAGE_BYTES
    if not content or len(content) % record_bytes:
        raise DataError(f"data.root: {path} has {len(content)} bytes, accepted are whole records of {record_bytes} bytes")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record_bytes)
    return _checked(records[:, 1:], records[:, 0], path)


def _parse_pickle(content: bytes, path: Path | RemotePath) -> tuple[Bytes, Bytes]:
    """Parse images ``[records, 3, 32, 32]`` and labels ``[records]`` of a pickled batch: a dict with ``data`` and ``labels``."""
    try:
        _check_opcodes(content)
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"data.root: {path} cannot be unpickled: {error}; accepted is an official batch file") from error
    data, labels = (batch.get(key) for key in (b"data", b"labels")) if isinstance(batch, Mapping) else (None, None)
    if not isinstance(data, _PickledArray) or not isinstance(labels, list):
        raise DataError(f"data.root: {path} holds no pair of data and labels, accepted is an official batch file")
    if not all(type(label) is int and 0 <= label < NUM_CLASSES for label in labels):
        raise DataError(f"data.root: {path} holds labels that are no class, accepted are 0 to {NUM_CLASSES - 1}")
    if not labels or data.shape != (len(labels), IMAGE_BYTES) or len(data.content) != len(labels) * IMAGE_BYTES:
        found = f"{len(data.content)} bytes of data of shape {data.shape} for {len(labels)} labels"
        raise DataError(f"data.root: {path} holds {found}, accepted are {IMAGE_BYTES} bytes each")
    return _checked(np.frombuffer(data.content, dtype=np.uint8), np.array(labels, dtype=np.uint8), path)


def _checked(images: Bytes, labels: Bytes, path: Path | RemotePath) -> tuple[Bytes, Bytes]:
    if labels.max() >= NUM_CLASSES:
        raise DataError(f"data.root: {path} holds the label {labels.max()}, accepted are 0 to {NUM_CLASSES - 1}")
    return images.reshape(-1, *IMAGE_SHAPE), labels


def _joined(batches: Sequence[tuple[Bytes, Bytes]]) -> tuple[Tensor, Tensor]:
    """Join the images and int64 targets of batches, as copies: arrays read from a file are read-only, and tensors cannot be."""
    images, targets = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    return torch.from_numpy(images), torch.from_numpy(targets.astype(np.int64))


class _PickledDtype:
    """Stands for ``numpy.dtype`` in unpickling: knows only whether the type is bytes."""

    def __init__(self, code: bytes | str, *_: Any) -> None:
        self.is_bytes = code in (b"u1", "u1")

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and fields, which bytes do not need."""


class _PickledArray:
    """Stands for ``numpy.ndarray`` and ``_reconstruct`` in unpickling: keeps an array's shape and its bytes in C order."""

    def __init__(self, *_: Any) -> None:
        self.shape: object = None
        self.content = b""

    def __setstate__(self, state: Any) -> None:
        """Take the pickled state of a NumPy array: version, shape, dtype, whether in Fortran order, content."""
        _, shape, dtype, is_fortran, content = state
        if not isinstance(dtype, _PickledDtype) or not dtype.is_bytes or not isinstance(content, bytes) or is_fortran:
            raise pickle.UnpicklingError("an array that is not of bytes in C order")
        self.shape, self.content = shape, content


_STANDS_FOR = {
    ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledDtype,
}


_OPCODES = frozenset(
    {
        "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT",
        "BININT1", "BININT2", "INT", "LONG1", "BINSTRING", "SHORT_BINSTRING", "STRING", "BINBYTES",
        "SHORT_BINBYTES", "BINBYTES8", "BINUNICODE", "SHORT_BINUNICODE", "UNICODE", "EMPTY_LIST", "LIST", "APPEND",
        "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1",
        "TUPLE2", "TUPLE3", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "PUT", "BINPUT",
        "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET",
    }
)  # fmt: skip
"""Opcodes of a pickled mapping of lists, texts, numbers and arrays."""
_MAX_TUPLES = 100
"""Limit on a batch's tuples; an array has four. Hashing a tuple of tuples of ... a million deep ends Python itself."""


def _check_opcodes(content: bytes) -> None:
    """Check that a pickle can be read without taking more memory than its size, or ending Python.

    Raises:
        pickle.UnpicklingError: it holds another opcode than those of a batch, nests tuples, or keeps a value at a place far away: up to
            it, unpickling would reserve memory.
        ValueError: it is no pickle.
    """
    num_tuples = 0
    for opcode, argument, _ in pickletools.genops(content):
        num_tuples += "TUPLE" in opcode.name
        is_far = "PUT" in opcode.name and argument is not None and argument > len(content)
        if opcode.name not in _OPCODES or num_tuples > _MAX_TUPLES or is_far:
            raise pickle.UnpicklingError(f"it holds {opcode.name}, which no batch needs, or not so often")


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles plain values and arrays of bytes, and refuses every other name before it is imported.

    Source: the Python documentation of ``pickle``, "Restricting Globals"; stricter, since not even NumPy's own functions are called.
    """

    def find_class(self, module: str, name: str, /) -> type:
        """The class of this module that stands for a name of NumPy's.

        Raises:
            pickle.UnpicklingError: the name is not one that NumPy arrays need.
        """
        if (module, name) not in _STANDS_FOR:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only NumPy arrays are read")
        return _STANDS_FOR[module, name]
