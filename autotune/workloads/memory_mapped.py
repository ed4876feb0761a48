"""A data set in memory-mapped NumPy files: it may be larger than the memory, since only the
requested batches are read.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.errors import DataError
from autotune.remote import fetched, is_file
from autotune.workloads.splits import Standardise


def memory_mapped(
    *, root: str, scale: float, mean: Sequence[float] | None, std: Sequence[float] | None
) -> dict[str, Any]:
    """Splits ``train``, ``validation`` and, if its files exist, ``test`` from
    ``<split>_inputs.npy`` and ``<split>_targets.npy``.

    Inputs are ``[samples, ...]`` of any type, such as bytes, and are read as they are; on the
    device they become float32, are divided by ``scale``, and each channel (dimension 1) is
    standardised by its ``mean`` and ``std``. Inputs of integer types other than bytes, such as
    tokens, are not transformed. Targets are ``[samples]`` or ``[samples, ...]``.

    Raises:
        DataError: a file is missing or no array, only one of ``mean`` and ``std`` is given, or they
            do not fit the inputs.
    """
    names = [
        "train",
        "validation",
        *(["test"] if is_file(f"{root}/test_inputs.npy", "data.root") else []),
    ]
    splits: dict[str, Any] = {
        split: tuple(_mapped(f"{root}/{split}_{part}.npy") for part in ("inputs", "targets"))
        for split in names
    }
    inputs = splits["train"][0]
    if inputs.dtype == np.uint8 or inputs.dtype.kind == "f":
        num_channels = inputs.shape[1] if inputs.ndim > 1 else 0
        if (mean is None) != (std is None) or (
            mean and std and not len(mean) == len(std) == num_channels
        ):
            raise DataError(
                f"data: give mean and std of each of the {num_channels} channels, or neither"
            )
        if not min(scale, *(std or ()), 1) > 0:
            raise DataError(f"data: scale and std must be above 0, found {scale} and {std}")
        splits["transform"] = Standardise(
            mean or [0], std or [1], scale=scale, num_dimensions=max(2, inputs.ndim)
        )
    return splits


def _mapped(location: str) -> "np.ndarray[Any, Any]":
    path = fetched(location, "data.root")
    try:
        mapped = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"data.root: {path} cannot be mapped, as numpy.save writes it: {reason}"
        ) from error
    if not isinstance(mapped, np.memmap) or mapped.ndim == 0 or mapped.dtype.kind not in "biufc":
        raise DataError(f"data.root: {path} holds no array [samples, ...] of numbers")
    return mapped
