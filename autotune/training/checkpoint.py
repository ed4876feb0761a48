"""Checkpoints: weights, and the whole state of a training, in files that are read without running anything of them.

Both are safetensors files: tensors, and a header of JSON. What is not a tensor stands in that header too, so that one file holds
one moment and is replaced as a whole. Nothing is pickled, so a checkpoint from anyone can be opened.
"""

import json
import os
import random
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autotune.config.schema import TrialConfig
from autotune.errors import DataError
from autotune.files import replacing
from autotune.measurement import Evaluation

WEIGHTS_FILE = "weights.safetensors"
STATE_FILE = "state.safetensors"

_FORMAT_VERSION = 1
"""Of what autotune writes into a header: a reader refuses any other."""

_DTYPES = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    }
)  # fmt: skip
"""What safetensors holds."""

_MALFORMED = (AttributeError, KeyError, IndexError, RecursionError, RuntimeError, TypeError, ValueError)
"""What reading a header of another form can raise."""

_Packed = Any
"""A scalar as it is, or a list that begins with its kind: plain data, as JSON holds it."""


def save_weights(path: Path, weights: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> None:
    """Write named tensors, such as a model's ``state_dict()``, so that a reader sees the old file or the new one.

    Tensors are written in row-major order whatever their memory format, and those that are one tensor under several names
    (tied weights) once. ``metadata`` is plain data, as JSON holds it; see ``weights_metadata``.

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
    """The named tensors, on the CPU, and the metadata that ``save_weights`` wrote; tied names hold the same tensor.

    Raises:
        DataError: the file is not there, damaged, or no weights of autotune's.
    """
    tensors, header = _read(path, "weights")
    try:
        return {**tensors, **{name: tensors[first] for name, first in header["tied"].items()}}, dict(header["metadata"])
    except _MALFORMED as error:
        raise DataError(f"{path}: is damaged: {_line(error)}; accepted is a whole file that autotune wrote") from error


def read_weights_once(path: Path) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    """As ``read_weights``, from this process's memory where it has read the file as it is: not to be changed.

    Raises:
        DataError: as ``read_weights``.
    """
    try:
        found = path.stat()
    except OSError:
        return read_weights(path)  # says what is wrong
    return _read_version(path.absolute(), found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=2)
def _read_version(path: Path, modified_ns: int, num_bytes: int) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    return read_weights(path)


def weights_metadata(
    config: TrialConfig,
    *,
    input_shape: tuple[int, ...],
    num_classes: int | None,
    evaluation: Evaluation | None,
    versions: Mapping[str, str | None],
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """What a checkpoint says of its weights: enough to make the model again, and to know where they came from.

    Args:
        config: what they were trained with.
        input_shape: shape of one input, as the model was made for.
        num_classes: as the model was made for.
        evaluation: the last one of the training; None where there was none.
        versions: of the software that trained them.
        origin: for a reader: the experiment, the command line, the study and trial.
    """
    return {
        "config": config.as_dict(),
        "input_shape": list(input_shape),
        "num_classes": num_classes,
        "evaluation": None if evaluation is None else evaluation.as_dict(),
        "versions": dict(versions),
        "origin": dict(origin),
    }


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a training into a folder, so that a reader sees the old one or the new one.

    ``state`` nests mappings, lists and tuples of numbers, text, None, tensors and NumPy arrays in any way, as ``state_dict()``
    gives it. A tensor keeps its type, its values and, where it is dense, its memory format.

    Raises:
        DataError: the file cannot be written, or the state holds something else.
    """
    packer = _Packer()
    packed = packer.pack(state, "")
    _write(folder / STATE_FILE, packer.tensors, {"kind": "state", "state": packed})


def read_state(folder: Path) -> dict[str, Any]:
    """The state that ``save_state`` wrote, tensors on the CPU; what was one tensor in several places is one again.

    Raises:
        DataError: there is none, or it is damaged.
    """
    path = folder / STATE_FILE
    tensors, header = _read(path, "state")
    try:
        return dict(_Unpacker(tensors).unpack(header["state"]))
    except _MALFORMED as error:
        raise DataError(f"{path}: is damaged: {_line(error)}; accepted is a whole file that autotune wrote") from error


def random_state(device: torch.device) -> dict[str, Any]:
    """Where the global random number generators stand: Python's, NumPy's, torch's on the CPU and on the device."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the global random number generators where ``random_state`` found them."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


class _Packer:
    """Turns nested state into plain data, its tensors put aside by name, each of them once however often it comes."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def pack(self, value: Any, where: str) -> _Packed:
        """The value as plain data; ``where`` is its key, for messages."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(value, where)
        if isinstance(value, np.ndarray):
            return self._pack_array(value, where)
        if isinstance(value, Mapping):
            return ["dict", [[self.pack(key, where), self.pack(each, f"{where}.{key}".lstrip("."))] for key, each in value.items()]]
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, [self.pack(each, f"{where}.{index}") for index, each in enumerate(value)]]
        raise DataError(
            f"checkpoint: {where}: found {type(value).__name__}, accepted are tensors, arrays, numbers, text and None, "
            f"in mappings, lists and tuples"
        )

    def _pack_tensor(self, tensor: torch.Tensor, where: str) -> _Packed:
        """Its name, and its dimensions from the outermost in memory to the innermost."""
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
    """Turns plain data back into what was packed; a name stands for the same tensor wherever it comes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._stored = tensors
        self._made: dict[str, torch.Tensor] = {}

    def unpack(self, packed: _Packed) -> Any:
        """The value; raises one of ``_MALFORMED`` where nothing was packed like this."""
        if not isinstance(packed, list):
            return packed
        kind, content = packed[0], packed[1]
        if kind == "dict":
            return {self.unpack(key): self.unpack(each) for key, each in content}
        if kind == "list":
            return [self.unpack(each) for each in content]
        if kind == "tuple":
            return tuple(self.unpack(each) for each in content)
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
    """Equal for tensors that are the same numbers in the same memory; tensors without elements have none to share."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's numbers in row-major order, on the CPU, in memory that holds nothing else."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format).resolve_conj().resolve_neg()


def _write(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    """Write a whole file under another name, make sure that it is on the disk, and give it its own name."""
    from safetensors import SafetensorError  # noqa: PLC0415  # a training that keeps nothing does without it
    from safetensors.torch import save  # noqa: PLC0415

    text = json.dumps({"format_version": _FORMAT_VERSION, **header})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part, part.open("wb") as file:
            file.write(save(dict(tensors), {"format": "pt", "autotune": text}))
            file.flush()
            os.fsync(file.fileno())
        _flush_names(path.parent)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be written: {_line(error)}") from error


def _flush_names(folder: Path) -> None:
    """Wait until a folder's list of names is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a file, in memory of their own, and autotune's header."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  # a training that keeps nothing does without it

    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("autotune")
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # not a mapping
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; accepted is a checkpoint that autotune wrote") from error
    except (OSError, SafetensorError, KeyError) as error:
        raise DataError(f"{path}: cannot be read: {_line(error)}; accepted is a whole safetensors file that autotune wrote") from error
    if text is None:
        raise DataError(f"{path}: was not written by autotune; accepted are its {WEIGHTS_FILE} and {STATE_FILE}")
    try:
        header = json.loads(text)
        found, version = header["kind"], header["format_version"]
    except _MALFORMED as error:
        raise DataError(f"{path}: is damaged: {_line(error)}; accepted is a whole file that autotune wrote") from error
    if found != kind or version != _FORMAT_VERSION:
        raise DataError(f"{path}: holds {found}, format {version}; accepted is {kind}, format {_FORMAT_VERSION}")
    return tensors, header


def _line(error: Exception) -> str:
    """An error's text in one line."""
    return " ".join(str(error).split()) or type(error).__name__
