"""A data set in memory-mapped NumPy files: it may be larger than the memory, since only the requested batches are read."""

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.errors import DataError
from autotune.remote.cache import fetched
from autotune.remote.path import located
from autotune.workloads.limits import check_size


def memory_mapped(*, root: str, scale: float, mean: Sequence[float] | None, std: Sequence[float] | None) -> dict[str, Any]:
    """Splits ``train``, ``validation`` and, if its files exist, ``test`` from ``<split>_inputs.npy`` and ``<split>_targets.npy``.

    Inputs are ``[samples, ...]`` of any type, such as bytes, and are read as they are; on the device they become float32, are
    divided by ``scale``, and each channel (dimension 1) is standardised by its ``mean`` and ``std``. Inputs of integer types other
    than bytes, such as tokens, are not transformed. Targets are ``[samples]`` or ``[samples, ...]``.

    Raises:
        DataError: a file is missing or no array, only one of ``mean`` and ``std`` is given, or they do not fit the inputs.
    """
    folder = located(root, "data.root")
    names = [split for split in ("train", "validation", "test") if split != "test" or (folder / "test_inputs.npy").is_file()]
    files = {split: [fetched(folder / f"{split}_{part}.npy") for part in ("inputs", "targets")] for split in names}
    splits: dict[str, Any] = {split: tuple(_mapped(path) for path in paths) for split, paths in files.items()}
    inputs = splits["train"][0]
    if inputs.dtype == np.uint8 or inputs.dtype.kind == "f":
        splits["transform"] = _standardiser(scale, mean, std, num_channels=inputs.shape[1] if inputs.ndim > 1 else 0)
    return splits


def _mapped(path: Path) -> "np.ndarray[Any, Any]":
    accepted = "accepted are SPLIT_inputs.npy and SPLIT_targets.npy, as numpy.save writes arrays of numbers"
    try:
        check_size(path, sys.maxsize)  # it is a file: a pipe would be waited for
        with warnings.catch_warnings(action="error"):  # NumPy warns of a shape whose size it cannot count
            mapped = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError as error:
        raise DataError(f"data.root: {path} is not there; {accepted}") from error
    except DataError:
        raise
    except Exception as error:  # a damaged header can raise anything
        raise DataError(f"data.root: {path} cannot be mapped: {' '.join(str(error).split())}; {accepted}") from error
    if mapped.ndim == 0 or mapped.dtype.kind not in "biufc":
        raise DataError(f"data.root: {path} holds no array [samples, ...] of numbers; {accepted}")
    return mapped


def _standardiser(
    scale: float, mean: Sequence[float] | None, std: Sequence[float] | None, *, num_channels: int
) -> Callable[[Tensor], Tensor]:
    if (mean is None) != (std is None):
        raise DataError(f"data: found mean {mean} and std {std}, accepted are both or neither")
    if not scale > 0 or (std is not None and not min(std) > 0):
        raise DataError(f"data: found scale {scale} and std {std}, accepted are numbers above 0")
    if mean is not None and std is not None and not len(mean) == len(std) == num_channels:
        raise DataError(f"data: found {len(mean)} means and {len(std)} stds for {num_channels} channels, accepted is one for each")

    @cache
    def moments(device: torch.device, num_dimensions: int) -> Tensor:
        """Mean and standard deviation ``[2, 1, channels, 1, ...]``, copied to a device only once: each copy makes the host wait."""
        return torch.tensor([mean, std], device=device).view(2, 1, num_channels, *(1,) * (num_dimensions - 2))

    def standardise(inputs: Tensor) -> Tensor:
        inputs = inputs.to(torch.float32) / scale
        if mean is None:
            return inputs
        means, deviations = moments(inputs.device, inputs.ndim)
        return inputs.sub_(means).div_(deviations)

    return standardise
