"""The data path: how the training's batches come to the device.

Which samples a step sees depends on the seed alone, never on where the data lies or who gathers it. A split on the device is
gathered there. One in host memory (or mapped from a file larger than memory) is gathered ahead by a thread or by worker
processes, and copied to a GPU from pinned memory on a stream of its own while the step before is computed.
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
    """Inputs ``[batch, ...]``, targets ``[batch, ...]`` and indices of the samples in the training split ``[batch]``."""

    inputs: torch.Tensor
    targets: torch.Tensor
    samples: torch.Tensor


def sample_order(
    num_samples: int, batch_size: int, total_steps: int, seed: int, *, first_step: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Indices ``[batch]`` of every step from ``first_step``: each epoch in a new order, its incomplete last batch left out.

    The order is drawn on the CPU, so that it is the same on every device, and moved an epoch at a time; from pinned memory, so that
    the host need not wait for a GPU there.
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
    """Batches of a split that lies on the device of the order."""
    for samples in order:
        yield _gather(split, samples)


def host_batches(
    split: Split, order: Iterator[torch.Tensor], *, num_workers: int, prefetch_batches: int, device: torch.device
) -> Generator[Batch]:
    """Batches on the device of a split in host memory, gathered and copied ahead.

    Args:
        split: in host memory.
        order: indices of each batch, in host memory.
        num_workers: processes that gather; with 0 a thread does.
        prefetch_batches: batches gathered ahead, by the thread or by each process.
        device: what is trained on.
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
    """Rows of a tensor, in its memory format."""
    if is_channels_last(inputs):
        return inputs.permute(0, 2, 3, 1).index_select(0, samples).permute(0, 3, 1, 2)
    return inputs.index_select(0, samples)


def _pinned(batch: Batch, pinned: bool) -> Batch:
    return Batch(*(each.pin_memory() for each in batch)) if pinned else batch


def _ahead(batches: Iterator[Batch], num_batches: int) -> Generator[Batch]:
    """What a thread takes from an iterator, at most ``num_batches`` ahead of who takes it from here."""
    made: queue.Queue[Batch | BaseException | None] = queue.Queue(num_batches)
    ended = threading.Event()

    def make() -> None:
        last: BaseException | None = None
        try:
            for batch in batches:
                made.put(batch)
                if ended.is_set():
                    return
        except BaseException as error:  # noqa: BLE001  # it is raised again where the batch is wanted
            last = error
        made.put(last)

    thread = threading.Thread(target=make, name="batches", daemon=True)
    thread.start()
    try:
        while (batch := made.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        ended.set()
        while thread.is_alive():
            try:
                made.get(timeout=0.05)  # lets a put return that waits
            except queue.Empty:
                continue


class _Rows(Dataset[Batch]):
    """A split whose batches are gathered at once."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __getitem__(self, sample: int) -> Batch:
        return self.__getitems__([sample])

    def __getitems__(self, samples: list[int]) -> Batch:
        return _gather(self._split, torch.tensor(samples))


class _Order(Sampler[list[int]]):
    """An order of batches, gone through once."""

    def __init__(self, order: Iterator[torch.Tensor]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[list[int]]:
        return (samples.tolist() for samples in self._order)


def _by_processes(split: Split, order: Iterator[torch.Tensor], num_workers: int, prefetch_batches: int, pinned: bool) -> Generator[Batch]:
    """Batches that worker processes gather, in order."""
    yield from DataLoader(
        _Rows(split),
        batch_sampler=_Order(order),
        num_workers=num_workers,
        prefetch_factor=prefetch_batches,
        pin_memory=pinned,
        collate_fn=_as_it_is,
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _moved_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Batches on the device: on a GPU each is copied on a stream of its own while the one before is trained on."""
    if device.type != "cuda":
        yield from batches
        return
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # missing in torch's stubs
    coming: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        ready, coming = coming, _copied(batch, device, aside)
        if ready is not None:
            yield _arrived(*ready)
    if coming is not None:
        yield _arrived(*coming)


def _copied(batch: Batch, device: torch.device, aside: torch.cuda.Stream) -> tuple[Batch, torch.cuda.Event]:
    """A batch on its way to the device, and the event of its arrival."""
    with torch.cuda.stream(aside):
        return Batch(*(each.to(device, non_blocking=True) for each in batch)), aside.record_event()


def _arrived(batch: Batch, arrival: torch.cuda.Event) -> Batch:
    """The batch, for use on the current stream: the stream waits for it, the host does not."""
    current = torch.cuda.current_stream()
    current.wait_event(arrival)
    for each in batch:
        each.record_stream(current)
    return batch
