"""Checkpoints: files with a model's weights, or with the whole state of a training, that are safe to open.

Both kinds are safetensors files: tensors and a JSON header. The header also holds everything that is not a tensor, so that one file
is one consistent snapshot and is replaced as a whole. Nothing is pickled: reading a checkpoint from anyone runs no code of it.
"""

import json
import random
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autotune.config.schema import TrialConfig
from autotune.errors import DataError, StateError
from autotune.files import FORMATS, check_format, make_folder, replace_file
from autotune.hiding import without_secrets_in
from autotune.measurement import Evaluation
from autotune.training.state_files import STATE_FILE, WEIGHTS_FILE

_DTYPES = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    }
)  # fmt: skip
"""Tensor dtypes that safetensors can store."""

_MALFORMED = (ArithmeticError, AttributeError, KeyError, IndexError, RecursionError, RuntimeError, TypeError, ValueError)
"""Exceptions that reading a malformed header can raise."""

_Packed = Any
"""A packed value as JSON holds it: a scalar, or a list that begins with the kind of the value."""


def save_weights(path: Path, weights: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> None:
    """Write named tensors, such as a model's ``state_dict()``, atomically: a reader sees the old file or the new one.

    Tensors are written in row-major order whatever their memory format; one tensor under several names (tied weights) is
    written once. ``metadata`` is plain data, as JSON holds it; see ``weights_metadata``.

    Raises:
        DataError: the file cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first_names: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        _check_holdable(tensor, name)
        first = first_names.setdefault(_identity(tensor), name)
        if first == name:
            tensors[name] = _owned(tensor)
        else:
            tied[name] = first
    _write(path, tensors, {"kind": "weights", "tied": tied, "metadata": metadata})


def read_weights(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read the named tensors, on the CPU, and the metadata that ``save_weights`` wrote; tied names hold the same tensor.

    Raises:
        DataError: the file is missing, damaged, or not a weights file of autotune.
    """
    tensors, header = _read(path, "weights")
    try:
        return {**tensors, **{name: tensors[first] for name, first in header["tied"].items()}}, dict(header["metadata"])
    except _MALFORMED as error:
        raise DataError(f"{path}: is damaged: {_line(error)}; accepted is a whole file that autotune wrote") from error


def read_weights_once(path: Path) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    """Cached ``read_weights``: a process keeps the last two files that it read, until they change; callers must not change the result.

    Raises:
        DataError: the file is missing, damaged, or not a weights file of autotune.
    """
    try:
        status = path.stat()
    except OSError:
        return read_weights(path)  # raises the error
    return _read_version(path.absolute(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2)
def _read_version(path: Path, modified_ns: int, num_bytes: int) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    return read_weights(path)


def weights_metadata(
    config: TrialConfig,
    *,
    input_shape: tuple[int, ...],
    input_dtype: torch.dtype = torch.float32,
    num_classes: int | None,
    evaluation: Evaluation | None,
    versions: Mapping[str, str | None],
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """Metadata of a weights file: enough to make the model again and to know where its weights come from.

    Args:
        config: configuration of the training.
        input_shape: shape of one input that the model was made for.
        input_dtype: type of the model's inputs.
        num_classes: number of classes that the model was made for.
        evaluation: last evaluation of the training; None if there was none.
        versions: versions of the software that trained the weights.
        origin: where the weights come from, for a reader: the experiment, the command line, the study and trial.
    """
    return {
        "config": without_secrets_in(config.as_dict()),
        "input_shape": list(input_shape),
        "input_dtype": str(input_dtype).removeprefix("torch."),
        "num_classes": num_classes,
        "evaluation": None if evaluation is None else evaluation.as_dict(),
        "versions": dict(versions),
        "origin": without_secrets_in(dict(origin)),
    }


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a training into a folder atomically: a reader sees the old state or the new one.

    ``state`` nests mappings, lists and tuples of numbers, text, None, tensors and NumPy arrays in any way, like a
    ``state_dict()``. A tensor keeps its dtype, its values and, if it is dense, its memory format.

    Raises:
        DataError: the file cannot be written, or the state holds a value of another type.
    """
    packer = _Packer()
    packed = packer.pack(state, "")
    _write(folder / STATE_FILE, packer.tensors, {"kind": "state", "state": packed})


def check_state(state: Mapping[str, Any]) -> None:
    """Check that ``save_state`` can write a state.

    Raises:
        DataError: the state holds a value that it cannot write.
    """
    _Packer().pack(state, "")


def read_state(folder: Path) -> dict[str, Any]:
    """Read the state that ``save_state`` wrote, tensors on the CPU; a tensor that stood in several places is shared again.

    Raises:
        StateError: the file is missing or damaged.
    """
    try:
        tensors, header = _read(folder / STATE_FILE, "state")
    except DataError as error:
        raise StateError(str(error)) from error
    with told_damage(folder):
        return dict(_Unpacker(tensors).unpack(header["state"]))


@contextmanager
def told_damage(folder: Path) -> Iterator[None]:
    """Report a state that can be read, and yet does not hold what a training needs to go on, in one line.

    Raises:
        StateError: something within the context does not fit.
    """
    try:
        yield
    except _MALFORMED as error:
        raise StateError(
            f"{folder / STATE_FILE}: is damaged: {_line(error)[:200]}; accepted is a whole file that autotune wrote"
        ) from error


def random_state(device: torch.device) -> dict[str, Any]:
    """State of the global random number generators: Python's, NumPy's, torch's on the CPU and on the device."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        **({} if device.type == "cpu" else {device.type: torch.get_device_module(device).get_rng_state(device)}),
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the global random number generators to the state that ``random_state`` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and (on_device := state.get(device.type)) is not None:
        torch.get_device_module(device).set_rng_state(on_device, device)


class _Packer:
    """Turns nested state into plain data and collects its tensors by name, each tensor once however often it occurs."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def pack(self, value: Any, where: str) -> _Packed:
        """The value as plain data; ``where`` is the value's key, for error messages."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(value, where)
        if isinstance(value, np.ndarray):
            return self._pack_array(value, where)
        if isinstance(value, Mapping):
            return ["dict", [[self.pack(key, where), self.pack(item, f"{where}.{key}".lstrip("."))] for key, item in value.items()]]
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, [self.pack(item, f"{where}.{index}") for index, item in enumerate(value)]]
        raise DataError(
            f"checkpoint: {where}: found {type(value).__name__}, accepted are tensors, arrays, numbers, text and None, "
            f"in mappings, lists and tuples"
        )

    def _pack_tensor(self, tensor: torch.Tensor, where: str) -> _Packed:
        """The tensor's name and the order of its dimensions, from the outermost in memory to the innermost."""
        _check_holdable(tensor, where)
        order = sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride()[dim], dim))
        if not tensor.permute(order).is_contiguous():
            order = list(range(tensor.ndim))
        name = self._names.setdefault(_identity(tensor), str(len(self.tensors)))
        if name not in self.tensors:
            self.tensors[name] = _owned(tensor.permute(order))
        return ["tensor", name, order]

    def _pack_array(self, array: np.ndarray[Any, Any], where: str) -> _Packed:
        try:
            tensor = torch.from_numpy(np.array(array, order="C"))
        except (TypeError, ValueError) as error:
            raise DataError(f"checkpoint: {where}: found an array of {array.dtype}, which a checkpoint does not hold") from error
        _check_holdable(tensor, where)
        name = str(len(self.tensors))
        self.tensors[name] = tensor
        return ["array", name]


class _Unpacker:
    """Turns plain data back into the nested state that was packed; equal names give the same tensor object."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._stored = tensors
        self._made: dict[str, torch.Tensor] = {}

    def unpack(self, packed: _Packed) -> Any:
        """The value that was packed; raises one of ``_MALFORMED`` if ``packed`` is malformed."""
        if not isinstance(packed, list):
            return packed
        kind, content = packed[0], packed[1]
        if kind == "dict":
            return {self.unpack(key): self.unpack(item) for key, item in content}
        if kind == "list":
            return [self.unpack(item) for item in content]
        if kind == "tuple":
            return tuple(self.unpack(item) for item in content)
        if kind == "array":
            return self._stored[content].numpy()
        if kind == "tensor":
            return self._tensor(content, packed[2])
        raise ValueError(f"unknown kind {kind!r}")

    def _tensor(self, name: str, order: list[int]) -> torch.Tensor:
        if name not in self._made:
            inverse = sorted(range(len(order)), key=lambda dim: order[dim])
            self._made[name] = self._stored[name].permute(inverse)
        return self._made[name]


def _check_holdable(tensor: torch.Tensor, where: str) -> None:
    if tensor.layout is not torch.strided or tensor.dtype not in _DTYPES:
        raise DataError(f"checkpoint: {where}: found a tensor of {tensor.dtype}, {tensor.layout}, which a checkpoint does not hold")


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Key that is equal for tensors that view the same memory in the same way; an empty tensor equals only itself."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy of a tensor in row-major order, on the CPU, in memory that no other tensor shares."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format).resolve_conj().resolve_neg()


def _write(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    from safetensors import SafetensorError  # noqa: PLC0415  # not needed by a training that saves nothing
    from safetensors.torch import save  # noqa: PLC0415

    text = json.dumps({"format_version": FORMATS["checkpoint"], **header})
    try:
        make_folder(path.parent)
        replace_file(path, save(dict(tensors), {"format": "pt", "autotune": text, "crc32": _checksum(text, tensors)}))
    except SafetensorError as error:
        raise DataError(f"{path}: cannot be written: {_line(error)}") from error


def _read(path: Path, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Copies of the tensors in a file, and the header that autotune wrote into it."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  # not needed by a training that saves nothing

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text, checksum = metadata.get("autotune"), metadata.get("crc32")
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # not a mapping
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; accepted is a checkpoint that autotune wrote") from error
    except (OSError, SafetensorError, KeyError) as error:
        raise DataError(f"{path}: cannot be read: {_line(error)}; accepted is a whole safetensors file that autotune wrote") from error
    if text is None:
        raise DataError(f"{path}: was not written by autotune; accepted are its {WEIGHTS_FILE} and {STATE_FILE}")
    if checksum is not None and checksum != _checksum(text, tensors):  # a file from before there were checksums has none
        raise DataError(f"{path}: is damaged: its content does not have its checksum; accepted is a whole file that autotune wrote")
    try:
        header = json.loads(text)
        found_kind, version = header["kind"], header["format_version"]
    except _MALFORMED as error:
        raise DataError(f"{path}: is damaged: {_line(error)}; accepted is a whole file that autotune wrote") from error
    check_format("checkpoint", version, path)
    if found_kind != kind:
        raise DataError(f"{path}: holds {str(found_kind)[:80]}; accepted is {kind}")
    return tensors, header


def _checksum(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """CRC-32 of a file's header and of its tensors, in row-major order."""
    checksum = zlib.crc32(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        flat = tensor.as_strided((tensor.numel(),), (1,))  # the stride of no element, or of one, may be anything
        checksum = zlib.crc32(flat.view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"


def _line(error: Exception) -> str:
    """An error's text in one line."""
    return " ".join(str(error).split()) or type(error).__name__
