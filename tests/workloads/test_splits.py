"""Splitting of samples by class, standardising by channel, and data mapped from NumPy files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.errors import DataError
from autotune.training.data import memory_format_of
from autotune.workloads.splits import Standardise, memory_mapped, stratified_split


def test_a_split_is_whole_and_fixed_and_keeps_each_class_share() -> None:
    targets = torch.tensor([0] * 500 + [1] * 300 + [2] * 3)[
        torch.randperm(803, generator=torch.Generator().manual_seed(0))
    ]
    kept, held_out = stratified_split(targets, 80)
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(803))
    counts = targets[held_out].bincount(minlength=3)
    assert counts.sum() == 80
    assert (counts - torch.tensor([500, 300, 3]) * 80 / 803).abs().max() < 1
    torch.manual_seed(99)
    assert torch.equal(held_out, stratified_split(targets, 80)[1])


def test_standardised_images_keep_their_memory_format_and_the_bytes_stay_as_they_are() -> None:
    standardise = Standardise(mean=(0.5, 0.25), std=(0.5, 0.125))
    images = (
        torch.tensor([[0, 255], [0, 255]], dtype=torch.uint8).view(1, 2, 1, 2).expand(3, 2, 4, 2)
    )
    for memory_format in (torch.contiguous_format, torch.channels_last):
        given = images.contiguous(memory_format=memory_format)
        made = standardise(given)
        assert made.dtype is torch.float32
        assert torch.allclose(made[0, :, 0], torch.tensor([[-1.0, 1.0], [-2.0, 6.0]]))
        assert memory_format_of(made) is memory_format
        assert torch.equal(given, images)


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
    wanted = (BYTES[3:5, 1] / 255 - 0.2) / 0.25
    np.testing.assert_allclose(batch[:, 1].numpy(), wanted, rtol=1e-5)


def test_a_test_split_is_taken_where_it_is_there_and_tokens_are_left_alone(tmp_path: Path) -> None:
    tokens = np.arange(20).reshape(10, 2)
    arrays = dict.fromkeys(("train_inputs", "test_inputs", "test_targets"), tokens)
    assert set(read(write(tmp_path, **arrays))) == {"train", "validation", "test"}


@pytest.mark.parametrize(
    ("arrays", "settings", "said"),
    [
        (
            {},
            {"mean": [0.1, 0.2], "std": [1.0, 1.0]},
            "give mean and std of each of the 3 channels",
        ),
        ({}, {"scale": 0}, "scale and std must be above 0"),
        (
            {"train_inputs": np.array([{"a": 1}], dtype=object)},
            {},
            "train_inputs.npy cannot be read",
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
    with pytest.raises(DataError, match=r"train_inputs\.npy cannot be read"):
        read(tmp_path / "nope")
