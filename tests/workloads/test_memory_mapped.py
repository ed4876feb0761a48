"""Data sets mapped from NumPy files: read a batch at a time, standardised where they are trained
on.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.errors import DataError
from autotune.workloads.memory_mapped import memory_mapped

BYTES = np.random.default_rng(0).integers(0, 256, (40, 3, 4, 4), dtype=np.uint8)


def write(folder: Path, **arrays: Any) -> Path:
    files = {
        "train_inputs": BYTES,
        "train_targets": np.arange(40) % 2,
        "validation_inputs": BYTES[:8],
        "validation_targets": np.arange(8) % 2,
    }
    for name, array in {**files, **arrays}.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def read(folder: Path, **settings: Any) -> dict[str, Any]:
    return memory_mapped(root=str(folder), **{"scale": 255, "mean": None, "std": None, **settings})


def test_inputs_stay_in_the_file_and_are_standardised_a_batch_at_a_time(tmp_path: Path) -> None:
    splits = read(write(tmp_path), mean=[0.1, 0.2, 0.3], std=[0.5, 0.25, 2.0])
    assert isinstance(splits["train"][0], np.memmap)
    assert "test" not in splits
    batch = splits["transform"](torch.from_numpy(BYTES[3:5]))
    wanted = (BYTES[3:5] / 255 - np.array([0.1, 0.2, 0.3]).reshape(1, 3, 1, 1)) / np.array(
        [0.5, 0.25, 2.0]
    ).reshape(1, 3, 1, 1)
    np.testing.assert_allclose(batch.numpy(), wanted, rtol=1e-5)


def test_a_test_split_is_taken_where_it_is_there_and_tokens_are_left_alone(tmp_path: Path) -> None:
    tokens = np.arange(20).reshape(10, 2)
    names = [
        f"{split}_{part}"
        for split in ("train", "validation", "test")
        for part in ("inputs", "targets")
    ]
    splits = read(write(tmp_path, **dict.fromkeys(names, tokens)))
    assert set(splits) == {"train", "validation", "test"}


@pytest.mark.parametrize(
    ("arrays", "settings", "said"),
    [
        (
            {},
            {"mean": [0.1, 0.2], "std": [1.0, 1.0]},
            "give mean and std of each of the 3 channels, or neither",
        ),
        ({}, {"mean": [0.1, 0.2, 0.3]}, "give mean and std of each of the 3 channels, or neither"),
        ({}, {"scale": 0}, "scale and std must be above 0"),
        ({"train_inputs": np.float32(3)}, {}, "train_inputs.npy holds no array [samples, ...]"),
        (
            {"train_inputs": np.array([{"a": 1}], dtype=object)},
            {},
            "train_inputs.npy cannot be mapped",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, arrays: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError) as refused:
        read(write(tmp_path, **arrays), **settings)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train_inputs\.npy cannot be mapped"):
        read(tmp_path)
