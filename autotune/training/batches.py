"""The data path: gathers the training's batches and brings them to the device.

The samples of a step depend on the seed alone, never on where the data is or which process gathers it. Batches of a split on the
device are gathered there. Batches of a split in host memory (or mapped from a file larger than memory) are gathered ahead by a thread
or by worker processes, and copied to a GPU from pinned memory on a separate stream while the previous step is computed.
"""

import queue
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from autotune.training.data import Split, is_channels_last


class Batch(NamedTuple):
    """One batch: inputs ``[batch, ...]``, targets ``[batch, ...]`` and the samples' indices in the training split ``[batch]``."""

    inputs: torch.Tensor
    targets: torch.Tensor
    samples: torch.Tensor


def sample_order(
    num_samples: int, batch_size: int, total_steps: int, seed: int, *, first_step: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Yield the sample indices ``[batch]`` of every step from ``first_step`` on.

    Each epoch has a new order, without its incomplete last batch. The order is drawn on the CPU, so that it is the same for every
    device. It is moved one epoch at a time; to a GPU from pinned memory, so that the host does not wait for the copy.
    """
    generator = torch.Generator().manual_seed(seed)
    steps_per_epoch = num_samples // batch_size
    for step in range(0, total_steps, steps_per_epoch):
        order = torch.randperm(num_samples, generator=generator)
        last = min(steps_per_epoch, total_steps - step)
        if first_step < step + last:
            moved = order.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else order
            batches = torch.split(moved, batch_size)
            yield from batches[max(0, first_step - step) : last]


def resident_batches(split: Split, order: Iterator[torch.Tensor]) -> Generator[Batch]:
    """Yield batches of a split that is on the same device as the indices in ``order``."""
    for samples in order:
        yield _gather(split, samples)


def host_batches(
    split: Split, order: Iterator[torch.Tensor], *, num_workers: int, prefetch_batches: int, device: torch.device
) -> Generator[Batch]:
    """Yield batches of a split in host memory, gathered ahead of time and copied to the device.

    Args:
        split: the split, in host memory.
        order: sample indices of each batch, in host memory.
        num_workers: number of processes that gather; 0 for a thread.
        prefetch_batches: number of batches gathered ahead, by the thread or by each process.
        device: the device that trains.
    """
    pinned = device.type == "cuda"
    if num_workers == 0:
        gathered: Generator[Batch] = _ahead((_pinned(_gather(split, samples), pinned) for samples in order), prefetch_batches)
    else:
        gathered = _by_processes(split, order, num_workers, prefetch_batches, pinned)
    with closing(gathered):
        yield from _moved_ahead(gathered, device)


def _gather(split: Split, samples: torch.Tensor) -> Batch:
    return Batch(_rows(split.inputs, samples), split.targets.index_select(0, samples), samples)


def _rows(inputs: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """The selected rows of a tensor, in the tensor's memory format."""
    if is_channels_last(inputs):
        return inputs.permute(0, 2, 3, 1).index_select(0, samples).permute(0, 3, 1, 2)
    return inputs.index_select(0, samples)


def _pinned(batch: Batch, pinned: bool) -> Batch:
    return Batch(*(tensor.pin_memory() for tensor in batch)) if pinned else batch


def _ahead(batches: Iterator[Batch], num_batches: int) -> Generator[Batch]:
    """Yield batches that a thread takes from an iterator, at most ``num_batches`` ahead of the consumer."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(num_batches)
    ended = threading.Event()

    def fill() -> None:
        last: BaseException | None = None
        try:
            for batch in batches:
                ready.put(batch)
                if ended.is_set():
                    return
        except BaseException as error:  # noqa: BLE001  # the consumer raises it again
            last = error
        ready.put(last)

    thread = threading.Thread(target=fill, name="batches", daemon=True)
    thread.start()
    try:
        while (batch := ready.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        ended.set()
        while thread.is_alive():
            try:
                ready.get(timeout=0.05)  # unblocks a put that waits for a free place
            except queue.Empty:
                continue


class _Rows(Dataset[Batch]):
    """A split as a Dataset that gathers a whole batch in one call."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __getitem__(self, sample: int) -> Batch:
        return self.__getitems__([sample])

    def __getitems__(self, samples: list[int]) -> Batch:
        return _gather(self._split, torch.tensor(samples))


class _Order(Sampler[list[int]]):
    """The sample indices of all batches as a Sampler; can be iterated only once."""

    def __init__(self, order: Iterator[torch.Tensor]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[list[int]]:
        return (samples.tolist() for samples in self._order)


def _by_processes(split: Split, order: Iterator[torch.Tensor], num_workers: int, prefetch_batches: int, pinned: bool) -> Generator[Batch]:
    """Yield batches that worker processes gather, in the given order."""
    yield from DataLoader(
        _Rows(split),
        batch_sampler=_Order(order),
        num_workers=num_workers,
        prefetch_factor=prefetch_batches,
        pin_memory=pinned,
        collate_fn=_unchanged,
    )


def _unchanged(batch: Any) -> Any:
    return batch


def _moved_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches moved to the device; a GPU copies each batch on a separate stream while it trains on the previous batch."""
    if device.type != "cuda":
        yield from batches
        return
    copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # missing in torch's stubs
    coming: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        previous, coming = coming, _copied(batch, device, copy_stream)
        if previous is not None:
            yield _arrived(*previous)
    if coming is not None:
        yield _arrived(*coming)


def _copied(batch: Batch, device: torch.device, copy_stream: torch.cuda.Stream) -> tuple[Batch, torch.cuda.Event]:
    """Start the copy of a batch to the device: the copy, and the event that marks its completion."""
    with torch.cuda.stream(copy_stream):
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in batch)), copy_stream.record_event()


def _arrived(batch: Batch, arrival: torch.cuda.Event) -> Batch:
    """The batch, ready for the current stream: the stream waits until the copy has completed, the host does not wait."""
    current = torch.cuda.current_stream()
    current.wait_event(arrival)
    for tensor in batch:
        tensor.record_stream(current)
    return batch
