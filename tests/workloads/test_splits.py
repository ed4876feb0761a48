"""Splitting of samples by class, and standardising by channel."""

import pytest
import torch

from autotune.training.data import is_channels_last
from autotune.workloads.splits import Standardise, stratified_split


def test_split_is_disjoint_whole_and_fixed() -> None:
    targets = torch.arange(100) % 7
    kept, held_out = stratified_split(targets, 30)
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(100))
    torch.manual_seed(99)
    again = stratified_split(targets, 30)
    assert torch.equal(kept, again[0])
    assert torch.equal(held_out, again[1])


def test_split_keeps_each_class_share() -> None:
    targets = torch.tensor([0] * 500 + [1] * 300 + [2] * 3)[
        torch.randperm(803, generator=torch.Generator().manual_seed(0))
    ]
    _, held_out = stratified_split(targets, 80)
    counts = targets[held_out].bincount(minlength=3)
    assert counts.sum() == 80
    assert (counts - torch.tensor([500, 300, 3]) * 80 / 803).abs().max() < 1


def test_split_does_not_take_samples_in_file_order() -> None:
    _, held_out = stratified_split(torch.zeros(100, dtype=torch.int64), 10)
    assert len(set(held_out.diff().tolist())) > 1


@pytest.mark.parametrize("num_held_out", [-1, 5, 6])
def test_split_that_leaves_nothing_is_refused(num_held_out: int) -> None:
    with pytest.raises(ValueError, match="of 5 samples"):
        stratified_split(torch.zeros(5, dtype=torch.int64), num_held_out)


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
        assert is_channels_last(made) is (memory_format is torch.channels_last)
        assert torch.equal(given, images)
