"""Which samples a step sees, wherever the data lies and whoever gathers it."""

import threading
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch

from autotune.training.batches import Batch, host_batches, resident_batches, sample_order
from autotune.training.data import Split

CPU = torch.device("cpu")
SPLIT = Split(torch.arange(40.0).view(20, 2), torch.arange(20))


def order(*, total_steps: int = 7, first_step: int = 0, seed: int = 5) -> list[list[int]]:
    return [each.tolist() for each in sample_order(20, 6, total_steps, seed, first_step=first_step, device=CPU)]


def test_an_epoch_shows_each_sample_at_most_once_and_leaves_the_incomplete_batch_out() -> None:
    batches = order(total_steps=6)
    assert [len(each) for each in batches] == [6] * 6
    for epoch in (batches[:3], batches[3:]):
        assert len({sample for batch in epoch for sample in batch}) == 18
    assert batches[:3] != batches[3:]


def test_a_schedule_may_end_within_an_epoch() -> None:
    assert order(total_steps=4) == order(total_steps=6)[:4]


def test_an_order_taken_up_again_is_the_rest_of_it() -> None:
    for first_step in range(7):
        assert order(first_step=first_step) == order()[first_step:]


def test_a_seed_gives_its_own_order() -> None:
    assert order() == order()
    assert order() != order(seed=6)


def sources() -> dict[str, Iterator[Batch]]:
    def steps() -> Iterator[torch.Tensor]:
        return sample_order(20, 6, 7, 5, first_step=0, device=CPU)

    settings = {"prefetch_batches": 2, "device": CPU}
    return {
        "resident": resident_batches(SPLIT, steps()),
        "thread": host_batches(SPLIT, steps(), num_workers=0, **settings),
        "processes": host_batches(SPLIT, steps(), num_workers=2, **settings),
    }


@pytest.mark.parametrize("source", ["resident", "thread", "processes"])
def test_batches_hold_the_samples_of_the_order_in_its_order(source: str) -> None:
    batches = list(sources()[source])
    assert [batch.samples.tolist() for batch in batches] == order()
    for batch in batches:
        assert torch.equal(batch.inputs, SPLIT.inputs[batch.samples])
        assert torch.equal(batch.targets, SPLIT.targets[batch.samples])


def test_rows_keep_their_memory_format() -> None:
    images = torch.randn(20, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    (batch,) = islice(resident_batches(Split(images, SPLIT.targets), iter([torch.tensor([3, 1])])), 1)
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch.inputs, images[[3, 1]])


def test_a_thread_gathers_no_more_than_it_is_told_ahead_and_ends_with_its_reader() -> None:
    taken = []

    def steps() -> Iterator[torch.Tensor]:
        for step in range(1000):
            taken.append(step)
            yield torch.tensor([0])

    before = threading.active_count()
    batches = host_batches(SPLIT, steps(), num_workers=0, prefetch_batches=3, device=CPU)
    next(batches)
    batches.close()
    assert threading.active_count() == before
    assert 1 <= len(taken) <= 1 + 3 + 2  # given, waiting, and the one in hand when the reader left


def test_what_fails_in_the_thread_is_raised_where_the_batch_is_wanted() -> None:
    def steps() -> Iterator[torch.Tensor]:
        yield torch.tensor([0])
        raise OSError("the disk is gone")

    batches = host_batches(SPLIT, steps(), num_workers=0, prefetch_batches=2, device=CPU)
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_a_split_mapped_from_a_read_only_file_is_gathered(tmp_path) -> None:  # type: ignore[no-untyped-def]
    np.save(tmp_path / "inputs.npy", SPLIT.inputs.numpy())
    mapped = np.load(tmp_path / "inputs.npy", mmap_mode="c")
    split = Split(torch.from_numpy(mapped), SPLIT.targets)
    (batch,) = host_batches(split, iter([torch.tensor([7, 2])]), num_workers=0, prefetch_batches=1, device=CPU)
    assert torch.equal(batch.inputs, SPLIT.inputs[[7, 2]])
