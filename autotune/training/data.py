"""The data set of a training: loads it once per process, checks it, and moves it to the device.

Contract of ``data:`` in the configuration: a callable that returns a mapping from split to data, ``train`` and ``validation``
and optionally ``test``. A split is a pair (inputs [samples, ...], targets [samples, ...]) of tensors or arrays, or a map-style
``torch.utils.data.Dataset``, which is read once into such a pair. Arrays may be mapped from files larger than memory: they are
read one batch at a time. If the mapping has ``transform``, it is applied on the device to the inputs of every batch of every
split, for example to turn bytes into standardised numbers.

A process keeps the last data set that it loaded, so that later trials of the same worker need not load it again.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from autotune.config.build import build_partial
from autotune.config.schema import TrialConfig
from autotune.errors import AutotuneError, DataError
from autotune.training.device import free_memory_bytes

_FITS_FRACTION = 0.5
"""Largest fraction of the device's free memory that a data set kept on the device may take."""


@dataclass(frozen=True)
class Split:
    """One split of a data set: inputs [samples, ...] and targets [samples, ...], on one device."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def num_bytes(self) -> int:
        """Size of inputs and targets in bytes."""
        return self.inputs.nbytes + self.targets.nbytes

    def to(self, device: torch.device, *, channels_last: bool, dtype: torch.dtype) -> "Split":
        """Copy of the split on a device: 4-D inputs in channels-last memory format if requested, floating-point inputs in ``dtype``."""
        memory_format = torch.channels_last if channels_last and self.inputs.ndim == 4 else torch.contiguous_format
        inputs = self.inputs.to(device, dtype if self.inputs.is_floating_point() else None)
        return Split(inputs.contiguous(memory_format=memory_format), self.targets.to(device))


def is_channels_last(inputs: torch.Tensor) -> bool:
    """Whether inputs are 4-D and in channels-last memory format only, not also contiguous."""
    return inputs.ndim == 4 and inputs.is_contiguous(memory_format=torch.channels_last) and not inputs.is_contiguous()


@dataclass(frozen=True)
class LoadedData:
    """A data set in host memory that has passed all checks."""

    train: Split
    validation: Split
    test: Split | None
    transform: Callable[[torch.Tensor], torch.Tensor]
    """Function that turns stored inputs into model inputs, on the device."""
    is_mapped: bool
    """Whether the training split is mapped from a file."""
    checksum: str
    """Checksum of the shapes, dtypes and a sample of the bytes of all splits."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one transformed input, without the batch dimension."""
        return tuple(self.transform(self.train.inputs[:1]).shape[1:])

    @cached_property
    def num_classes(self) -> int | None:
        """Number of classes of integer targets; None for floating-point targets. Reads every target, once per data set."""
        if self.train.targets.is_floating_point():
            return None
        return int(max(int(split.targets.max()) for split in (self.train, self.validation)) + 1)

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the training and validation splits on a device."""
        return self.train.num_bytes + self.validation.num_bytes


_loaded: tuple[str, LoadedData] | None = None


def load_data(config: TrialConfig) -> LoadedData:
    """Load the data set that a configuration names, or return it from memory if this process loaded it last.

    Raises:
        DataError: the data set is missing, unreadable or malformed.
        ConfigError: ``data._target_`` is not allowed or refuses its values.
    """
    global _loaded  # noqa: PLW0603  # a process keeps one data set
    key = json.dumps([config.data, config.allowed_targets], sort_keys=True, default=str)
    if _loaded is None or _loaded[0] != key:
        _loaded = None  # frees the old data set before the new one takes memory
        _loaded = (key, _load(config))
    return _loaded[1]


def _load(config: TrialConfig) -> LoadedData:
    load = build_partial(config.data, config.allowed_targets, "data")
    name = config.data["_target_"]
    try:
        splits = load()
    except AutotuneError:
        raise
    except Exception as error:
        raise DataError(f"data: {name} failed: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(splits, Mapping) or not {"train", "validation"} <= set(splits):
        found = list(splits) if isinstance(splits, Mapping) else type(splits).__name__
        raise DataError(f"data: {name} returned {found}, accepted is a mapping with train, validation and optionally test and transform")
    transform = splits.get("transform", _unchanged)
    if not callable(transform):
        raise DataError(f"data: {name}: transform: found {type(transform).__name__}, accepted is something that can be called")
    checked = {split: _split(splits[split], f"data: {name}: {split}") for split in ("train", "validation", "test") if split in splits}
    train = splits["train"]
    is_mapped = isinstance(train, tuple | list) and isinstance(train[0], np.memmap)
    return LoadedData(checked["train"], checked["validation"], checked.get("test"), transform, is_mapped, _checksum(checked))


def _unchanged(inputs: torch.Tensor) -> torch.Tensor:
    return inputs


def _split(given: Any, where: str) -> Split:
    if isinstance(given, Dataset):
        given = _read(given, where)
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise DataError(f"{where}: found {type(given).__name__}, accepted is a pair (inputs, targets) or a map-style Dataset")
    try:
        inputs, targets = (_tensor(array) for array in given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{where}: found {type(given[0]).__name__} and {type(given[1]).__name__}, accepted are tensors or arrays"
        ) from error
    if inputs.ndim == 0 or targets.ndim == 0:
        raise DataError(f"{where}: found a single number, accepted are inputs [samples, ...] and targets [samples, ...]")
    if len(inputs) != len(targets) or len(inputs) == 0:
        raise DataError(f"{where}: found {len(inputs)} inputs and {len(targets)} targets, accepted is the same number, at least one")
    return Split(inputs, targets)


def _tensor(array: Any) -> torch.Tensor:
    """A tensor or array as a tensor in host memory; an array, mapped from a file or not, shares its memory with the result."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nothing here writes to it
        return torch.as_tensor(array).detach().cpu()


def _read(dataset: Dataset[Any], where: str) -> Any:
    try:
        size = len(dataset)  # type: ignore[arg-type]  # map-style by contract
        return next(iter(DataLoader(dataset, batch_size=size, collate_fn=default_collate)))
    except Exception as error:
        name = type(dataset).__name__
        raise DataError(f"{where}: reading {name} failed: {type(error).__name__}: {' '.join(str(error).split())}") from error


def _checksum(splits: Mapping[str, Split]) -> str:
    digest = hashlib.sha256()
    for name, split in splits.items():
        for tensor in (split.inputs, split.targets):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            sample = tensor[:: max(1, len(tensor) // 256)].contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes() if sample.ndim else b"")
    return digest.hexdigest()[:16]


def fits_on(device: torch.device, data: LoadedData) -> bool:
    """Whether the data set can be kept on the device; for the CPU, whether it is in host memory and not mapped from a file."""
    free = free_memory_bytes(device)
    return not data.is_mapped if free is None else data.num_bytes <= free * _FITS_FRACTION
